/* Ranks on GPUs: communicators and attention over ranks that are threads of this process, each on a stream of its own.
   They are spread over the GPUs there are, and share them if they are more. */
#include "contexts.h"
#include "cp.h"
#include "ranks.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_RANKS = 8 };
static cudaStream_t streams[MOST_RANKS];
static fattn_stream handles[MOST_RANKS];

static void open_streams(void) {
    fattn_ctx_destroy(context_or_skip());
    must(cudaGetDeviceCount(&ranks_gpus), "cudaGetDeviceCount");
    for (int n = 0; n < MOST_RANKS; ++n) {
        must(cudaSetDevice(n % ranks_gpus), "cudaSetDevice");
        cr_assert_eq(cudaStreamCreateWithFlags(&streams[n], cudaStreamNonBlocking), cudaSuccess);
        handles[n] = (fattn_stream)streams[n];
    }
    must(cudaSetDevice(0), "cudaSetDevice");
    cp_streams = handles;
}
static void close_streams(void) {
    for (int n = 0; n < MOST_RANKS; ++n) cudaStreamDestroy(streams[n]);
}
TestSuite(cuda_ranks, .init = open_streams, .fini = close_streams, .timeout = 300);

#define TRY(expression)                                                                                                \
    do {                                                                                                               \
        const fattn_status try_status = (expression);                                                                  \
        if (try_status) return try_status;                                                                             \
    } while (0)

/* Many sums in a row of numbers that change on the way: a transfer that is not ordered after the kernel before it, or
   before the one after it, gives other numbers. */
static fattn_status sums(rank_call *c) {
    enum { N = 100003, ROUNDS = 20 };
    static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_BF16, FATTN_F64};
    for (int d = 0; d < 3; ++d) {
        const int64_t n = N;
        fattn_tensor x, y;
        TRY(fattn_tensor_alloc(c->ctx, dtypes[d], 1, &n, &x));
        TRY(fattn_tensor_alloc(c->ctx, dtypes[d], 1, &n, &y));
        double start = c->rank + 1, got[2];
        fattn_tensor from = fattn_tensor_view(&start, FATTN_F64, FATTN_CPU, 0, 1, &n);
        from.stride[0] = 0;
        double want = 0;
        for (int r = 0; r < c->size; ++r) want += r + 1;
        TRY(fattn_tensor_copy(c->ctx, &x, &from));
        for (int round = 0; round < ROUNDS; ++round) {
            TRY(fattn_tensor_copy(c->ctx, &y, &x));
            TRY(fattn_comm_all_reduce(c->comm, &y));
            const fattn_tensor last = fattn_tensor_slice(&y, 0, N - 1, N), first = fattn_tensor_slice(&y, 0, 0, 1);
            const int64_t one = 1;
            const fattn_tensor a = fattn_tensor_view(&got[0], FATTN_F64, FATTN_CPU, 0, 1, &one);
            const fattn_tensor b = fattn_tensor_view(&got[1], FATTN_F64, FATTN_CPU, 0, 1, &one);
            TRY(fattn_tensor_copy(c->ctx, &a, &first));
            TRY(fattn_tensor_copy(c->ctx, &b, &last));
            if (got[0] != want || got[1] != want)
                return fattn_ctx_fail(c->ctx, FATTN_E_MISMATCH, "round %d: %g, %g instead of %g", round, got[0], got[1],
                                      want);
        }
        fattn_tensor_free(c->ctx, &x);
        fattn_tensor_free(c->ctx, &y);
    }
    return FATTN_OK;
}
Test(cuda_ranks, sums) {
    for (int size = 1; size <= MOST_RANKS; size *= 2) {
        const ranks_options o = {.device = FATTN_CUDA, .streams = size < 8 ? handles : NULL};
        expect_ranks(size, &o, sums, NULL);
    }
}

/* Around a ring without any wait of the host. */
static fattn_status ring(rank_call *c) {
    enum { HOPS = 64 };
    const int64_t n = 1 << 18;
    fattn_tensor x[2];
    for (int i = 0; i < 2; ++i) TRY(fattn_tensor_alloc(c->ctx, FATTN_F32, 1, &n, &x[i]));
    float one = 1, mine = (float)c->rank;
    fattn_tensor ones = fattn_tensor_view(&one, FATTN_F32, FATTN_CPU, 0, 1, &n), rank = ones, all;
    ones.stride[0] = rank.stride[0] = 0, rank.data = &mine;
    TRY(fattn_tensor_copy(c->ctx, &x[0], &rank));
    TRY(fattn_tensor_alloc(c->ctx, FATTN_F32, 1, &n, &all));
    TRY(fattn_tensor_copy(c->ctx, &all, &ones));
    for (int hop = 0; hop < HOPS; ++hop) {
        TRY(fattn_comm_send_receive(c->comm, &x[hop % 2], (c->rank + 1) % c->size, &x[1 - hop % 2],
                                    (c->rank + c->size - 1) % c->size));
        TRY(fattn_tensor_add(c->ctx, &x[1 - hop % 2], &all));
    }
    float *const got = calloc((size_t)n, sizeof *got);
    const fattn_tensor to = fattn_tensor_view(got, FATTN_F32, FATTN_CPU, 0, 1, &n);
    TRY(fattn_tensor_copy(c->ctx, &to, &x[0]));
    const float want = (float)(((c->rank - HOPS) % c->size + c->size) % c->size + HOPS);
    int64_t wrong = 0;
    for (int64_t i = 0; i < n; ++i) wrong += got[i] != want;
    free(got);
    for (int i = 0; i < 2; ++i) fattn_tensor_free(c->ctx, &x[i]);
    fattn_tensor_free(c->ctx, &all);
    if (wrong)
        return fattn_ctx_fail(c->ctx, FATTN_E_MISMATCH, "%lld numbers are not %g", (long long)wrong, (double)want);
    return FATTN_OK;
}
Test(cuda_ranks, ring_of_copies) {
    for (int size = 1; size <= MOST_RANKS; ++size) {
        const ranks_options o = {.device = FATTN_CUDA, .streams = handles};
        expect_ranks(size, &o, ring, NULL);
    }
}

/* ---- attention ---- */

static const char *const forms[] = {"auto", "ring", "all-gather", "ulysses"};

static const cp_case cases[] = {
    {"f64", .B = 1, .Hq = 4, .Hkv = 4, .N = 301, .D = 40, .dtype = FATTN_F64, .flags = FATTN_CAUSAL},
    {"f64, all", .B = 1, .Hq = 8, .Hkv = 4, .N = 301, .D = 24, .dtype = FATTN_F64,
     .flags = FATTN_CAUSAL | FATTN_WINDOW | FATTN_ACC_DQ | FATTN_ACC_DK | FATTN_ACC_DV, .window_left = 100,
     .window_right = -1, .dropout_p = 0.2f, .alibi = true, .sink = true, .d_lse = true, .rng_step = true},
    {"f64, packed", .B = 1, .Hq = 4, .Hkv = 4, .N = 300, .D = 16, .dtype = FATTN_F64, .flags = FATTN_CAUSAL,
     .n_sequences = 5, .lengths = {7, 0, 181, 1, 111}},
    {"f64, ALiBi, window", .B = 2, .Hq = 4, .Hkv = 4, .N = 200, .D = 16, .dtype = FATTN_F64, .flags = FATTN_WINDOW,
     .window_left = 50, .window_right = 9, .alibi = true, .heads_last = true},
};

Test(cuda_ranks, attention_like_one_device) {
    for (size_t n = 0; n < sizeof cases / sizeof *cases; ++n) {
        cp_result want = cp_whole(&cases[n], FATTN_CUDA, 0);
        for (int form = FATTN_CP_AUTO; form <= FATTN_CP_ULYSSES; ++form)
            for (int ranks = 1; ranks <= 4; ranks *= 2) {
                cp_result got = cp_run(&cases[n], FATTN_CUDA, ranks, form, ranks == 4);
                for (int i = 0; i < CP_RESULTS; ++i)
                    cr_assert_leq(cp_error(&got, &want, i), 1e-12, "%s, %s, %d ranks: %s is off by %g", cases[n].name,
                                  forms[form], ranks, cp_names[i], cp_error(&got, &want, i));
                cp_free(&got);
            }
        cp_free(&want);
    }
}

static const cp_case exact_cases[] = {
    {"bf16 d64 causal", .B = 1, .Hq = 4, .Hkv = 4, .N = 2000, .D = 64, .dtype = FATTN_BF16, .flags = FATTN_CAUSAL},
    {"bf16 d128 full", .B = 2, .Hq = 4, .Hkv = 4, .N = 1500, .D = 128, .dtype = FATTN_BF16},
    {"bf16 d128 causal, heads last", .B = 1, .Hq = 8, .Hkv = 4, .N = 1500, .D = 128, .dtype = FATTN_BF16,
     .flags = FATTN_CAUSAL, .heads_last = true},
    {"f16 d256 causal", .B = 1, .Hq = 4, .Hkv = 4, .N = 700, .D = 256, .dtype = FATTN_F16, .flags = FATTN_CAUSAL},
    {"bf16 d64 window", .B = 1, .Hq = 4, .Hkv = 4, .N = 1500, .D = 64, .dtype = FATTN_BF16,
     .flags = FATTN_CAUSAL | FATTN_WINDOW, .window_left = 300},
    {"bf16 d64 all", .B = 1, .Hq = 4, .Hkv = 4, .N = 1500, .D = 64, .dtype = FATTN_BF16, .flags = FATTN_CAUSAL,
     .dropout_p = 0.1f, .alibi = true, .sink = true, .d_lse = true},
    {"f32 d64", .B = 1, .Hq = 4, .Hkv = 4, .N = 900, .D = 64, .dtype = FATTN_F32, .flags = FATTN_CAUSAL},
};

/* Deterministic: the bits of one device. */
static void exact(const cp_case *given, int n_cases, int form, int least_ranks) {
    int bad = 0; /* in all cases, so that one run shows them all */
    for (int n = 0; n < n_cases; ++n) {
        cp_case c = given[n];
        c.flags |= FATTN_DETERMINISTIC;
        cp_result want = cp_whole(&c, FATTN_CUDA, 0);
        for (int ranks = least_ranks; ranks <= 4 && c.Hkv % ranks == 0; ranks *= 2) {
            cp_result got = cp_run(&c, FATTN_CUDA, ranks, form, ranks == 2);
            for (int i = CP_O; i <= CP_DV; ++i)
                if (!cp_same(&got, &want, i)) {
                    ++bad;
                    cr_log_error("%s, %s, %d ranks: %s has other bits, off by %g", c.name, forms[form], ranks,
                                 cp_names[i], cp_error(&got, &want, i));
                }
            cp_free(&got);
        }
        cp_free(&want);
    }
    cr_assert_eq(bad, 0, "%d results have other bits", bad);
}
#define COUNT(x) ((int)(sizeof(x) / sizeof *(x)))
Test(cuda_ranks, ulysses_has_the_bits_of_one_device) { exact(exact_cases, COUNT(exact_cases), FATTN_CP_ULYSSES, 1); }
Test(cuda_ranks, all_gather_has_the_bits_of_one_device) {
    exact(exact_cases, COUNT(exact_cases), FATTN_CP_ALL_GATHER, 1);
}

/* A rank computes its heads in groups while others' tensors move. */
static const cp_case group_cases[] = {
    {"5 heads in 3 groups", .B = 1, .Hq = 10, .Hkv = 10, .N = 1500, .D = 64, .dtype = FATTN_BF16, .groups = 3,
     .flags = FATTN_CAUSAL},
    {"4 groups", .B = 1, .Hq = 16, .Hkv = 16, .N = 1500, .D = 128, .dtype = FATTN_BF16, .groups = 4,
     .flags = FATTN_CAUSAL},
    {"GQA", .B = 2, .Hq = 18, .Hkv = 6, .N = 1300, .D = 128, .dtype = FATTN_BF16, .groups = 2, .flags = FATTN_CAUSAL},
    {"heads last, ACC", .B = 2, .Hq = 12, .Hkv = 12, .N = 900, .D = 64, .dtype = FATTN_F16, .groups = 4,
     .flags = FATTN_CAUSAL | FATTN_ACC_DQ | FATTN_ACC_DK | FATTN_ACC_DV, .heads_last = true, .wide = true},
    {"all", .B = 1, .Hq = 16, .Hkv = 8, .N = 1500, .D = 64, .dtype = FATTN_BF16, .groups = 4, .flags = FATTN_CAUSAL,
     .dropout_p = 0.1f, .alibi = true, .sink = true, .d_lse = true, .key_means = true},
    {"f32", .B = 1, .Hq = 8, .Hkv = 8, .N = 9000, .D = 64, .dtype = FATTN_F32, .groups = 2, .flags = FATTN_CAUSAL},
    {"window", .B = 1, .Hq = 8, .Hkv = 8, .N = 1500, .D = 64, .dtype = FATTN_BF16, .groups = 4,
     .flags = FATTN_CAUSAL | FATTN_WINDOW, .window_left = 300},
    {"packed", .B = 1, .Hq = 8, .Hkv = 4, .N = 1500, .D = 64, .dtype = FATTN_BF16, .groups = 4, .flags = FATTN_CAUSAL,
     .n_sequences = 5, .lengths = {7, 0, 981, 1, 511}},
};
Test(cuda_ranks, groups_of_heads_have_the_bits_of_one_device) {
    cp_case copies[COUNT(group_cases)];
    memcpy(copies, group_cases, sizeof copies);
    for (int n = 0; n < 4; ++n) {
        for (int i = 0; i < COUNT(copies); ++i) copies[i].saves = n % 2;
        exact(copies, COUNT(copies), FATTN_CP_ULYSSES, 2);
    }
}

Test(cuda_ranks, all_gather_has_the_same_bits_with_key_means) {
    const cp_case c = {"key means",
                       .B = 1,
                       .Hq = 4,
                       .Hkv = 4,
                       .N = 1500,
                       .D = 64,
                       .dtype = FATTN_BF16,
                       .flags = FATTN_CAUSAL | FATTN_DETERMINISTIC,
                       .key_means = true};
    cp_result whole = cp_whole(&c, FATTN_CUDA, 0), one = cp_run(&c, FATTN_CUDA, 1, FATTN_CP_ALL_GATHER, 0);
    for (int ranks = 2; ranks <= 4; ranks *= 2) {
        cp_result gathered = cp_run(&c, FATTN_CUDA, ranks, FATTN_CP_ALL_GATHER, 0);
        cp_result exchanged = cp_run(&c, FATTN_CUDA, ranks, FATTN_CP_ULYSSES, 0);
        for (int i = CP_O; i <= CP_DV; ++i) {
            cr_assert(cp_same(&gathered, &one, i), "all-gather, %d ranks: %s", ranks, cp_names[i]);
            cr_assert(cp_same(&exchanged, &whole, i), "ulysses, %d ranks: %s", ranks, cp_names[i]);
        }
        cp_free(&gathered);
        cp_free(&exchanged);
    }
    cp_free(&whole);
    cp_free(&one);
}

/* Parts are merged in F32, so that the error in 16 bits does not grow with the number of ranks. */
Test(cuda_ranks, error_does_not_grow) {
    const cp_case c = {
        "bf16", .B = 1, .Hq = 4, .Hkv = 2, .N = 2048, .D = 64, .dtype = FATTN_BF16, .flags = FATTN_CAUSAL};
    cp_result exactly = cp_whole(&c, FATTN_CUDA, FATTN_F64), one = cp_whole(&c, FATTN_CUDA, 0);
    for (int form = FATTN_CP_RING; form <= FATTN_CP_ALL_GATHER; ++form)
        for (int ranks = 1; ranks <= MOST_RANKS; ranks *= 2) {
            cp_result got = cp_run(&c, FATTN_CUDA, ranks, form, 0);
            for (int i = CP_O; i <= CP_DV; ++i)
                if (i != CP_LSE)
                    cr_assert_leq(cp_error(&got, &exactly, i), 1.1 * cp_error(&one, &exactly, i),
                                  "%s, %d ranks: the error of %s is %g, on one device %g", forms[form], ranks,
                                  cp_names[i], cp_error(&got, &exactly, i), cp_error(&one, &exactly, i));
            cp_free(&got);
        }
    cp_free(&exactly);
    cp_free(&one);
}

Test(cuda_ranks, the_op) {
    int64_t n;
    double *const want = cp_op(FATTN_CPU, 1, FATTN_CP_ULYSSES, false, 3, &n);
    double largest = 0;
    for (int64_t i = 0; i < n; ++i) largest = fmax(largest, fabs(want[i]));
    for (int form = FATTN_CP_RING; form <= FATTN_CP_ULYSSES; ++form)
        for (int ranks = 1; ranks <= 4; ranks *= 2) {
            double *const got = cp_op(FATTN_CUDA, ranks, form, ranks > 2, 3, &n);
            for (int64_t i = 0; i < n; ++i)
                cr_assert_leq(fabs(got[i] - want[i]), 1e-12 * largest, "%s, %d ranks: [%lld]", forms[form], ranks,
                              (long long)i);
            free(got);
        }
    free(want);
}
