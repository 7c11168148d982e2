/* What the CUDA backend's host code prepares for launches, tested without a GPU: sizes of workspaces, sizes that are
   rejected before anything is enqueued, tensor maps and other arguments, and which CUDA context is current. Nothing
   calls CUDA. */
#include "bwd/cuda/bwd_cuda.h"
#include "core/attention/kernel.h"
#include "core/cuda/library.h"
#include "fwd/cuda/fwd_cuda.h"
#include "host_calls.h"
#include "host_driver.h"
#include "plans.h"

#include <criterion/criterion.h>
#include <dlfcn.h>
#include <string.h>

Test(host_launch, sizes_do_not_depend_on_addresses_or_d_o, .timeout = 120) {
    for (int arch = 80; arch <= 90; arch += 10) {
        fattn_ctx ctx = context_of(arch);
        ctx.gpu.blas = (struct fattni_cuda_blas *)&driver; /* STANDARD checks that it is not NULL */
        cr_assert_gt(plans_check(&ctx), 100000);
    }
}

/* ---- the current CUDA context ---- */

static void check_maps(fattn_ctx *ctx, int depth) {
    shapes x;
    describe(&x, FATTN_BF16, 2, 300, 300, 64);
    for (int pass = FATTNI_FWD; pass <= FATTNI_BWD; ++pass) {
        fattni_problem p;
        fattni_fwd_sm90_args fwd;
        fattni_bwd_sm90_args bwd;
        fattni_bwd_choice choice;
        const fattni_bwd_parts whole = {.most = 1};
        const fattni_fwd_parts undivided = {1, 1};
        cr_assert_eq(fattni_problem_init(ctx, &x.p, &x.io, (enum fattni_pass)pass, true, &p), FATTN_OK);
        cr_assert(pass == FATTNI_FWD || !fattni_bwd_cuda_choose(ctx, &p, &choice));
        const fattni_cuda_kernel *const k = pass == FATTNI_FWD ? fattni_fwd_cuda_choose(ctx, &p).kernel : choice.main;
        cr_assert(k && k->arch == 90);
        fattni_bwd_args args = {0};
        if (pass == FATTNI_BWD) args = fattni_bwd_args_of(&p);
        driver_state.encoded = 0;
        const fattn_status s = pass == FATTNI_FWD
                                   ? fattni_fwd_sm90_args_of(ctx, &p, k, &undivided, &fwd)
                                   : fattni_bwd_sm90_args_of(ctx, &p, k, &whole, &args, place(0), false, &bwd);
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
Test(host_launch, calls_run_in_the_right_cuda_context) {
    fattn_ctx ctx = context_of(90);
    for (int n = 0; n < 3; ++n) {
        if (n) driver.push(other(n == 1));
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
Test(host_launch, grids_are_rejected_before_anything_is_written) {
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

Test(host_launch, libraries_are_looked_for) {
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

/* Quotients by multiplication are those of division. */
Test(host_launch, dividers) {
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

/* It plans, and does nothing else. */
Test(host_launch, a_planner_has_no_device) {
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

Test(host_launch, many_packed_sequences) {
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

/* The longest rows and largest positions: diagonals and sums with them stay within 31 bits. */
Test(host_launch, diagonals_of_far_positions) {
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
