/* Contracts of a CUDA context other than accuracy: determinism, workspaces, conventions for rows without keys, calls
   that are rejected. */
#include "contexts.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

Test(cuda_contracts, deterministic_gradients_repeat, .timeout = 200) {
    fattn_ctx *const ctx = context_or_skip();
    cudaStream_t other;
    must(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "stream");
    fattn_ctx *const beside = context(other, 0);
    attention_case load = wide_case(0); /* keeps the GPU busy, unevenly */
    load.flags = 0;
    call *const busy = call_new(beside, &load);
    for (int n = 0; n < WIDE_CASES; ++n) {
        const attention_case a = wide_case(n);
        call *const c = call_new(ctx, &a);
        cr_assert_eq(c->plan.deterministic, 1);
        call_run(c);
        const uint64_t first = call_bits(c, CALL_DQ, CALL_D_SINK);
        for (int k = 0; k < 50; ++k) {
            if (k % 3 == 0) call_run(busy);
            call_fill(c, CALL_DQ, NAN);
            call_backward(c);
            cr_assert_eq(call_bits(c, CALL_DQ, CALL_D_SINK), first, "case %d, repetition %d", n, k);
        }
        call_free(c);
    }
    call_free(busy);
    fattn_ctx_destroy(beside);
    fattn_ctx_destroy(ctx);
    must(cudaStreamDestroy(other), "stream");
}

/* Results that one CTA writes are deterministic without the flag, too: a race would show. */
Test(cuda_contracts, results_of_one_cta_repeat, .timeout = 200) {
    fattn_ctx *const ctx = context_or_skip();
    for (int n = 0; n < WIDE_CASES; ++n) {
        attention_case a = wide_case(n);
        a.flags &= ~(uint32_t)FATTN_DETERMINISTIC;
        call *const c = call_new(ctx, &a);
        uint64_t first = 0;
        for (int k = 0; k < 60; ++k) {
            call_fill(c, CALL_O, NAN);
            call_fill(c, CALL_DK, NAN);
            call_run(c);
            const uint64_t bits = call_bits(c, CALL_O, CALL_LSE) ^ call_bits(c, CALL_DK, CALL_DV) ^
                                  call_bits(c, CALL_D_SINK, CALL_D_SINK);
            if (k == 0) first = bits;
            cr_assert_eq(bits, first, "%s, repetition %d", c->plan.bwd_kernel, k);
        }
        call_free(c);
    }
    fattn_ctx_destroy(ctx);
}

/* Sums of at most 22 blocks in two orders, each addition with an error of half a unit; 16-bit results are rounded once
   more. */
static void assert_same_sums(call *a, call *b, fattn_dtype dtype, enum call_tensor id, bool same_kernel, int n) {
    double *const x = call_read(a, id), *const y = call_read(b, id);
    const double unit = dtype == FATTN_F64 ? 0x1p-53 : 0x1p-24;
    const double rounding = dtype == FATTN_F16 ? 0x1p-10 : dtype == FATTN_BF16 ? 0x1p-7 : 0;
    double most = 0, off = 0;
    for (int64_t e = 0; e < fattn_tensor_numel(&a->t[id]); ++e) {
        cr_assert(isfinite(x[e]) && isfinite(y[e]), "case %d", n);
        most = fmax(most, fabs(x[e]));
        off = fmax(off, fabs(x[e] - y[e]));
    }
    cr_assert(!same_kernel || off <= (22 * unit + rounding) * most, "case %d, tensor %d: %g apart, %g at most", n,
              (int)id, off, most);
    free(x);
    free(y);
}

Test(cuda_contracts, deterministic_and_atomic_sums_agree, .timeout = 100) {
    fattn_ctx *const ctx = context_or_skip();
    for (int n = 0; n < WIDE_CASES; ++n) {
        attention_case a = wide_case(n);
        call *const fixed = call_new(ctx, &a);
        a.flags &= ~(uint32_t)FATTN_DETERMINISTIC;
        call *const any = call_new(ctx, &a);
        cr_assert(!any->plan.deterministic || strstr(any->plan.bwd_kernel, "standard"));
        call_run(fixed);
        call_run(any);
        const bool same = strcmp(fixed->plan.bwd_kernel, any->plan.bwd_kernel) == 0;
        cr_assert_eq(call_bits(fixed, CALL_D_SINK, CALL_D_SINK), call_bits(any, CALL_D_SINK, CALL_D_SINK));
        for (int id = CALL_DQ; id <= CALL_DV; ++id)
            assert_same_sums(fixed, any, a.dtype, (enum call_tensor)id, same, n);
        call_free(fixed);
        call_free(any);
    }
    fattn_ctx_destroy(ctx);
}

Test(cuda_contracts, nondeterministic_calls_are_rejected) {
    fattn_ctx *const ctx = context_or_skip();
    attention_case a = wide_case(1);
    a.bias = BIAS | BIAS_OVER_B, a.flags = 0;
    call *const c = call_new(ctx, &a);
    c->params.flags = FATTN_DETERMINISTIC;
    cr_assert_eq(fattn_attention_query(ctx, &c->params, &c->io, &c->plan), FATTN_E_UNSUPPORTED);
    cr_assert(strstr(fattn_ctx_error(ctx), "dbias"), "%s", fattn_ctx_error(ctx));
    c->io.d_bias = NULL;
    cr_assert_eq(fattn_attention_query(ctx, &c->params, &c->io, &c->plan), FATTN_OK);
    call_free(c);
    fattn_ctx_destroy(ctx);
}

Test(cuda_contracts, sm_limit_changes_no_bits) {
    fattn_ctx *const all = context_or_skip(), *const few = context(NULL, 2);
    for (int n = 0; n < 12; ++n) {
        const attention_case a = wide_case(n);
        call *const c = call_new(all, &a), *const d = call_new(few, &a);
        call_run(c);
        call_run(d);
        cr_assert_eq(call_bits(c, CALL_O, CALL_LSE), call_bits(d, CALL_O, CALL_LSE));
        cr_assert_eq(call_bits(c, CALL_DQ, CALL_D_SINK), call_bits(d, CALL_DQ, CALL_D_SINK));
        call_free(c);
        call_free(d);
    }
    fattn_ctx_destroy(few);
    fattn_ctx_destroy(all);
}

static void all_finite(call *c, enum call_tensor first, enum call_tensor last) {
    for (int id = (int)first; id <= (int)last; ++id) {
        if (!c->t[id].dtype) continue;
        double *const x = call_read(c, (enum call_tensor)id);
        for (int64_t n = 0; n < fattn_tensor_numel(&c->t[id]); ++n)
            cr_assert(isfinite(x[n]), "%s: tensor %d, element %lld is %g",
                      fattn_dtype_name((fattn_dtype)c->t[CALL_Q].dtype), id, (long long)n, x[n]);
        free(x);
    }
}

/* A query with aligned tensors and without d_o: its sizes suffice when one or all tensors are moved by an
   element, and for an F32 d_o. */
Test(cuda_contracts, workspace_of_a_query_suffices_anywhere, .timeout = 100) {
    fattn_ctx *const ctx = context_or_skip();
    static const enum call_tensor moved[] = {CALL_Q, CALL_K, CALL_V, CALL_O, CALL_D_O, CALL_DQ, CALL_DK, CALL_DV};
    enum { MOVED = 8 };
    for (int n = 0; n < 8; ++n) {
        const attention_case a = {.name = "places",
                                  .dtype = dtype_of(n),
                                  .B = 2,
                                  .Hq = 4,
                                  .Hkv = 2,
                                  .Sq = 513,
                                  .Sk = 513,
                                  .D = n < 4 ? 64 : 256,
                                  .flags = FATTN_CAUSAL};
        call *const c = call_new(ctx, &a);
        fattn_attention_plan plan = {.struct_size = sizeof plan};
        fattn_attention_io without = c->io;
        without.d_o = NULL;
        call_must(ctx, fattn_attention_query(ctx, &c->params, &without, &plan), "query");
        fattn_tensor memory, wide, aside[MOVED], best[MOVED];
        call_must(ctx, fattn_tensor_alloc(ctx, FATTN_U8, 1, (int64_t[]){(int64_t)plan.bwd_workspace}, &memory),
                  "workspace");
        call_run(c);
        c->io.workspace = memory.data, c->io.workspace_bytes = plan.bwd_workspace;
        const bool narrow = a.dtype == FATTN_BF16 || a.dtype == FATTN_F16;
        call_must(ctx, fattn_tensor_alloc(ctx, narrow ? FATTN_F32 : a.dtype, 4, c->t[CALL_D_O].shape, &wide), "d_o");
        call_must(ctx, fattn_tensor_copy(ctx, &wide, &c->t[CALL_D_O]), "copy");
        for (int k = 0; k < MOVED; ++k) {
            best[k] = c->t[moved[k]];
            call_must(ctx,
                      fattn_tensor_alloc(ctx, (fattn_dtype)best[k].dtype, 1,
                                         (int64_t[]){fattn_tensor_numel(&best[k]) + 1}, &aside[k]),
                      "aside");
        }
        for (int k = 0; k < 2 * (MOVED + 2); ++k) { /* none, one, all */
            for (int i = 0; i < MOVED; ++i) {
                c->t[moved[i]] = best[i];
                if (k / 2 != i && k / 2 != MOVED) continue;
                c->t[moved[i]].data = (char *)aside[i].data + fattn_dtype_size((fattn_dtype)best[i].dtype);
                call_must(ctx, fattn_tensor_copy(ctx, &c->t[moved[i]], &best[i]), "copy");
            }
            c->io.d_o = k % 2 ? &wide : &c->t[CALL_D_O];
            for (int i = 5; i < MOVED; ++i) call_fill(c, moved[i], NAN);
            call_backward(c);
            all_finite(c, CALL_DQ, CALL_DV);
        }
        for (int k = 0; k < MOVED; ++k) c->t[moved[k]] = best[k], fattn_tensor_free(ctx, &aside[k]);
        fattn_tensor_free(ctx, &wide);
        call_free(c);
        fattn_tensor_free(ctx, &memory);
    }
    fattn_ctx_destroy(ctx);
}

/* --- conventions ------------------------------------------------------------------------------ */

Test(cuda_contracts, merging_into_nothing_does_not_read_o) {
    fattn_ctx *const ctx = context_or_skip();
    for (int n = 0; n < 4; ++n) {
        const attention_case a = {.name = "merge",
                                  .dtype = dtype_of(n),
                                  .B = 2,
                                  .Hq = 2,
                                  .Sq = 90,
                                  .Sk = 100,
                                  .D = 64,
                                  .wide = true,
                                  .flags = FATTN_MERGE | FATTN_CAUSAL};
        uint64_t bits[2];
        for (int k = 0; k < 2; ++k) {
            call *const c = call_new(ctx, &a);
            call_fill(c, CALL_O, k ? NAN : 0);
            call_fill(c, CALL_LSE, -INFINITY);
            call_forward(c);
            all_finite(c, CALL_O, CALL_LSE);
            bits[k] = call_bits(c, CALL_O, CALL_LSE);
            call_free(c);
        }
        cr_assert_eq(bits[0], bits[1], "%s", fattn_dtype_name(a.dtype));
    }
    fattn_ctx_destroy(ctx);
}

/* Causal with more rows than keys: the first rows have no keys and L = -inf. */
Test(cuda_contracts, rows_without_keys_ignore_d_lse) {
    fattn_ctx *const ctx = context_or_skip();
    for (int n = 0; n < 4; ++n) {
        const attention_case a = {.name = "tall",
                                  .dtype = dtype_of(n),
                                  .B = 1,
                                  .Hq = 2,
                                  .Sq = 150,
                                  .Sk = 100,
                                  .D = 64,
                                  .d_lse = true,
                                  .flags = FATTN_CAUSAL | FATTN_DETERMINISTIC};
        uint64_t bits[2];
        for (int k = 0; k < 2; ++k) {
            call *const c = call_new(ctx, &a);
            double *const d_lse = call_read(c, CALL_D_LSE);
            for (int i = 0; i < 100; ++i) d_lse[i / 50 * 150 + i % 50] = k ? NAN : 0;
            call_write(c, CALL_D_LSE, d_lse);
            call_run(c);
            all_finite(c, CALL_DQ, CALL_DV);
            bits[k] = call_bits(c, CALL_DQ, CALL_DV);
            free(d_lse);
            call_free(c);
        }
        cr_assert_eq(bits[0], bits[1], "%s", fattn_dtype_name(a.dtype));
    }
    fattn_ctx_destroy(ctx);
}

/* A sink of +inf takes everything: O = 0, L = +inf, and only dsink = sum dL is left. */
Test(cuda_contracts, a_sink_of_infinity) {
    fattn_ctx *const ctx = context_or_skip();
    for (int n = 0; n < 4; ++n) {
        const attention_case a = {.name = "sink",
                                  .dtype = dtype_of(n),
                                  .B = 3,
                                  .Hq = 2,
                                  .Sq = 150,
                                  .Sk = 70,
                                  .D = 40,
                                  .d_lse = true,
                                  .sink = true};
        call *const c = call_new(ctx, &a);
        call_fill(c, CALL_SINK, INFINITY);
        call_fill(c, CALL_D_LSE, 0.5);
        call_run(c);
        for (int id = CALL_O; id <= CALL_D_SINK; ++id) {
            if (!c->t[id].dtype || (id > CALL_LSE && id < CALL_DQ)) continue;
            const double want = id == CALL_LSE ? INFINITY : id == CALL_D_SINK ? 0.5 * 3 * 150 : 0;
            double *const x = call_read(c, (enum call_tensor)id);
            for (int64_t e = 0; e < fattn_tensor_numel(&c->t[id]); ++e)
                cr_assert(x[e] == want, "%s: tensor %d, element %lld is %g, not %g", fattn_dtype_name(a.dtype), id,
                          (long long)e, x[e], want);
            free(x);
        }
        call_free(c);
    }
    fattn_ctx_destroy(ctx);
}

/* Lengths are read on the device, which cannot report errors: they are clamped. */
Test(cuda_contracts, lengths_are_clamped) {
    fattn_ctx *const ctx = context_or_skip();
    static const double wrong[4][4] = {{900, -7, 70}, {500, 40, -1}, {-5, 50, 90, 5000}, {0, 30, 999, 999}};
    static const double right[4][4] = {{80, 0, 70}, {90, 40, 0}, {0, 50, 90, 150}, {0, 30, 150, 150}};
    for (int n = 0; n < 8; ++n) {
        attention_case a = {.name = "lengths",
                            .dtype = dtype_of(n),
                            .B = 3,
                            .Hq = 2,
                            .Sq = 80,
                            .Sk = 90,
                            .D = 64,
                            .flags = FATTN_CAUSAL | FATTN_DETERMINISTIC,
                            .length_q = {50, 50, 50},
                            .length_k = {50, 50, 50}};
        a.lengths = n < 4 ? LENGTHS_PADDED : LENGTHS_PACKED;
        uint64_t bits[2];
        for (int k = 0; k < 2; ++k) {
            call *const c = call_new(ctx, &a);
            const double(*const lengths)[4] = k ? right : wrong;
            call_write(c, n < 4 ? CALL_SEQLENS_Q : CALL_CU_Q, lengths[n < 4 ? 0 : 2]);
            call_write(c, n < 4 ? CALL_SEQLENS_K : CALL_CU_K, lengths[n < 4 ? 1 : 3]);
            call_run(c);
            bits[k] = call_bits(c, CALL_O, CALL_LSE) ^ call_bits(c, CALL_DQ, CALL_DV);
            call_free(c);
        }
        cr_assert_eq(bits[0], bits[1], "%s, case %d", fattn_dtype_name(a.dtype), n);
    }
    fattn_ctx_destroy(ctx);
}

Test(cuda_contracts, too_many_rows) {
    fattn_ctx *const ctx = context_or_skip();
    const int64_t rows = (1 << 28) + 1, shape[4] = {1, 1, rows, 8}, keys[4] = {1, 1, 64, 8};
    fattn_tensor q = fattn_tensor_view((void *)256, FATTN_F32, FATTN_CUDA, 0, 4, shape);
    fattn_tensor k = fattn_tensor_view((void *)256, FATTN_F32, FATTN_CUDA, 0, 4, keys);
    const fattn_tensor lse = fattn_tensor_view((void *)256, FATTN_F32, FATTN_CUDA, 0, 3, shape);
    const fattn_attention_io io = {.struct_size = sizeof io, .q = &q, .k = &k, .v = &k, .o = &q, .lse = &lse};
    for (int n = 0; n < 4; ++n) {
        q.dtype = k.dtype = (int32_t)dtype_of(n);
        if (dtype_of(n) == FATTN_F64) continue; /* L would be F64 */
        fattn_attention_plan plan = {.struct_size = sizeof plan};
        cr_assert_eq(fattn_attention_query(ctx, NULL, &io, &plan), FATTN_E_UNSUPPORTED);
        cr_assert(strstr(fattn_ctx_error(ctx), "2^28"), "%s", fattn_ctx_error(ctx));
    }
    fattn_ctx_destroy(ctx);
}

/* Element numbers beyond 2^31: the second sequence lies 2^31 elements behind the first. */
Test(cuda_contracts, far_strides, .timeout = 60) {
    fattn_ctx *const ctx = context_or_skip();
    const attention_case a = {.name = "far",
                              .dtype = FATTN_F32,
                              .B = 2,
                              .Hq = 2,
                              .Sq = 130,
                              .Sk = 90,
                              .D = 64,
                              .flags = FATTN_CAUSAL | FATTN_DETERMINISTIC};
    attention_case half = a;
    half.dtype = call_has_bf16() ? FATTN_BF16 : FATTN_F16;
    for (int n = 0; n < 2; ++n) {
        const attention_case *const c = n ? &half : &a;
        call *const near = call_new(ctx, c), *const far = call_new(ctx, c);
        const int64_t apart = ((int64_t)1 << 31) + 64, size[1] = {2 * apart};
        fattn_tensor memory;
        call_must(ctx, fattn_tensor_alloc(ctx, far->t[CALL_Q].dtype, 1, size, &memory), "memory");
        static const enum call_tensor moved[] = {CALL_Q, CALL_K, CALL_D_O, CALL_DQ, CALL_O, CALL_DV};
        fattn_tensor before[6];
        for (int k = 0; k < 6; ++k) {
            fattn_tensor *const t = &far->t[moved[k]];
            before[k] = *t;
            t->data = (char *)memory.data + (size_t)k * 65536 * 4; /* a sequence has fewer */
            t->stride[0] = apart;
            call_must(ctx, fattn_tensor_copy(ctx, t, &before[k]), "copy");
        }
        call_run(near);
        call_run(far);
        cr_assert_eq(call_bits(near, CALL_O, CALL_LSE), call_bits(far, CALL_O, CALL_LSE));
        cr_assert_eq(call_bits(near, CALL_DQ, CALL_DV), call_bits(far, CALL_DQ, CALL_DV));
        for (int k = 0; k < 6; ++k) far->t[moved[k]] = before[k];
        call_free(near);
        call_free(far);
        fattn_tensor_free(ctx, &memory);
    }
    fattn_ctx_destroy(ctx);
}

/* As tests/unit/test_overlaps.c: overlaps that addresses prove are rejected before anything is enqueued. */
Test(cuda_contracts, results_that_share_memory_are_rejected) {
    fattn_ctx *const ctx = context_or_skip();
    for (int n = 0; n < 4; ++n) {
        const attention_case a = {.name = "overlaps",
                                  .dtype = dtype_of(n),
                                  .B = 2,
                                  .Hq = 2,
                                  .Sq = 64,
                                  .Sk = 64,
                                  .D = 64,
                                  .bias = BIAS,
                                  .sink = true};
        call *const c = call_new(ctx, &a);
        call_run(c);
        for (int out = 0; out < CALL_COUNT; ++out)
            for (int in = 0; in < CALL_COUNT; ++in) {
                const bool forward = out == CALL_O || out == CALL_LSE;
                const bool backward = out >= CALL_DQ && out <= CALL_D_SINK;
                if (out == in || !(forward || backward) || (forward && in >= CALL_D_O)) continue;
                if (!c->t[out].dtype || !c->t[in].dtype) continue;
                void *const own = c->t[out].data;
                c->t[out].data = c->t[in].data;
                const fattn_status s = forward ? fattn_attention_fwd(ctx, &c->params, &c->io)
                                               : fattn_attention_bwd(ctx, &c->params, &c->io);
                c->t[out].data = own;
                cr_assert_eq(s, FATTN_E_ARG, "tensor %d at %d", out, in);
                cr_assert(strstr(fattn_ctx_error(ctx), " overlap: bytes 0x"), "%s", fattn_ctx_error(ctx));
            }
        call_run(c);
        call_free(c);
    }
    fattn_ctx_destroy(ctx);
}

/* The largest positions: results that depend only on their difference are those near 0; a window covers it. */
Test(cuda_contracts, far_positions) {
    fattn_ctx *const ctx = context_or_skip();
    const int64_t far = (int64_t)1 << 29;
    for (int n = 0; n < 12; ++n) {
        attention_case near = {.name = "positions",
                               .dtype = dtype_of(n),
                               .B = 2,
                               .Hq = 2,
                               .Sq = 200,
                               .Sk = 230,
                               .D = 64,
                               .flags = FATTN_WINDOW | FATTN_DETERMINISTIC,
                               .window_left = 40,
                               .window_right = 30,
                               .alibi = n < 4,
                               .q_pos0 = 16};
        attention_case away = near;
        if (n / 4 == 0) away.q_pos0 = far, away.k_pos0 = far - 16;
        if (n / 4 == 1) away.q_pos0 = far, away.window_left += (int32_t)far - 16, near.window_right = -1;
        if (n / 4 == 2) away.k_pos0 = far, away.window_right += (int32_t)far, near.window_left = -1;
        call *const c = call_new(ctx, &near), *const d = call_new(ctx, &away);
        call_run(c);
        call_run(d);
        cr_assert_eq(call_bits(c, CALL_O, CALL_LSE), call_bits(d, CALL_O, CALL_LSE), "case %d", n);
        cr_assert_eq(call_bits(c, CALL_DQ, CALL_DV), call_bits(d, CALL_DQ, CALL_DV), "case %d", n);
        d->params.q_pos0 = far + 1;
        cr_assert_eq(fattn_attention_fwd(ctx, &d->params, &d->io), FATTN_E_ARG);
        cr_assert_eq(fattn_attention_bwd(ctx, &d->params, &d->io), FATTN_E_ARG);
        cr_assert(strstr(fattn_ctx_error(ctx), "536870913"), "%s", fattn_ctx_error(ctx));
        call_free(c);
        call_free(d);
    }
    fattn_ctx_destroy(ctx);
}

/* A rejected call has not cleared d_bias; its other tensors have no memory. */
Test(cuda_contracts, a_rejected_call_writes_nothing) {
    fattn_ctx *const ctx = context_or_skip();
    for (int n = 0; n < 4; ++n)
        for (int algorithm = FATTN_ALGO_AUTO; algorithm <= FATTN_ALGO_FLASH2; ++algorithm) {
            const fattn_dtype statistic = dtype_of(n) == FATTN_F64 ? FATTN_F64 : FATTN_F32;
            const int64_t rows[4] = {1, 1 << 20, 1 << 20, 8}, keys[4] = {1, 1 << 20, 64, 8}, one[4] = {1, 1, 1, 1};
            void *const nowhere = (void *)((uintptr_t)1 << 50);
            const fattn_tensor q = fattn_tensor_view(nowhere, dtype_of(n), FATTN_CUDA, 0, 4, rows);
            const fattn_tensor k = fattn_tensor_view(nowhere, dtype_of(n), FATTN_CUDA, 0, 4, keys);
            const fattn_tensor lse = fattn_tensor_view(nowhere, statistic, FATTN_CUDA, 0, 3, rows);
            const fattn_attention_params p = {.struct_size = sizeof p, .algorithm = algorithm};
            fattn_tensor bias, dq = q, dk = k, dv = k, o = q;
            void **const apart[] = {&dq.data, &dk.data, &dv.data, &o.data};
            for (int i = 0; i < 4; ++i) *apart[i] = (void *)((uintptr_t)(i + 2) << 50);
            double x = 7;
            fattn_tensor host = fattn_tensor_view(&x, FATTN_F64, FATTN_CPU, 0, 4, one);
            call_must(ctx, fattn_tensor_alloc(ctx, statistic, 4, one, &bias), "bias");
            call_must(ctx, fattn_tensor_copy(ctx, &bias, &host), "bias");
            const fattn_tensor bias_in = fattn_tensor_view(nowhere, statistic, FATTN_CUDA, 0, 4, one);
            const fattn_attention_io io = {.struct_size = sizeof io,
                                           .q = &q,
                                           .k = &k,
                                           .v = &k,
                                           .o = &o,
                                           .lse = &lse,
                                           .bias = &bias_in,
                                           .d_o = &q,
                                           .dq = &dq,
                                           .dk = &dk,
                                           .dv = &dv,
                                           .d_bias = &bias,
                                           .workspace = (void *)((uintptr_t)1 << 60),
                                           .workspace_bytes = (size_t)1 << 60,
                                           .saved = (void *)((uintptr_t)1 << 61),
                                           .saved_bytes = (size_t)1 << 60};
            cr_assert_eq(fattn_attention_bwd(ctx, &p, &io), FATTN_E_UNSUPPORTED);
            x = 0;
            call_must(ctx, fattn_tensor_copy(ctx, &host, &bias), "bias");
            cr_assert_eq(x, 7, "algorithm %d, %s", algorithm, fattn_dtype_name(dtype_of(n)));
            fattn_tensor_free(ctx, &bias);
        }
    fattn_ctx_destroy(ctx);
}
