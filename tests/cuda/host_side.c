/* What the host's side of the CUDA backend decides, looked at without a GPU: bytes of workspaces, sizes
   that it refuses, before anything is enqueued, and whose CUDA context is current meanwhile. The context
   is none that was created; nothing here reaches CUDA. */
#include "cuda_blas.h"
#include "cuda_driver.h"
#include "cuda_sm90.h"
#include "kernel.h"
#include "plans.h"

#include <criterion/criterion.h>
#include <string.h>

/* The driver of one thread, which has this stack of contexts. */
enum { DEPTH = 8 };
static struct { CUcontext stack[DEPTH]; int depth, encoded, stray; } driver_state;
static CUcontext other(int n) { return (CUcontext)(uintptr_t)(4096 + n); }
static CUcontext top(void) {
    return driver_state.depth ? driver_state.stack[driver_state.depth - 1] : NULL;
}
static CUresult get_current(CUcontext *out) { return *out = top(), CUDA_SUCCESS; }
static CUresult push(CUcontext c) {
    cr_assert_lt(driver_state.depth, DEPTH);
    driver_state.stack[driver_state.depth++] = c;
    return CUDA_SUCCESS;
}
static CUresult pop(CUcontext *out) {
    cr_assert_gt(driver_state.depth, 0);
    *out = top();
    driver_state.depth -= 1;
    return CUDA_SUCCESS;
}
static CUresult encode(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                       const cuuint64_t *extent, const cuuint64_t *stride, const cuuint32_t *box,
                       const cuuint32_t *step, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                       CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    (void)map, (void)type, (void)rank, (void)address, (void)extent, (void)stride, (void)box, (void)step;
    (void)interleave, (void)swizzle, (void)promotion, (void)fill;
    driver_state.encoded += 1;
    return top() == other(0) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}
static struct fattni_cuda_driver driver = {.get_current = get_current, .push = push, .pop = pop, .encode = encode};

static void *note_alloc(void *user, size_t bytes, size_t align, fattn_stream s) {
    (void)user, (void)bytes, (void)align, (void)s;
    driver_state.stray += top() != other(0);
    return (void *)4096;
}
static void note_free(void *user, void *p, size_t bytes, fattn_stream s) {
    (void)user, (void)p, (void)bytes, (void)s;
    driver_state.stray += top() != other(0);
}

/* A Hopper, or one that is capped at sm_80. */
static fattn_ctx context_of(int arch) {
    driver.context = other(0);
    return (fattn_ctx){.device = FATTN_CUDA,
                       .gpu = {.arch = arch, .sms = 132, .l2_bytes = (size_t)50 << 20,
                               .shared_limit = 232448, .driver = &driver},
                       .allocator = {note_alloc, note_free, NULL}};
}

Test(host_side, bytes_do_not_depend_on_places_or_d_o, .timeout = 120) {
    for (int arch = 80; arch <= 90; arch += 10) {
        fattn_ctx ctx = context_of(arch);
        ctx.gpu.blas = (struct fattni_cuda_blas *)&driver; /* STANDARD wants to know that there is one */
        cr_assert_gt(plans_check(&ctx), 100000);
    }
}

/* ---- whose context is current ---- */

typedef struct shapes {
    fattn_tensor q, k, lse;
    fattn_attention_params p;
    fattn_attention_io io;
} shapes;

static void self(shapes *x, fattn_dtype dtype, int64_t H, int64_t Sq, int64_t Sk, int64_t D) {
    void *const somewhere = (void *)4096;
    *x = (shapes){.q = fattn_tensor_view(somewhere, dtype, FATTN_CUDA, 0, 4, (int64_t[]){1, H, Sq, D}),
                  .k = fattn_tensor_view(somewhere, dtype, FATTN_CUDA, 0, 4, (int64_t[]){1, H, Sk, D}),
                  .lse = fattn_tensor_view(somewhere, dtype == FATTN_F64 ? dtype : FATTN_F32, FATTN_CUDA, 0, 3,
                                           (int64_t[]){1, H, Sq}),
                  .p = {.struct_size = sizeof x->p},
                  .io = {.struct_size = sizeof x->io}};
    x->io.q = x->io.o = x->io.d_o = x->io.dq = &x->q;
    x->io.k = x->io.v = x->io.dk = x->io.dv = &x->k;
    x->io.lse = &x->lse;
}

static void check_maps(fattn_ctx *ctx, int depth) {
    shapes x;
    self(&x, FATTN_BF16, 2, 300, 300, 64);
    for (int pass = FATTNI_FWD; pass <= FATTNI_BWD; ++pass) {
        fattni_problem p;
        fattni_sm90_args args;
        cr_assert_eq(fattni_problem_init(ctx, &x.p, &x.io, (enum fattni_pass)pass, true, &p), FATTN_OK);
        const fattni_cuda_kernel *const k = fattni_cuda_find(ctx, &p);
        cr_assert(k && k->arch == 90);
        driver_state.encoded = 0;
        cr_assert_eq(fattni_sm90_args_of(ctx, &p, k, &args), FATTN_OK, "%s", fattn_ctx_error(ctx));
        cr_assert_eq(driver_state.encoded, 4);
        cr_assert_eq(driver_state.depth, depth);
    }
}

static void check_memory(fattn_ctx *ctx, int depth) {
    fattn_tensor t;
    cr_assert_eq(fattn_tensor_alloc(ctx, FATTN_F32, 1, (int64_t[]){77}, &t), FATTN_OK);
    fattn_tensor_free(ctx, &t);
    cr_assert_eq(driver_state.stray, 0);
    cr_assert_eq(driver_state.depth, depth);
}

/* A thread without a context, with another one's, with the right one. */
Test(host_side, what_is_called_finds_its_context_current) {
    fattn_ctx ctx = context_of(90);
    for (int n = 0; n < 3; ++n) {
        if (n) push(other(n == 1));
        const CUcontext before = top();
        check_maps(&ctx, n);
        check_memory(&ctx, n);
        cr_assert_eq(top(), before);
        bool entered, again;
        cr_assert_eq(fattni_cuda_enter(&ctx, &entered), FATTN_OK);
        cr_assert_eq(fattni_cuda_enter(&ctx, &again), FATTN_OK);
        cr_assert(entered == (n < 2) && !again && top() == other(0));
        fattni_cuda_leave(&ctx, again);
        fattni_cuda_leave(&ctx, entered);
        cr_assert_eq(top(), before);
    }
}
