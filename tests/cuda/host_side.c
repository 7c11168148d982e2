/* Decisions of the CUDA backend's host code, tested without a GPU: sizes of workspaces, sizes that are rejected
   before anything is enqueued, and which CUDA context is current. The contexts are fakes; nothing calls
   CUDA. */
#include "core/base/device.h"
#include "core/cuda/blas/blas.h"
#include "core/cuda/driver.h"
#include "core/cuda/library.h"
#include "bwd/cuda/bwd_cuda.h"
#include "fwd/cuda/fwd_cuda.h"
#include "fwd/cuda/fwd_parts.h"
#include "fwd/cuda/fwd_split.h"
#include "fwd/cuda/fwd_decode.h"
#include "core/attention/kernel.h"
#include "plans.h"

#include <criterion/criterion.h>
#include <dlfcn.h>
#include <fattn/fp8.h>
#include <string.h>

static const fattn_dtype dtypes[4] = {FATTN_BF16, FATTN_F16, FATTN_F32, FATTN_F64};

/* A fake driver of one thread, with a stack of CUDA contexts. */
enum { DEPTH = 8 };
static struct {
    CUcontext stack[DEPTH];
    int depth, looks, encoded, stray;
} driver_state;
static CUcontext other(int n) { return (CUcontext)(uintptr_t)(4096 + n); }
static CUcontext top(void) { return driver_state.depth ? driver_state.stack[driver_state.depth - 1] : NULL; }
static CUresult get_current(CUcontext *out) {
    driver_state.looks += 1;
    *out = top();
    return CUDA_SUCCESS;
}
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

/* A GPU with Hopper's shared memory. */
static fattn_ctx context_of(int arch) {
    driver.context = other(0);
    return (fattn_ctx){
        .device = FATTN_CUDA,
        .ops = fattni_device_ops_of(FATTN_CUDA),
        .gpu = {.arch = arch, .sms = 132, .l2_bytes = (size_t)50 << 20, .shared_limit = 232448, .driver = &driver},
        .allocator = {note_alloc, note_free, NULL}};
}

Test(host_side, sizes_do_not_depend_on_addresses_or_d_o, .timeout = 120) {
    for (int arch = 80; arch <= 90; arch += 10) {
        fattn_ctx ctx = context_of(arch);
        ctx.gpu.blas = (struct fattni_cuda_blas *)&driver; /* STANDARD checks that it is not NULL */
        cr_assert_gt(plans_check(&ctx), 100000);
    }
}

/* ---- the current CUDA context ---- */

enum { Q, K, V, O, D_O, DQ, DK, DV, TENSORS };
typedef struct shapes {
    fattn_tensor t[TENSORS], lse;
    fattn_attention_params p;
    fattn_attention_io io;
} shapes;

/* Addresses of tensor n, the workspace and saved, far from each other. */
static void *place(int n) { return (void *)((uintptr_t)(n + 1) << 50); }

static void describe(shapes *x, fattn_dtype dtype, int64_t H, int64_t Sq, int64_t Sk, int64_t D) {
    const fattn_dtype statistic = dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
    const int64_t rows[4] = {1, H, Sq, D}, keys[4] = {1, H, Sk, D};
    *x = (shapes){.p = {.struct_size = sizeof x->p}, .io = {.struct_size = sizeof x->io}};
    for (int n = 0; n < TENSORS; ++n)
        x->t[n] =
            fattn_tensor_view(place(n), dtype, FATTN_CUDA, 0, 4, n == K || n == V || n == DK || n == DV ? keys : rows);
    x->lse = fattn_tensor_view(place(TENSORS), statistic, FATTN_CUDA, 0, 3, rows);
    x->io.q = &x->t[Q], x->io.k = &x->t[K], x->io.v = &x->t[V], x->io.o = &x->t[O], x->io.lse = &x->lse;
    x->io.d_o = &x->t[D_O], x->io.dq = &x->t[DQ], x->io.dk = &x->t[DK], x->io.dv = &x->t[DV];
}

static void check_maps(fattn_ctx *ctx, int depth) {
    shapes x;
    describe(&x, FATTN_BF16, 2, 300, 300, 64);
    for (int pass = FATTNI_FWD; pass <= FATTNI_BWD; ++pass) {
        fattni_problem p;
        fattni_fwd_sm90_args fwd;
        fattni_bwd_sm90_args bwd;
        fattni_bwd_choice choice;
        cr_assert_eq(fattni_problem_init(ctx, &x.p, &x.io, (enum fattni_pass)pass, true, &p), FATTN_OK);
        cr_assert(pass == FATTNI_FWD || !fattni_bwd_cuda_choose(ctx, &p, &choice));
        const fattni_cuda_kernel *const k = pass == FATTNI_FWD ? fattni_fwd_cuda_choose(ctx, &p) : choice.main;
        cr_assert(k && k->arch == 90);
        fattni_bwd_args args = {0};
        if (pass == FATTNI_BWD) args = fattni_bwd_args_of(&p);
        driver_state.encoded = 0;
        const fattn_status s = pass == FATTNI_FWD ? fattni_fwd_sm90_args_of(ctx, &p, k, &fwd)
                                                  : fattni_bwd_sm90_args_of(ctx, &p, k, &args, place(0), false, &bwd);
        cr_assert_eq(s, FATTN_OK, "%s", fattn_ctx_error(ctx));
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

/* A thread without a CUDA context, with another one, with the right one. */
Test(host_side, calls_run_in_the_right_cuda_context) {
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

/* ---- sizes ---- */

/* Enqueuing queries the current CUDA context first: without such a query nothing was written. */
static void rejected(fattn_ctx *ctx, const shapes *x, enum fattni_pass pass, fattn_status status, const char *says) {
    fattn_attention_plan plan = {.struct_size = sizeof plan};
    fattn_attention_io io = x->io;
    io.workspace = place(1 << 10), io.workspace_bytes = (size_t)1 << 60;
    io.saved = place(1 << 11), io.saved_bytes = (size_t)1 << 60;
    driver_state.looks = 0;
    cr_assert_eq(fattn_attention_query(ctx, &x->p, &io, &plan), status, "%s", fattn_ctx_error(ctx));
    cr_assert_eq((pass == FATTNI_FWD ? fattn_attention_fwd : fattn_attention_bwd)(ctx, &x->p, &io), status);
    cr_assert(strstr(fattn_ctx_error(ctx), says), "%s, not %s", fattn_ctx_error(ctx), says);
    cr_assert_eq(driver_state.looks, 0);
}

/* More blocks than a grid has, in each algorithm and dtype, with a d_bias that would be cleared first. */
Test(host_side, grids_are_rejected_before_anything_is_written) {
    for (int arch = 80; arch <= 90; arch += 10)
        for (int n = 0; n < 4; ++n)
            for (int algorithm = FATTN_ALGO_AUTO; algorithm <= FATTN_ALGO_FLASH2; ++algorithm) {
                fattn_ctx ctx = context_of(arch);
                ctx.gpu.blas = (struct fattni_cuda_blas *)&driver;
                shapes x;
                describe(&x, dtypes[n], 1 << 20, 1 << 20, 64, 8);
                fattn_tensor bias[2];
                for (int i = 0; i < 2; ++i)
                    bias[i] = fattn_tensor_view(place(50 + i), (fattn_dtype)x.lse.dtype, FATTN_CUDA, 0, 4,
                                                (int64_t[]){1, 1, 1, 1});
                x.p.algorithm = algorithm;
                x.io.bias = &bias[0], x.io.d_bias = &bias[1];
                const bool standard = algorithm == FATTN_ALGO_STANDARD;
                rejected(&ctx, &x, FATTNI_BWD, FATTN_E_UNSUPPORTED, standard ? "2^31-1 rows" : "2^31-1");
                if (algorithm == FATTN_ALGO_FLASH1) continue; /* forward has a block for each head */
                rejected(&ctx, &x, FATTNI_FWD, FATTN_E_UNSUPPORTED, "2^31-1");
            }
    fattn_ctx ctx = context_of(90);
    ctx.gpu.blas = (struct fattni_cuda_blas *)&driver;
    shapes x; /* few rows, but more elements of P and of K than 2^31-1 blocks have threads */
    describe(&x, FATTN_F32, 1 << 12, 64, 1 << 28, 64);
    x.p.algorithm = FATTN_ALGO_STANDARD;
    rejected(&ctx, &x, FATTNI_FWD, FATTN_E_UNSUPPORTED, "more blocks than");
    rejected(&ctx, &x, FATTNI_BWD, FATTN_E_UNSUPPORTED, "more blocks than");
}

/* ---- libraries that are looked for ---- */

Test(host_side, libraries_are_looked_for) {
    double (*cosine)(double) = NULL;
    void (*absent)(void) = NULL;
    const char *missing = "";
    const fattni_symbol cos_alone = {"cos", &cosine}, both[] = {{"cos", &cosine}, {"no_such_function", &absent}};
    void *const library = fattni_library_open("libm.so.6", &cos_alone, 1, &missing);
    cr_assert(library && !missing && cosine && cosine(0) == 1);
    cr_assert_eq(dlclose(library), 0);
    cr_assert_eq(cosine(0), 1); /* it is still there */
    cr_assert_null(fattni_library_open("libm.so.6", both, 2, &missing));
    cr_assert_str_eq(missing, "no_such_function");
    cr_assert_null(fattni_library_open("libno_such_library.so.1", &cos_alone, 1, &missing));
    cr_assert_null(missing);
}

/* ---- every architecture ---- */

static const fattni_cuda_kernel *kernel_called(const fattni_cuda_kernel *const *list, const char *name) {
    while (*list && strcmp((*list)->name, name) != 0) ++list;
    cr_assert(*list, "%s", name);
    return *list;
}

/* A context that plans for sm_`arch`, on any machine. */
static fattn_ctx *planner(int arch) {
    const fattn_ctx_options o = {
        .struct_size = sizeof o, .flags = FATTN_CTX_PLAN_ONLY, .device = FATTN_CUDA, .arch_cap = arch};
    fattn_ctx *ctx;
    cr_assert_eq(fattn_ctx_create(&o, &ctx), FATTN_OK, "sm_%d", arch);
    return ctx;
}

/* No mask, causal, a window; then with a bias, ALiBi, softcap, a sink and dropout. */
enum { MASKS = 6 };
static void describe_call(shapes *x, fattn_tensor *extra, fattn_dtype dtype, int64_t Sq, int64_t Sk, int64_t D,
                          int mask, bool tf32) {
    describe(x, dtype, 4, Sq, Sk, D);
    x->p.flags = (mask % 3 == 1 ? FATTN_CAUSAL : mask % 3 == 2 ? FATTN_WINDOW : 0) | (tf32 ? FATTN_TF32 : 0);
    x->p.window_left = x->p.window_right = 100;
    if (mask < 3) return;
    const fattn_dtype statistic = (fattn_dtype)x->lse.dtype;
    extra[0] = fattn_tensor_view(place(50), dtype, FATTN_CUDA, 0, 4, (int64_t[]){1, 4, Sq, Sk});
    extra[1] = fattn_tensor_view(place(51), statistic, FATTN_CUDA, 0, 1, (int64_t[]){4});
    extra[2] = fattn_tensor_view(place(52), statistic, FATTN_CUDA, 0, 1, (int64_t[]){4});
    x->io.bias = &extra[0], x->io.alibi = &extra[1], x->io.sink = &extra[2];
    x->p.softcap = 30, x->p.dropout_p = 0.1f;
}

/* Why a device has no fused kernels, in the error message; NULL: it has. */
static const char *refusal(int arch, fattn_dtype dtype, int64_t D) {
    const size_t kib = fattni_cuda_shared_of(arch) >> 10;
    if (arch < 80 && dtype == FATTN_BF16) return "needs sm_80 or later for BF16; F16 and F32 run here";
    if (dtype == FATTN_F16 || dtype == FATTN_BF16 || kib >= 163) return NULL;
    return D > 128 || (arch < 80 && dtype == FATTN_F64) ? "FATTN_ALGO_STANDARD and AUTO need none" : NULL;
}

static const int architectures[] = {75, 80, 86, 87, 89, 90, 100, 103, 120, 121};
enum { ARCHITECTURES = sizeof architectures / sizeof *architectures };

/* Every dtype, head_dim and feature has kernels that fit; or AUTO is STANDARD, but for BF16 before sm_80. */
Test(host_side, every_architecture_has_kernels) {
    static const int64_t dims[] = {1, 8, 33, 64, 72, 80, 96, 100, 128, 136, 192, 255, 256};
    for (int n = 0; n < ARCHITECTURES; ++n) {
        const int arch = architectures[n];
        const size_t limit = fattni_cuda_shared_of(arch);
        fattn_ctx *const ctx = planner(arch);
        for (int m = 0; m < 13 * 5 * MASKS; ++m) {
            const int64_t D = dims[m % 13];
            const fattn_dtype dtype = dtypes[m / 13 % 5 % 4];
            const bool tf32 = m / 13 % 5 == 4;
            shapes x;
            fattn_tensor extra[3];
            fattn_attention_plan plan = {.struct_size = sizeof plan};
            describe_call(&x, extra, tf32 ? FATTN_F32 : dtype, 1000, 1100, D, m / 65, tf32);
            const char *const why = refusal(arch, tf32 ? FATTN_F32 : dtype, D);
            x.p.algorithm = FATTN_ALGO_FLASH2;
            const fattn_status s = fattn_attention_query(ctx, &x.p, &x.io, &plan);
            cr_assert_eq(s, why ? FATTN_E_UNSUPPORTED : FATTN_OK, "sm_%d, %s, head_dim %lld, mask %d: %s", arch,
                         fattn_dtype_name(dtype), (long long)D, m / 65, fattn_ctx_error(ctx));
            cr_assert(!why || strstr(fattn_ctx_error(ctx), why), "sm_%d: %s", arch, fattn_ctx_error(ctx));
            x.p.algorithm = FATTN_ALGO_AUTO;
            const bool none = arch < 80 && dtype == FATTN_BF16 && !tf32;
            cr_assert_eq(fattn_attention_query(ctx, &x.p, &x.io, &plan), none ? FATTN_E_UNSUPPORTED : FATTN_OK, "%s",
                         fattn_ctx_error(ctx));
            if (none) continue;
            cr_assert_eq((strstr(plan.fwd_kernel, "fattn_fwd_standard_cuda") != NULL), why != NULL, "%s",
                         plan.fwd_kernel);
            cr_assert_eq((strstr(plan.bwd_kernel, "fattn_bwd_standard_cuda") != NULL), why != NULL, "%s",
                         plan.bwd_kernel);
            cr_assert((plan.saved_bytes >= 4 * 1000 * 1100 * 4) == (why != NULL));
            if (why) continue;
            const fattni_cuda_kernel *const fwd = kernel_called(fattni_fwd_cuda_kernels, plan.fwd_kernel),
                                            *const bwd = kernel_called(fattni_bwd_cuda_kernels, plan.bwd_kernel);
            cr_assert(fwd->shared <= limit && bwd->shared <= limit);
            cr_assert_eq(fwd->tf32, bwd->tf32, "%s, %s: delta must be that of the rounded O", fwd->name, bwd->name);
            cr_assert(fwd->D >= D && fwd->Dv >= D && bwd->D >= D && bwd->Dv >= D && fwd->dtype == x.t[Q].dtype &&
                      bwd->dtype == x.t[Q].dtype);
            const int64_t padded = 2 * (D > 64 ? D : 64);
            cr_assert(fwd->D < padded && bwd->D < padded, "sm_%d, head_dim %lld: %s, %s", arch, (long long)D, fwd->name,
                      bwd->name);
            cr_assert((arch == 90) == (fwd->arch == 90) || arch == 90);
            cr_assert(arch >= 80 || (fwd->arch == 75 && bwd->arch == 75));
            /* 8 warps per SM, where another kernel of this dtype and head_dim would have them */
            const int64_t most = (int64_t)(limit + 1024);
            if (dtype == FATTN_BF16 && !tf32) {
                cr_assert_geq(most / (int64_t)(fwd->shared + 1024) * (fwd->threads / 32), 8, "%s", fwd->name);
                cr_assert_geq(most / (int64_t)(bwd->shared + 1024) * (bwd->threads / 32), 8, "%s", bwd->name);
            }
        }
        fattn_ctx_destroy(ctx);
    }
}

/* Which kernels the tables of bench/results/cards_h200.txt are of. */
Test(host_side, kernels_by_shared_memory) {
    static const struct {
        int arch;
        int64_t D;
        const char *fwd, *bwd;
    } calls[] = {{80, 64, "mma16_bf16_d64_full_128x128", "mma16_mid_bf16_d64_full_64x64"},
                 {80, 128, "mma16_bf16_d128_full_128x64", "mma16_bf16_d128_full_64x128"},
                 {80, 256, "mma16_pairs_bf16_d256_full_128x64", "mma16_mid_bf16_d256_full_64x64"},
                 {89, 64, "mma16_bf16_d64_full_128x128", "mma16_mid_bf16_d64_full_64x64"},
                 {89, 128, "mma16_bf16_d128_full_128x32", "mma16_keys_bf16_d128_full_64x128"},
                 {89, 256, "mma16_lean_bf16_d256_full_128x64", "mma16_mid_bf16_d256_full_32x64"},
                 {100, 64, "mma16_bf16_d64_full_128x128", "mma16_bf16_d64_full_64x64"},
                 {100, 256, "mma16_bf16_d256_full_64x64", "mma16_bf16_d256_full_64x64"}};
    for (size_t n = 0; n < sizeof calls / sizeof *calls; ++n) {
        fattn_ctx *const ctx = planner(calls[n].arch);
        shapes x;
        fattn_attention_plan plan = {.struct_size = sizeof plan};
        describe(&x, FATTN_BF16, 4, 4096, 4096, calls[n].D);
        cr_assert_eq(fattn_attention_query(ctx, &x.p, &x.io, &plan), FATTN_OK, "%s", fattn_ctx_error(ctx));
        cr_assert_str_eq(plan.fwd_kernel + strlen("fattn_fwd_"), calls[n].fwd, "sm_%d", calls[n].arch);
        cr_assert_str_eq(plan.bwd_kernel + strlen("fattn_bwd_"), calls[n].bwd, "sm_%d", calls[n].arch);
        fattn_ctx_destroy(ctx);
    }
}

/* Hopper's kernels for head_dim up to 192: V has a width of its own; and where O cannot be stored by its tensor map the
   banded forward runs, if the plain one knows no other way. */
Test(host_side, hopper_of_head_dim_192) {
    enum { FULL, CAUSAL, WINDOW, SOFTCAP, WIDE, WIDE_CAUSAL };
    static const struct {
        int64_t D, Dv;
        int call;
        const char *fwd, *bwd;
    } calls[] = {
        {192, 128, FULL, "d192_v128_full_128x128", "d192_v128_full_64x64"},
        {192, 128, CAUSAL, "d192_v128_causal_128x128", "d192_v128_causal_64x64"},
        {192, 128, WINDOW, "d192_v128_banded_128x128", "d192_v128_banded_64x64"},
        {192, 128, SOFTCAP, "d192_v128_general_128x112", "d192_v128_capped_64x64"},
        {192, 128, WIDE, "d192_v128_banded_128x128", "d192_v128_full_64x64"},
        {192, 128, WIDE_CAUSAL, "d192_v128_banded_128x128", "d192_v128_causal_64x64"},
        {136, 8, CAUSAL, "d192_v128_causal_128x128", "d192_v128_causal_64x64"},
        {192, 136, FULL, "d192_full_128x112", "d256_full_64x64"},
        {192, 192, CAUSAL, "d192_causal_128x112", "d256_causal_64x64"},
        {192, 192, WINDOW, "d192_banded_128x112", "d256_banded_64x64"},
        {192, 192, SOFTCAP, "d192_general_128x112", "d256_capped_64x64"},
        {192, 192, WIDE, "d192_full_128x112", "d256_full_64x64"},
        {128, 192, FULL, "d192_full_128x112", "d256_full_64x64"},
        {128, 128, CAUSAL, "d128_causal_128x128", "d128_causal_64x128"},
        {200, 128, FULL, "d256_full_128x80", "d256_full_64x64"},
        {192, 200, CAUSAL, "d256_short_128x64", "d256_causal_64x64"},
        {96, 80, FULL, "d96_full_128x128", "d96_full_64x128"},
        {256, 256, WIDE_CAUSAL, "d256_causal_128x80", "d256_causal_64x64"},
    };
    for (int arch = 80; arch <= 90; arch += 10)
        for (size_t n = 0; n < 2 * sizeof calls / sizeof *calls; ++n) {
            const int64_t D = calls[n / 2].D, Dv = calls[n / 2].Dv;
            const int call = calls[n / 2].call;
            fattn_ctx *const ctx = planner(arch);
            shapes x;
            fattn_attention_plan plan = {.struct_size = sizeof plan};
            describe(&x, dtypes[n % 2], 4, 1000, 1000, D);
            static const int of_v[] = {V, O, D_O, DV};
            for (int t = 0; t < 4; ++t)
                x.t[of_v[t]] =
                    fattn_tensor_view(place(of_v[t]), call >= WIDE && of_v[t] == O ? FATTN_F32 : dtypes[n % 2],
                                      FATTN_CUDA, 0, 4, (int64_t[]){1, 4, 1000, Dv});
            x.p.flags = call == CAUSAL || call == WIDE_CAUSAL ? FATTN_CAUSAL : call == WINDOW ? FATTN_WINDOW : 0;
            x.p.window_left = x.p.window_right = 100;
            x.p.softcap = call == SOFTCAP ? 30 : 0;
            cr_assert_eq(fattn_attention_query(ctx, &x.p, &x.io, &plan), FATTN_OK, "%s", fattn_ctx_error(ctx));
            cr_assert_eq(strstr(plan.fwd_kernel, calls[n / 2].fwd) != NULL, arch == 90, "sm_%d, %lld, %lld: %s", arch,
                         (long long)D, (long long)Dv, plan.fwd_kernel);
            const fattni_cuda_kernel *const bwd = kernel_called(fattni_bwd_cuda_kernels, plan.bwd_kernel);
            cr_assert(bwd->D >= D && bwd->Dv >= Dv, "%s", bwd->name);
            cr_assert_eq(strstr(bwd->name, calls[n / 2].bwd) != NULL && bwd->arch == 90, arch == 90,
                         "sm_%d, %lld, %lld: %s", arch, (long long)D, (long long)Dv, bwd->name);
            fattn_ctx_destroy(ctx);
        }
}

/* Which instance Hopper's backward has: the plainest one that knows a call's features. */
Test(host_side, hopper_backward_variants) {
    enum { FULL, CAUSAL, WINDOW, SINK, PADDED, PACKED, ALIBI, CAPPED_WINDOW };
    static const struct {
        int64_t D;
        int call;
        const char *bwd;
    } calls[] = {
        {64, FULL, "d64_full_128x128"},     {64, CAUSAL, "d64_causal_128x128"},  {64, WINDOW, "d64_banded_128x128"},
        {64, SINK, "d64_banded_128x128"},   {64, PADDED, "d64_banded_128x128"},  {64, PACKED, "d64_banded_128x128"},
        {64, ALIBI, "d64_general_128x128"}, {40, WINDOW, "d64_banded_128x128"},  {80, WINDOW, "d128_banded_64x128"},
        {96, CAUSAL, "d96_causal_64x128"},  {128, PACKED, "d128_banded_64x128"}, {128, ALIBI, "d128_general_64x128"},
        {128, CAUSAL, "d128_causal"},       {128, CAPPED_WINDOW, "d128_capped"}, {136, WINDOW, "d256_banded_64x64"},
        {256, SINK, "d256_banded_64x64"},   {256, PADDED, "d256_general_64x64"}, {256, PACKED, "d256_general_64x64"},
    };
    for (size_t n = 0; n < 2 * sizeof calls / sizeof *calls; ++n) {
        const int call = calls[n / 2].call;
        const int64_t lengths[1] = {call == PACKED ? 3 : 1};
        fattn_ctx *const ctx = planner(90);
        fattn_attention_plan plan = {.struct_size = sizeof plan};
        shapes x;
        describe(&x, dtypes[n % 2], 4, 1000, 1000, calls[n / 2].D);
        fattn_tensor length = fattn_tensor_view(place(50), FATTN_I32, FATTN_CUDA, 0, 1, lengths),
                     head = fattn_tensor_view(place(51), FATTN_F32, FATTN_CUDA, 0, 1, (int64_t[]){4});
        x.p.flags = call == CAUSAL ? FATTN_CAUSAL : call == WINDOW || call == CAPPED_WINDOW ? FATTN_WINDOW : 0;
        x.p.window_left = x.p.window_right = 100;
        if (call == SINK) x.io.sink = &head;
        if (call == ALIBI) x.io.alibi = &head;
        if (call == PADDED) x.io.seqlens_k = &length;
        if (call == PACKED) x.io.cu_seqlens_q = x.io.cu_seqlens_k = &length;
        if (call == PACKED) x.p.max_seqlen_q = x.p.max_seqlen_k = 700;
        if (call == CAPPED_WINDOW) x.p.softcap = 30;
        cr_assert_eq(fattn_attention_query(ctx, &x.p, &x.io, &plan), FATTN_OK, "%s", fattn_ctx_error(ctx));
        cr_assert(strstr(plan.bwd_kernel, calls[n / 2].bwd), "head_dim %lld, call %d: %s", (long long)calls[n / 2].D,
                  call, plan.bwd_kernel);
        fattn_ctx_destroy(ctx);
    }
}

/* Short causal rows: a CTA has all key blocks of a head, where these keep the SMs busy. */
Test(host_side, hopper_short_rows) {
    enum { PLAIN, ORDERED, FULL, GROUPED, LONGER, ADDS, EXACT, D_LSE };
    static const struct {
        int64_t B, N, D;
        int call;
        bool is_short;
    } calls[] = {
        {1, 1, 64, PLAIN, true},       {8, 256, 32, PLAIN, true},    {64, 256, 64, PLAIN, true},
        {1, 256, 64, ORDERED, true},   {20, 257, 64, PLAIN, true},   {33, 512, 64, PLAIN, true},
        {1, 257, 64, PLAIN, false},    {34, 512, 64, PLAIN, false},  {48, 512, 64, PLAIN, true},
        {64, 513, 64, PLAIN, false},   {64, 256, 72, PLAIN, false},  {64, 256, 64, FULL, false},
        {64, 256, 64, GROUPED, false}, {64, 256, 64, LONGER, false}, {64, 256, 64, ADDS, false},
        {64, 256, 64, EXACT, true},    {64, 256, 64, D_LSE, false},
    };
    for (size_t n = 0; n < 2 * sizeof calls / sizeof *calls; ++n) {
        const int call = calls[n / 2].call;
        const int64_t B = calls[n / 2].B, N = calls[n / 2].N, D = calls[n / 2].D;
        fattn_ctx *const ctx = planner(90);
        fattn_attention_plan plan = {.struct_size = sizeof plan};
        shapes x;
        describe(&x, dtypes[n % 2], 4, N, call == LONGER ? N + 1 : N, D);
        static const int of_keys[] = {K, V, DK, DV};
        for (int t = 0; t < TENSORS; ++t) x.t[t].shape[0] = B;
        x.lse.shape[0] = B, ctx->gpu.sms = 132;
        for (int t = 0; t < 4 && call == GROUPED; ++t) x.t[of_keys[t]].shape[1] = 2;
        fattn_tensor d_lse = fattn_tensor_view(place(50), FATTN_F32, FATTN_CUDA, 0, 3, (int64_t[]){B, 4, N});
        if (call == D_LSE) x.io.d_lse = &d_lse;
        x.p.flags = call == FULL ? 0 : FATTN_CAUSAL;
        x.p.flags |= call == ORDERED ? FATTN_DETERMINISTIC : call == ADDS ? FATTN_ACC_DQ : 0;
        x.p.flags |= call == EXACT ? FATTN_EXACT_DELTA : 0;
        cr_assert_eq(fattn_attention_query(ctx, &x.p, &x.io, &plan), FATTN_OK, "%s", fattn_ctx_error(ctx));
        cr_assert_eq(strstr(plan.bwd_kernel, "_d64_short_128x128") != NULL, calls[n / 2].is_short,
                     "%lld, %lld, call %d: %s", (long long)B, (long long)N, call, plan.bwd_kernel);
        fattn_ctx_destroy(ctx);
    }
}

/* Which kernels take a bias on Hopper: biased ones of rows that tensor maps can describe, in q's dtype and without
   other general features. */
Test(host_side, hopper_with_bias) {
    enum { PLAIN, SHARED, PADDED, ODD_ROWS, ONE_ROW, WIDE, ALIBI, CAPPED, DROPPED, CALLS };
    for (int n = 0; n < 2 * 5 * CALLS; ++n) {
        const fattn_dtype dtype = dtypes[n % 2];
        const int64_t D = (const int64_t[]){40, 128, 192, 256, 192}[n / 2 % 5], Sk = 1000;
        const int call = n / 10;
        fattn_ctx *const ctx = planner(90);
        fattn_attention_plan plan = {.struct_size = sizeof plan};
        shapes x;
        describe(&x, dtype, 4, 1000, Sk, D);
        static const int of_v[] = {V, DV, O, D_O};
        for (int i = 0; i < 4 && n / 2 % 5 == 4;
             ++i) /* V of 128 beside that: kernels of other sizes for other addresses */
            x.t[of_v[i]] =
                fattn_tensor_view(place(of_v[i]), dtype, FATTN_CUDA, 0, 4, (int64_t[]){1, 4, i < 2 ? Sk : 1000, 128});
        const int64_t shape[4] = {1, call == SHARED ? 1 : 4, call == ONE_ROW ? 1 : 1000, Sk};
        fattn_tensor bias = fattn_tensor_view(place(50), call == WIDE ? FATTN_F32 : dtype, FATTN_CUDA, 0, 4, shape),
                     head = fattn_tensor_view(place(51), FATTN_F32, FATTN_CUDA, 0, 1, (int64_t[]){4}),
                     length = fattn_tensor_view(place(52), FATTN_I32, FATTN_CUDA, 0, 1, (int64_t[]){1});
        if (call == ODD_ROWS) bias.stride[2] += 4, bias.stride[1] = 1000 * bias.stride[2];
        x.io.bias = &bias;
        if (call == ALIBI) x.io.alibi = &head;
        if (call == PADDED) x.io.seqlens_k = &length;
        if (call == CAPPED) x.p.softcap = 30;
        if (call == DROPPED) x.p.dropout_p = 0.1f;
        cr_assert_eq(fattn_attention_query(ctx, &x.p, &x.io, &plan), FATTN_OK, "%s", fattn_ctx_error(ctx));
        const bool biased = call <= PADDED;
        cr_assert_eq(strstr(plan.fwd_kernel, "biased") != NULL, biased, "%d: %s", call, plan.fwd_kernel);
        cr_assert_eq(strstr(plan.bwd_kernel, "biased") != NULL, biased, "%d: %s", call, plan.bwd_kernel);
        const size_t workspace = plan.bwd_workspace;
        bias.data = (char *)bias.data + fattn_dtype_size((fattn_dtype)bias.dtype);
        fattn_attention_plan elsewhere = {.struct_size = sizeof elsewhere};
        cr_assert_eq(fattn_attention_query(ctx, &x.p, &x.io, &elsewhere), FATTN_OK, "%s", fattn_ctx_error(ctx));
        cr_assert(!strstr(elsewhere.bwd_kernel, "biased"), "%d: %s", call, elsewhere.bwd_kernel);
        cr_assert_eq(elsewhere.bwd_workspace, workspace, "%d: at other addresses", call);
        /* Other forward kernels for Hopper above head_dim 128 would leave a bias out. */
        cr_assert_eq(strstr(plan.fwd_kernel, "sm90") != NULL, biased || D <= 128, "%d: %s", call, plan.fwd_kernel);
        cr_assert(strstr(plan.bwd_kernel, "sm90"), "%d: %s", call, plan.bwd_kernel);
        fattn_ctx_destroy(ctx);
    }
}

/* Few rows of 16 bits have their keys split, on every device, whatever the features and the batch. */
Test(host_side, few_rows) {
    for (int n = 0; n < ARCHITECTURES; ++n) {
        fattn_ctx *const ctx = planner(architectures[n]);
        for (int m = 0; m < 2 * 3 * 2 * 4 * MASKS; ++m) {
            const fattn_dtype dtype = dtypes[m % 2];
            const int64_t D = (const int64_t[]){40, 128, 200}[m / 2 % 3], keys = m / 6 % 2 ? 100000 : 100;
            const int64_t Sq = (const int64_t[]){1, 7, 16, 17}[m / 12 % 4];
            if (architectures[n] < 80 && dtype == FATTN_BF16) continue;
            shapes x;
            fattn_tensor extra[3];
            fattn_attention_plan plan = {.struct_size = sizeof plan};
            describe_call(&x, extra, dtype, Sq, keys, D, m / 48, false);
            cr_assert_eq(fattn_attention_query(ctx, &x.p, &x.io, &plan), FATTN_OK, "%s", fattn_ctx_error(ctx));
            cr_assert_eq(strstr(plan.fwd_kernel, "_few_") != NULL, Sq <= 16, "sm_%d, %lld rows: %s", architectures[n],
                         (long long)Sq, plan.fwd_kernel);
            const bool window = m / 48 % 3 == 2; /* of fewer keys than a part has */
            if (Sq > 16) continue;
            if (architectures[n] == 90) /* a cluster needs no memory for eight parts or fewer */
                cr_assert(plan.fwd_workspace == 0 || (keys > 100 && !window), "%zu bytes", plan.fwd_workspace);
            else
                cr_assert_eq(plan.fwd_workspace > 0, keys > 100 && !window, "%zu bytes", plan.fwd_workspace);
        }
        fattn_ctx_destroy(ctx);
    }
}

/* FATTN_FP8_RENEW: backward's kernel is that of calls without FATTN_FP8, its workspace O, L and the larger one of both
   passes without it. Where these store N x N, as on no device that has FATTN_FP8, backward refuses. */
Test(host_side, fp8_renewed) {
    fattn_ctx *const ctx = planner(90);
    fattn_tensor extra[3];
    shapes x;
    for (int m = 0; m < 3 * 4 * 3 * 4; ++m) {
        const int64_t D = (const int64_t[]){40, 64, 128, 256}[m / 3 % 4];
        const int64_t Sq = (const int64_t[]){1, 16, 99, 1000}[m / 36];
        fattn_attention_plan plain = {.struct_size = sizeof plain}, plan = plain;
        describe_call(&x, extra, dtypes[m % 3], Sq, 5000, D, m / 12 % 3, false);
        cr_assert_eq(fattn_attention_query(ctx, &x.p, &x.io, &plain), FATTN_OK, "%s", fattn_ctx_error(ctx));
        x.p.flags |= FATTN_FP8 | FATTN_FP8_RENEW;
        cr_assert_eq(fattn_attention_query(ctx, &x.p, &x.io, &plan), FATTN_OK, "%s", fattn_ctx_error(ctx));
        const int64_t o = fattn_tensor_numel(&x.t[O]) * (int64_t)fattn_dtype_size(dtypes[m % 3]),
                      parts = fattni_round_up(o, FATTNI_ALIGN) + fattni_round_up((int64_t)plan.lse_bytes, FATTNI_ALIGN);
        const size_t larger = plain.fwd_workspace > plain.bwd_workspace ? plain.fwd_workspace : plain.bwd_workspace;
        cr_assert_eq(plan.bwd_workspace, (size_t)parts + larger, "%s: %zu, %zu", plan.bwd_kernel, plan.bwd_workspace,
                     larger);
        cr_assert_str_eq(plan.bwd_kernel, plain.bwd_kernel);
        cr_assert(strstr(plan.fwd_kernel, "_f8_"), "%s", plan.fwd_kernel);
        x.io.d_o = NULL;
        cr_assert_eq(fattn_attention_query(ctx, &x.p, &x.io, &plan), FATTN_OK, "%s", fattn_ctx_error(ctx));
        cr_assert_geq(plan.bwd_workspace, (size_t)parts + larger);
    }
    fattn_ctx_destroy(ctx);
    fattn_ctx small = context_of(86);
    small.gpu.shared_limit = fattni_cuda_shared_of(86);
    small.gpu.blas = (struct fattni_cuda_blas *)&driver;
    describe_call(&x, extra, FATTN_F32, 100, 100, 256, 0, false);
    x.p.flags = FATTN_FP8 | FATTN_FP8_RENEW;
    fattni_call call;
    cr_assert_eq(fattni_prepare(&small, &x.p, &x.io, FATTNI_BWD, fattni_bwd_table, &call), FATTN_E_UNSUPPORTED);
    cr_assert(strstr(fattn_ctx_error(&small), "FATTN_FP8_RENEW: fattn_fwd_standard_cuda stores N x N, "), "%s",
              fattn_ctx_error(&small));
}

/* FATTN_FP8_INT8: a Hopper kernel of that name, and copies of integers; on other GPUs neither. */
Test(host_side, fp8_integers) {
    static const int archs[2] = {90, 80};
    for (int n = 0; n < 2; ++n) {
        fattn_ctx *const ctx = planner(archs[n]);
        fattn_tensor extra[3];
        shapes x;
        size_t bytes = 0;
        fattn_fp8 copies;
        fattn_attention_plan plan = {.struct_size = sizeof plan};
        describe_call(&x, extra, FATTN_BF16, 100, 300, 128, 0, false);
        x.p.flags |= FATTN_FP8 | FATTN_FP8_INT8;
        cr_assert_eq(fattn_attention_query(ctx, &x.p, &x.io, &plan), n ? FATTN_E_UNSUPPORTED : FATTN_OK);
        if (n)
            cr_assert(strstr(fattn_ctx_error(ctx), "needs a Hopper GPU"), "%s", fattn_ctx_error(ctx));
        else
            cr_assert(strstr(plan.fwd_kernel, "fwd_sm90_i8_i8_d128_full"), "%s", plan.fwd_kernel);
        cr_assert_eq(fattn_fp8_layout(ctx, &x.p, &x.io, NULL, &bytes, NULL), n ? FATTN_E_UNSUPPORTED : FATTN_OK);
        if (n == 0) {
            cr_assert_eq(fattn_fp8_layout(ctx, &x.p, &x.io, place(60), &bytes, &copies), FATTN_OK);
            cr_assert(copies.q8.dtype == FATTN_I8 && copies.k8.dtype == FATTN_I8 && copies.v8.dtype == FATTN_F8E4M3);
            cr_assert(copies.k_scale.ndim == 3 && copies.k_scale.shape[2] == 3 * 128 / 8);
        }
        fattn_ctx_destroy(ctx);
    }
}

/* FATTN_UNIFIED_MAX: BF16, few rows, no feature of a general kernel; else the reason. */
Test(host_side, unified_maximum) {
    for (int n = 0; n < ARCHITECTURES; ++n) {
        fattn_ctx *const ctx = planner(architectures[n]);
        for (int m = 0; m < 4 * 2 * MASKS; ++m) {
            const fattn_dtype dtype = dtypes[m % 4];
            const int64_t Sq = m / 4 % 2 ? 17 : 16;
            shapes x;
            fattn_tensor extra[3];
            fattn_attention_plan plan = {.struct_size = sizeof plan};
            if (architectures[n] < 80 && dtype == FATTN_BF16) continue;
            describe_call(&x, extra, dtype, Sq, 5000, 128, m / 8, false);
            x.p.flags |= FATTN_UNIFIED_MAX;
            const fattn_status s = fattn_attention_query(ctx, &x.p, &x.io, &plan);
            const bool runs = dtype == FATTN_BF16 && Sq == 16 && m / 8 < 3;
            cr_assert_eq(s, runs ? FATTN_OK : FATTN_E_UNSUPPORTED, "%s", fattn_ctx_error(ctx));
            cr_assert(runs ? strstr(plan.fwd_kernel, "_few_unified_") : strstr(fattn_ctx_error(ctx), "UNIFIED_MAX"),
                      "%s, %s", plan.fwd_kernel, fattn_ctx_error(ctx));
        }
        fattn_ctx_destroy(ctx);
    }
}

/* Quotients by multiplication are those of division. */
Test(host_side, dividers) {
    const int by[] = {1,        2, 3, 5, 7, 16, 17, 100, 127, 128, 641, 65535, 65536, 1000003, 1 << 30, INT32_MAX - 1,
                      INT32_MAX};
    for (size_t k = 0; k < sizeof by / sizeof *by; ++k) {
        const fattni_divider d = fattni_divider_of(by[k]);
        for (int64_t n = 0; n <= INT32_MAX; n += 1 + n / 97) {
            const int64_t near = n / by[k] * by[k], tries[] = {n, near, near - 1, near + by[k] - 1};
            for (int m = 0; m < 4; ++m) {
                if (tries[m] < 0 || tries[m] > INT32_MAX) continue;
                int quotient = (int)tries[m];
                const int rest = fattni_divide(&quotient, &d);
                cr_assert(quotient == tries[m] / by[k] && rest == tries[m] % by[k], "%lld / %d = %d, rest %d",
                          (long long)tries[m], by[k], quotient, rest);
            }
        }
    }
}

/* ---- small grids: keys in parts ---- */

static fattn_attention_plan plan_of(fattn_ctx *ctx, const shapes *x) {
    fattn_attention_plan plan = {.struct_size = sizeof plan};
    cr_assert_eq(fattn_attention_query(ctx, &x->p, &x->io, &plan), FATTN_OK, "%s", fattn_ctx_error(ctx));
    return plan;
}

/* B sequences of H heads. */
static void describe_batch(shapes *x, fattn_dtype dtype, int64_t B, int64_t H, int64_t Sq, int64_t Sk, int64_t D) {
    describe(x, dtype, H, Sq, Sk, D);
    for (int n = 0; n < TENSORS; ++n) x->t[n].shape[0] = B;
    x->lse.shape[0] = B;
}

enum { TYPE_F32, TYPE_F64, TYPE_TF32, TYPE_F16, TYPE_BF16, TYPES };
static void describe_type(shapes *x, int type, int64_t B, int64_t H, int64_t Sq, int64_t Sk, int64_t D) {
    const fattn_dtype types[] = {FATTN_F32, FATTN_F64, FATTN_F32, FATTN_F16, FATTN_BF16};
    describe_batch(x, types[type], B, H, Sq, Sk, D);
    x->p.flags = type == TYPE_TF32 ? FATTN_TF32 : 0;
}

/* Bytes of one part's result. */
static size_t result_bytes(const fattni_cuda_kernel *k, fattn_dtype dtype, int64_t Sq, int64_t Dv) {
    const int64_t rows = fattni_min(Sq, k->BM), width = (Dv + 7) / 8 * 8;
    return (size_t)((rows * (width + 2) + 7) / 8 * 8) * (dtype == FATTN_F64 ? 8 : 4);
}

/* Which calls are split, and into how many parts, from the workspace: a result for each row block and part. */
Test(host_side, small_grids_are_split) {
    static const struct {
        int64_t H, Sq, Sk;
        int32_t window;           /* half of it to the left and half to the right; 0: none */
        int64_t real, tf32, half; /* parts; 16 bits on Hopper: 1 */
    } calls[] = {
        {1, 1, 256, 0, 1, 1, 0},         {1, 1, 257, 0, 2, 1, 0},
        {1, 1, 1000, 0, 4, 2, 0},        {4, 17, 1000, 0, 4, 2, 1},
        {4, 64, 1025, 0, 0, 3, 2},       {4, 64, 4095, 0, 16, 8, 4},
        {4, 64, 4096, 0, 16, 8, 4},      {1, 32, 1 << 20, 0, 256, 256, 256},
        {4, 32, 1 << 20, 0, 64, 64, 64}, {32, 32, 65536, 0, 8, 8, 8},
        {33, 32, 65536, 0, 7, 7, 1},     {64, 32, 65536, 0, 4, 4, 1},
        {65, 32, 65536, 0, 1, 1, 1},     {4, 4096, 4096, 0, 1, 1, 1},
        {2, 32, 65536, 2000, 0, 0, 3},   {2, 32, 65536, 40, 1, 1, 1},
    };
    for (int arch = 80; arch <= 90; arch += 10)
        for (size_t n = 0; n < sizeof calls / sizeof *calls; ++n)
            for (int type = 0; type < TYPES; ++type) {
                fattn_ctx ctx = context_of(arch);
                shapes x;
                describe_type(&x, type, 1, calls[n].H, calls[n].Sq, calls[n].Sk, 64);
                if (calls[n].window)
                    x.p.flags |= FATTN_WINDOW, x.p.window_left = x.p.window_right = calls[n].window / 2;
                const int64_t want = type < TYPE_TF32                  ? calls[n].real
                                     : type == TYPE_TF32               ? calls[n].tf32
                                     : arch < 90 || calls[n].half == 0 ? calls[n].half
                                                                       : 1;
                if (want == 0) continue; /* few rows, or a number that depends on BN and BM */
                const fattn_attention_plan plan = plan_of(&ctx, &x);
                const fattni_cuda_kernel *const k = kernel_called(fattni_fwd_cuda_kernels, plan.fwd_kernel);
                const size_t one = arch == 90 ? FATTNI_ALIGN : 0; /* the counter of Hopper's kernels */
                const int64_t blocks = (calls[n].Sq + k->BM - 1) / k->BM * calls[n].H;
                const size_t result = result_bytes(k, (fattn_dtype)x.t[Q].dtype, calls[n].Sq, 64);
                cr_assert_eq(plan.fwd_workspace, want == 1 ? one : (size_t)(blocks * want) * result,
                             "sm_%d, call %zu, type %d, %s: %zu bytes, not %lld parts of %zu", arch, n, type, k->name,
                             plan.fwd_workspace, (long long)want, result);
                if (type >= TYPE_F16 && arch == 90) cr_assert_eq(k->arch == 90, want == 1, "call %zu: %s", n, k->name);
            }
}

/* Kernel and parts of a sequence do not depend on their number, and the workspace is proportional to it. */
Test(host_side, parts_do_not_depend_on_the_batch) {
    for (int n = 0; n < ARCHITECTURES; ++n) {
        fattn_ctx *const ctx = planner(architectures[n]);
        for (int m = 0; m < TYPES * 4 * 4 * 3; ++m) {
            const int type = m % TYPES;
            const int64_t Sq = (const int64_t[]){1, 20, 100, 700}[m / TYPES % 4],
                          Sk = (const int64_t[]){100, 700, 5000, 100000}[m / (4 * TYPES) % 4],
                          H = 1 + 3 * (m / (16 * TYPES));
            if (type == TYPE_BF16 && architectures[n] < 80) continue;
            shapes x;
            describe_type(&x, type, 1, H, Sq, Sk, 128);
            const fattn_attention_plan one = plan_of(ctx, &x);
            describe_type(&x, type, 77, H, Sq, Sk, 128);
            const fattn_attention_plan all = plan_of(ctx, &x);
            const bool few =
                strstr(one.fwd_kernel, "_few_") && strstr(all.fwd_kernel, "_few_"); /* with the same bits */
            cr_assert(few || !strcmp(one.fwd_kernel, all.fwd_kernel), "%s, %s", one.fwd_kernel, all.fwd_kernel);
            if (few || strstr(one.fwd_kernel, "standard")) continue;
            const bool split = one.fwd_workspace > FATTNI_ALIGN;
            cr_assert_eq(all.fwd_workspace, split ? 77 * one.fwd_workspace : one.fwd_workspace, "%s: %zu, %zu bytes",
                         one.fwd_kernel, one.fwd_workspace, all.fwd_workspace);
            for (int moved = 0; moved <= V; ++moved) { /* nor on addresses */
                shapes y = x;
                fattn_attention_io *const io = &y.io;
                io->q = &y.t[Q], io->k = &y.t[K], io->v = &y.t[V], io->o = &y.t[O], io->lse = &y.lse;
                y.t[moved].data = (char *)y.t[moved].data + fattn_dtype_size((fattn_dtype)y.t[moved].dtype);
                cr_assert_eq(plan_of(ctx, &y).fwd_workspace, all.fwd_workspace);
            }
        }
        fattn_ctx_destroy(ctx);
    }
}

/* Some heads of a call are split as the whole, whose bits ranks promise: into as many parts, or, like that, not. */
Test(host_side, parts_of_some_heads) {
    static const int64_t lengths[] = {100, 500, 1500, 4000};
    for (int arch = 80; arch <= 90; arch += 10) {
        fattn_ctx *const ctx = planner(arch);
        int split = 0, wholes = 0;
        for (int n = 0; n < TYPES * 4 * 3; ++n) {
            const int64_t Sq = lengths[n % 4], Sk = n / 4 % 3 ? 9000 : Sq, Hq = n / 4 % 3 == 2 ? 2 : 8;
            shapes whole, half;
            describe_type(&whole, n / 12, 1, Hq, Sq, Sk, 64);
            describe_type(&half, n / 12, 1, Hq / 2, Sq, Sk, 64);
            half.p.rng_heads = (int32_t)Hq, half.p.rng_head0 = (int32_t)(Hq / 2);
            const fattn_attention_plan all = plan_of(ctx, &whole), some = plan_of(ctx, &half);
            cr_assert_str_eq(all.fwd_kernel, some.fwd_kernel);
            const fattni_cuda_kernel *const k = kernel_called(fattni_fwd_cuda_kernels, all.fwd_kernel);
            const bool takes_parts = all.fwd_workspace > FATTNI_ALIGN && k->args_bytes == sizeof(fattni_fwd_split_args);
            cr_assert_eq(all.fwd_workspace, (takes_parts ? 2 : 1) * some.fwd_workspace, "%s, %lld rows: %zu, %zu bytes",
                         k->name, (long long)Sq, all.fwd_workspace, some.fwd_workspace);
            split += takes_parts;
            wholes += !takes_parts;
        }
        cr_assert(split > 0 && wholes > 0, "arch %d: %d split, %d not", arch, split, wholes);
        fattn_ctx_destroy(ctx);
    }
}

/* Of sequences with lengths of their own any may have most parts, not only the longest: 8208 keys may have fewer than
   8192. */
Test(host_side, parts_of_ragged_batches) {
    fattn_ctx *const ctx = planner(80);
    for (int type = 0; type < TYPES; ++type)
        for (int packed = 0; packed < 2; ++packed) {
            shapes x, y;
            const int64_t B = 3, Sq = 150, Sk = 9000;
            describe_type(&x, type, B, 6, Sq, Sk, 64);
            const fattn_attention_plan whole = plan_of(ctx, &x);
            describe_type(&y, type, packed ? 1 : B, 6, packed ? 400 : Sq, packed ? 20000 : Sk, 64);
            const fattn_tensor lengths =
                fattn_tensor_view(place(50), FATTN_I32, FATTN_CUDA, 0, 1, (int64_t[]){packed ? B + 1 : B});
            if (packed) {
                y.io.cu_seqlens_q = y.io.cu_seqlens_k = &lengths;
                y.p.max_seqlen_q = (int32_t)Sq, y.p.max_seqlen_k = (int32_t)Sk;
            } else {
                y.io.seqlens_q = y.io.seqlens_k = &lengths;
            }
            const fattn_attention_plan ragged = plan_of(ctx, &y);
            cr_assert_str_eq(whole.fwd_kernel, ragged.fwd_kernel);
            cr_assert_gt(whole.fwd_workspace, 0);
            const fattni_cuda_kernel *const k = kernel_called(fattni_fwd_cuda_kernels, ragged.fwd_kernel);
            const int blocks = (int)((Sq + k->BM - 1) / k->BM * 6), least = type < TYPE_TF32    ? 256
                                                                            : type == TYPE_TF32 ? 512
                                                                                                : 1024;
            const size_t result = result_bytes(k, (fattn_dtype)x.t[Q].dtype, Sq, 64);
            const int room = (int)(ragged.fwd_workspace / result) / blocks / (int)B;
            int most = 0;
            for (int keys = 1; keys <= Sk; ++keys) {
                const int parts = fattni_fwd_parts_of(keys, fattni_fwd_keys_of_part(keys, blocks, least, k->BN));
                most = parts > most ? parts : most;
            }
            cr_assert_geq(room, most, "%s: %d", k->name, most);
            cr_assert_leq(room, most + 1, "%s: %d", k->name, most);
        }
    fattn_ctx_destroy(ctx);
}

/* The same of few rows on Hopper, where the host takes as a bound the parts of the call's keys and fewest rows. */
Test(host_side, parts_of_few_rows) {
    static const int lengths[] = {1,    128,  129,  500,   700,   1024,  1025,  2050,
                                  8191, 8192, 8193, 16384, 33000, 70000, 300000};
    for (int n = 0; n < 15 * 9 * 3; ++n) {
        const int most = lengths[n % 15], heads = 1 + n / 15 % 9, D = 64 << n / 135, BM = n % 2 ? 16 : 8;
        for (int few = 1; few <= 16; few += 5) {
            const int room = fattni_decode_most_parts(most, heads, few, BM, D);
            cr_assert(room >= 1 && room <= FATTNI_DECODE_SLOTS * FATTNI_DECODE_GROUPS);
            cr_assert(heads < FATTNI_DECODE_MANY_HEADS || room <= FATTNI_DECODE_MOST);
            for (int rows = few; rows <= 20; rows += 3)
                for (int keys = 1; keys <= most; keys += 1 + keys / 100) {
                    const int part = fattni_decode_keys_of_part(keys, heads, rows, BM, D),
                              parts = fattni_cuda_parts_of(keys, part);
                    cr_assert(part % 16 == 0 && part >= FATTNI_DECODE_LEAST && parts <= room,
                              "%d of %d keys in parts of %d", keys, most, part);
                }
        }
    }
}

/* More parts of all sequences than CUDA has blocks. */
Test(host_side, too_many_parts) {
    fattn_ctx ctx = context_of(80);
    for (int n = 0; n < 2; ++n) {
        shapes x;
        fattni_problem p;
        const fattni_kernel *kernel;
        fattni_kernel_plan plan = {0};
        describe_batch(&x, FATTN_F32, (1 << 23) - 1 + n, 4, 1, 1 << 15, 8);
        x.p.algorithm = FATTN_ALGO_FLASH2;
        cr_assert_eq(fattni_problem_init(&ctx, &x.p, &x.io, FATTNI_FWD, false, &p), FATTN_OK);
        const fattn_status s = fattni_pick(&ctx, fattni_fwd_table, &p, &kernel, &plan);
        cr_assert_eq(s, n ? FATTN_E_UNSUPPORTED : FATTN_OK, "%s", fattn_ctx_error(&ctx));
        cr_assert(n == 0 || strstr(fattn_ctx_error(&ctx), "2^31-1"), "%s", fattn_ctx_error(&ctx));
    }
}

/* More rows of a group than an int counts are not packed into tiles. */
Test(host_side, few_rows_of_too_many_heads) {
    fattn_ctx *const ctx = planner(90);
    for (int n = 0; n < 2; ++n) {
        shapes x;
        fattn_attention_plan plan = {.struct_size = sizeof plan};
        const int64_t H = n ? 1 << 28 : 1 << 20;
        describe(&x, FATTN_BF16, H, 16, 100, 64);
        const int keys[] = {K, V, DK, DV};
        for (int t = 0; t < 4; ++t) x.t[keys[t]].shape[1] = 1;
        cr_assert_eq(fattn_attention_query(ctx, &x.p, &x.io, &plan), FATTN_OK, "%s", fattn_ctx_error(ctx));
        cr_assert_eq(strstr(plan.fwd_kernel, "_few_") != NULL, n == 0, "%s", plan.fwd_kernel);
    }
    fattn_ctx_destroy(ctx);
}

/* It plans, and does nothing else. */
Test(host_side, a_planner_has_no_device) {
    fattn_ctx *const ctx = planner(89);
    char text[128];
    cr_assert_eq(fattn_ctx_describe(ctx, text, sizeof text), FATTN_OK);
    cr_assert_str_eq(text, "plans for sm_89, 99 KiB of shared memory per block");
    cr_assert_eq(fattn_ctx_describe(ctx, text, 6), FATTN_OK);
    cr_assert_str_eq(text, "plans");
    cr_assert_eq(fattn_ctx_describe(ctx, NULL, 6), FATTN_E_ARG);
    fattn_tensor t;
    cr_assert_eq(fattn_tensor_alloc(ctx, FATTN_F32, 1, (int64_t[]){77}, &t), FATTN_E_STATE);
    cr_assert(strstr(fattn_ctx_error(ctx), "FATTN_CTX_PLAN_ONLY"), "%s", fattn_ctx_error(ctx));
    cr_assert_eq(fattn_ctx_sync(ctx), FATTN_E_STATE);
    shapes x;
    describe(&x, FATTN_BF16, 2, 300, 300, 64);
    x.io.workspace = place(40), x.io.workspace_bytes = (size_t)1 << 40;
    cr_assert_eq(fattn_attention_fwd(ctx, &x.p, &x.io), FATTN_E_STATE);
    cr_assert_eq(fattn_attention_bwd(ctx, &x.p, &x.io), FATTN_E_STATE);
    fattn_ctx_destroy(ctx);
    for (int arch = 0; arch < 130; ++arch) {
        const fattn_ctx_options o = {
            .struct_size = sizeof o, .flags = FATTN_CTX_PLAN_ONLY, .device = FATTN_CUDA, .arch_cap = arch};
        bool known = false;
        for (int n = 0; n < ARCHITECTURES; ++n) known |= architectures[n] == arch;
        fattn_ctx *c;
        cr_assert_eq(fattn_ctx_create(&o, &c), known ? FATTN_OK : FATTN_E_ARG, "%d", arch);
        fattn_ctx_destroy(c);
    }
}

Test(host_side, many_packed_sequences) {
    for (int n = 0; n < 2; ++n) {
        fattn_ctx ctx = context_of(90);
        shapes x;
        describe(&x, dtypes[n], 2, 1000, 1000, 64);
        const fattn_tensor lengths =
            fattn_tensor_view(place(50), FATTN_I32, FATTN_CUDA, 0, 1, (int64_t[]){((int64_t)1 << 25) + 1});
        x.io.cu_seqlens_q = x.io.cu_seqlens_k = &lengths;
        x.p.max_seqlen_q = x.p.max_seqlen_k = 100;
        rejected(&ctx, &x, FATTNI_BWD, FATTN_E_UNSUPPORTED, "pads the rows of packed sequences");
    }
}

/* Calls with too many tiles for the Hopper kernels use other kernels. */
Test(host_side, too_many_tiles_for_hopper) {
    fattn_ctx ctx = context_of(90);
    for (int n = 0; n < 4; ++n) {
        shapes x;
        fattn_attention_plan plan = {.struct_size = sizeof plan};
        const int64_t H = n % 2 ? 1 << 27 : 1 << 20;
        describe(&x, dtypes[n / 2], H, 100, n % 2 ? 64 : 100, 64);
        cr_assert_eq(fattn_attention_query(&ctx, &x.p, &x.io, &plan), FATTN_OK, "%s", fattn_ctx_error(&ctx));
        cr_assert(strstr(plan.bwd_kernel, n % 2 ? "mma16" : "sm90"), "%s", plan.bwd_kernel);
    }
}

/* The longest rows and largest positions: diagonals and sums with them stay within 31 bits. */
Test(host_side, diagonals_of_far_positions) {
    fattn_ctx ctx = context_of(90);
    static const int64_t rows[] = {1, 100, 1 << 28}, places[] = {0, 1000, 1 << 29};
    static const int32_t windows[] = {-1, 0, 5, 1 << 28, 1 << 29, (1 << 30) - 1, 1 << 30, INT32_MAX};
    for (int m = 0; m < 3 * 3 * 3 * 3; ++m)
        for (int w = 0; w < 64; ++w) {
            shapes x;
            fattni_problem p;
            const int64_t Sq = rows[m % 3], Sk = rows[m / 3 % 3];
            describe(&x, FATTN_BF16, 1, Sq, Sk, 64);
            x.p.flags = FATTN_WINDOW;
            x.p.q_pos0 = places[m / 9 % 3], x.p.k_pos0 = places[m / 27];
            x.p.window_left = windows[w % 8], x.p.window_right = windows[w / 8];
            cr_assert_eq(fattni_problem_init(&ctx, &x.p, &x.io, FATTNI_FWD, true, &p), FATTN_OK);
            const fattni_attention_args a = fattni_cuda_args_of(&p);
            const fattni_band want = fattni_sequence_of(&p, 0).band;
            const int64_t diagonal = a.shift + Sk - Sq;
            cr_assert_eq(a.shift, x.p.q_pos0 - x.p.k_pos0);
            const int64_t lo = a.left == FATTNI_FAR ? -FATTNI_FAR : diagonal - a.left;
            const int64_t hi = a.right == FATTNI_FAR ? FATTNI_FAR : diagonal + a.right;
            /* Sums of a row and a diagonal, 256 rows and keys further on. */
            cr_assert(lo >= -FATTNI_FAR && hi <= FATTNI_FAR && Sq + 512 + hi <= INT32_MAX, "%lld, %lld", (long long)lo,
                      (long long)hi);
            cr_assert(-hi + Sk + 512 <= INT32_MAX && lo + Sq + 512 <= INT32_MAX);
            for (int n = 0; n < 4; ++n) { /* the first and the last row sees what it should */
                const int64_t i = n % 2 ? Sq - 1 : 0, j = n / 2 ? Sk - 1 : 0;
                cr_assert_eq(j >= i + lo && j <= i + hi, fattni_visible(&want, i, j));
            }
        }
}
