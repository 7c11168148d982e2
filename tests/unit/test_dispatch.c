/* From a problem to a kernel: order, errors, the memory that a kernel needs. */
#include "core/attention/kernel.h"

#include <criterion/criterion.h>
#include <string.h>

enum { ANY = 1u << FATTN_ALGO_AUTO | 1u << FATTN_ALGO_STANDARD };

static int runs; /* of the kernel that did run: its number */
static const char choice[] = "the plan's choice";
static const char *no_causal(const fattn_ctx *ctx, const fattni_problem *p, fattni_kernel_plan *out) {
    (void)ctx;
    out->workspace = 1000;
    out->saved = 300;
    out->choice[1] = choice;
    return p->flags & FATTN_CAUSAL ? "has no causal mask" : NULL;
}
/* Needs no memory: the plan of a row that was skipped is discarded. */
static const char *no_wide_heads(const fattn_ctx *ctx, const fattni_problem *p, fattni_kernel_plan *out) {
    (void)ctx;
    cr_assert(out->workspace == 0 && out->saved == 0 && !out->choice[1]);
    return p->D > 4 ? "stops at head_dim 4" : NULL;
}
static fattn_status run_first(fattn_ctx *ctx, const fattni_problem *p, const fattni_kernel_plan *plan) {
    (void)ctx, (void)p;
    cr_assert(plan->choice[1] == choice);
    runs = 1;
    return FATTN_OK;
}
static fattn_status run_second(fattn_ctx *ctx, const fattni_problem *p, const fattni_kernel_plan *plan) {
    (void)p, (void)plan;
    runs = 2;
    return fattn_ctx_fail(ctx, FATTN_E_STATE, "the kernel's error message");
}

static const fattni_kernel gpu = {"fattn_gpu", FATTN_CUDA, ANY, no_causal, run_first};
static const fattni_kernel first = {"fattn_first", FATTN_CPU, ANY, no_causal, run_first};
static const fattni_kernel second = {"fattn_second", FATTN_CPU, 1u << FATTN_ALGO_AUTO, no_wide_heads, run_second};
static const fattni_kernel *const table[] = {&gpu, &first, &second, NULL};

typedef struct call {
    float room[3][5 * 8];
    fattn_tensor x, o, lse;
    fattn_attention_params p;
    fattn_attention_io io;
} call;

static fattn_ctx *ctx;
static call c;
_Alignas(256) static char memory[2048];

/* q, k, v are one tensor [1,1,5,D]: nothing is computed here. */
static void open_call(void) {
    cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK);
    c.x = fattn_tensor_view(c.room, FATTN_F32, FATTN_CPU, 0, 4, (int64_t[]){1, 1, 5, 4});
    c.o = c.x, c.o.data = c.room[1];
    c.lse = fattn_tensor_view(c.room[2], FATTN_F32, FATTN_CPU, 0, 3, (int64_t[]){1, 1, 5});
    c.p = (fattn_attention_params){.struct_size = sizeof c.p};
    c.io = (fattn_attention_io){.struct_size = sizeof c.io,
                                .q = &c.x,
                                .k = &c.x,
                                .v = &c.x,
                                .o = &c.o,
                                .lse = &c.lse,
                                .workspace = memory,
                                .workspace_bytes = 1000,
                                .saved = memory + 1024,
                                .saved_bytes = 300};
}
static void close_call(void) { fattn_ctx_destroy(ctx); }
TestSuite(dispatch, .init = open_call, .fini = close_call);

static fattn_status run(void) {
    fattni_call prepared;
    const fattn_status s = fattni_prepare(ctx, &c.p, &c.io, FATTNI_FWD, table, &prepared);
    return s ? s : fattni_run(ctx, &prepared);
}

#define REJECTED(status, says)                                                                                         \
    do {                                                                                                               \
        runs = 0;                                                                                                      \
        cr_assert_eq(run(), status, "%s", fattn_ctx_error(ctx));                                                       \
        cr_assert(strstr(fattn_ctx_error(ctx), says), "%s", fattn_ctx_error(ctx));                                     \
        cr_assert_eq(runs, 0);                                                                                         \
    } while (0)

Test(dispatch, the_first_row_that_supports_the_call_runs) {
    cr_assert_eq(run(), FATTN_OK);
    cr_assert_eq(runs, 1);
    c.p.flags = FATTN_CAUSAL;
    cr_assert_eq(run(), FATTN_E_STATE);
    cr_assert_eq(runs, 2);
    cr_assert_str_eq(fattn_ctx_error(ctx), "the kernel's error message");
}

Test(dispatch, without_a_kernel_the_last_reason_is_reported) {
    c.p.flags = FATTN_CAUSAL;
    c.p.algorithm = FATTN_ALGO_STANDARD;
    REJECTED(FATTN_E_UNSUPPORTED, "f32, B=1 Hq=1 Hkv=1 Sq=5 Sk=5 D=4 Dv=4, algorithm STANDARD: "
                                  "fattn_first has no causal mask");
    c.p.algorithm = FATTN_ALGO_AUTO;
    c.x = fattn_tensor_view(c.room, FATTN_F32, FATTN_CPU, 0, 4, (int64_t[]){1, 1, 5, 8});
    c.o = c.x, c.o.data = c.room[1];
    REJECTED(FATTN_E_UNSUPPORTED, "algorithm AUTO: fattn_second stops at head_dim 4");
    c.p.algorithm = FATTN_ALGO_FLASH1;
    REJECTED(FATTN_E_UNSUPPORTED, "FLASH1: this build has no kernel for this algorithm");
    c.p.algorithm = FATTN_ALGO_FLASH2;
    REJECTED(FATTN_E_UNSUPPORTED, "FLASH2: this build has no kernel for this algorithm");
}

/* A row for other dtypes is skipped, also for the error message. */
Test(dispatch, rows_of_other_dtypes_are_skipped) {
    fattni_kernel halves = first, singles = second;
    halves.dtypes = 1u << FATTN_F16 | 1u << FATTN_BF16;
    singles.dtypes = 1u << FATTN_F32;
    const fattni_kernel *const rows[] = {&singles, &halves, NULL};
    fattni_problem p;
    const fattni_kernel *picked;
    fattni_kernel_plan plan;
    for (int32_t dtype = FATTN_F64; dtype <= FATTN_BF16; ++dtype) {
        c.x.dtype = c.o.dtype = dtype;
        c.lse.dtype = dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
        cr_assert_eq(fattni_problem_init(ctx, &c.p, &c.io, FATTNI_FWD, true, &p), FATTN_OK);
        cr_assert_eq(fattni_pick(ctx, rows, &p, &picked, &plan), dtype == FATTN_F64 ? FATTN_E_UNSUPPORTED : FATTN_OK);
        if (dtype != FATTN_F64) cr_assert_eq(picked, dtype == FATTN_F32 ? &singles : &halves);
    }
    c.x = fattn_tensor_view(c.room, FATTN_F32, FATTN_CPU, 0, 4, (int64_t[]){1, 1, 5, 8});
    c.o = c.x, c.o.data = c.room[1];
    c.lse.dtype = FATTN_F32;
    cr_assert_eq(fattni_problem_init(ctx, &c.p, &c.io, FATTNI_FWD, true, &p), FATTN_OK);
    cr_assert_eq(fattni_pick(ctx, rows, &p, &picked, &plan), FATTN_E_UNSUPPORTED);
    cr_assert(strstr(fattn_ctx_error(ctx), "fattn_second stops at head_dim 4"), "%s", fattn_ctx_error(ctx));
}

Test(dispatch, memory_is_checked_before_anything_runs) {
    c.io.workspace_bytes = 999;
    REJECTED(FATTN_E_WORKSPACE, "workspace: 1000 bytes needed, 999 given");
    c.io.workspace = NULL;
    c.io.workspace_bytes = 5000;
    REJECTED(FATTN_E_WORKSPACE, "workspace: 1000 bytes needed, 0 given (NULL)");
    c.io.workspace = memory + 128;
    REJECTED(FATTN_E_WORKSPACE, "is not aligned to 256 bytes");
    c.io.workspace = memory;
    c.io.saved_bytes = 256;
    REJECTED(FATTN_E_WORKSPACE, "saved: 300 bytes needed, 256 given");
    c.io.saved = NULL;
    REJECTED(FATTN_E_WORKSPACE, "saved: 300 bytes needed, 0 given (NULL)");
    c.io.saved = memory + 1;
    c.io.saved_bytes = 400;
    REJECTED(FATTN_E_WORKSPACE, "saved: ");
    c.io.saved = memory + 768;
    REJECTED(FATTN_E_ARG, "workspace and saved overlap: bytes 0x");
    c.io.saved = memory + 1024;
    cr_assert_eq(run(), FATTN_OK);
}

Test(dispatch, an_invalid_call_is_not_dispatched) {
    c.x.dtype = FATTN_U8;
    REJECTED(FATTN_E_DTYPE, "q: dtype u8");
}
