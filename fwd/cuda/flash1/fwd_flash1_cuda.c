/* FATTN_ALGO_FLASH1, forward on the device (kernel: fwd_flash1.cu). Its backward is that of FLASH2: the
   first paper's loops over column blocks, too. */
#include "fwd/cuda/flash1/fwd_flash1_cuda.h"

#include "core/cuda/device.h"

#include <stdio.h>

extern void fattn_fwd_flash1_f32(fattni_flash1_args);
extern void fattn_fwd_flash1_f64(fattni_flash1_args);

/* A tile has one key per lane, or fewer if they do not fit the 48 KiB of shared memory of every device. */
enum { THREADS = 256, SHARED = 48 << 10, MOST_KEYS = 32 };

typedef struct layout {
    size_t o, max, sum, bytes; /* offsets in the workspace */
    int64_t keys;              /* of a tile */
    size_t shared;
} layout;

static layout layout_of(const fattni_problem *p) {
    const size_t real = fattn_dtype_size(fattni_standard_real(p));
    const int64_t rows = p->B * p->Hq * p->Sq, q = THREADS / 32 * p->D, key = p->D + 1 + p->Dv;
    layout l = {.keys = fattni_min(MOST_KEYS, ((int64_t)(SHARED / real) - q) / key)};
    l.shared = (size_t)(q + l.keys * key) * real;
    l.o = fattni_standard_reserve(&l.bytes, rows * p->Dv, real);
    l.max = fattni_standard_reserve(&l.bytes, rows, real);
    l.sum = fattni_standard_reserve(&l.bytes, rows, real);
    return l;
}

static const char *plan(const fattn_ctx *ctx, const fattni_problem *p, fattni_kernel_plan *out) {
    const char *const reason = fattni_cuda_why_unsupported(ctx, p);
    if (reason) return reason;
    (void)ctx;
    out->workspace = layout_of(p).bytes;
    out->deterministic = true;
    snprintf(out->name, sizeof out->name, "fattn_fwd_flash1_cuda_%s", fattn_dtype_name(p->dtype));
    return NULL;
}

static fattn_status run(fattn_ctx *ctx, const fattni_problem *p, const fattni_kernel_plan *plan) {
    (void)plan;
    const layout l = layout_of(p);
    char *const w = p->workspace;
    const fattni_flash1_args f = {
        .x = fattni_standard_args_of(p), .O = w + l.o, .max = w + l.max, .sum = w + l.sum, .keys = l.keys};
    const bool wide = fattni_standard_real(p) == FATTN_F64;
    const int64_t heads = p->Sq > 0 ? p->B * p->Hq : 0;
    return fattni_cuda_start(ctx, "fattn_fwd_flash1",
                             wide ? (fattni_cuda_any)fattn_fwd_flash1_f64 : (fattni_cuda_any)fattn_fwd_flash1_f32,
                             heads, THREADS, l.shared, &f);
}

const fattni_kernel fattni_fwd_flash1_cuda = {
    .family = "fattn_fwd_flash1_cuda",
    .device = FATTN_CUDA,
    .algorithms = 1u << FATTN_ALGO_FLASH1,
    .plan = plan,
    .run = run,
};
