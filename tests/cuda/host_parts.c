/* Into how many parts the CUDA backend's host code divides the keys of small grids and of few rows, tested without a
   GPU. */
#include "core/attention/kernel.h"
#include "fwd/cuda/fwd_cuda.h"
#include "fwd/cuda/fwd_decode.h"
#include "fwd/cuda/fwd_parts.h"
#include "fwd/cuda/fwd_split.h"
#include "host_calls.h"
#include "host_driver.h"

#include <criterion/criterion.h>
#include <string.h>

/* ---- small grids: keys in parts ---- */

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

/* Which calls are divided; sm_limit does not matter, nor do addresses for the workspace. */
Test(host_parts, few_row_blocks_are_divided) {
    static const struct {
        int64_t B, H, Sq, Sk, D, most, blocks;
        uint32_t flags;
    } calls[] = {
        {1, 1, 8192, 8192, 128, 3, 22, FATTN_CAUSAL},
        {1, 1, 2048, 2048, 128, 4, 4, 0},
        {1, 1, 4096, 4096, 64, 7, 5, FATTN_CAUSAL},
        {1, 2, 4096, 4096, 96, 2, 16, 0},
        {1, 2, 4096, 4096, 256, 3, 18, FATTN_CAUSAL},
        {2, 1, 4096, 4096, 256, 3, 18, FATTN_CAUSAL},
        {1, 4, 200, 1 << 14, 128, 16, 8, 0},
        {1, 8, 24 * 128, 1 << 20, 128, 2, 4096, 0}, /* with more parts the workspace would be larger */
        {1, 128, 128, 128, 128, 1, 1, 0},
        {1, 16, 4096, 4096, 128, 1, 1, 0},
        {64, 1, 8192, 8192, 128, 1, 1, FATTN_CAUSAL},
        {1, 1, 8192, 8192, 128, 1, 1, FATTN_CAUSAL | FATTN_DETERMINISTIC},
    };
    for (size_t n = 0; n < 2 * sizeof calls / sizeof *calls; ++n) {
        fattn_ctx ctx = context_of(90);
        shapes x;
        fattni_problem p;
        if (n % 2) ctx.gpu.sms = 2;
        describe_batch(&x, FATTN_BF16, calls[n / 2].B, calls[n / 2].H, calls[n / 2].Sq, calls[n / 2].Sk,
                       calls[n / 2].D);
        x.p.flags = calls[n / 2].flags;
        cr_assert_eq(fattni_problem_init(&ctx, &x.p, &x.io, FATTNI_FWD, true, &p), FATTN_OK);
        const fattni_fwd_choice choice = fattni_fwd_cuda_choose(&ctx, &p);
        const fattni_cuda_kernel *const k = choice.kernel;
        const fattni_fwd_parts parts = choice.parts;
        cr_assert_eq(parts.most, calls[n / 2].most, "call %zu: %lld parts", n / 2, (long long)parts.most);
        cr_assert_eq(parts.blocks, calls[n / 2].blocks, "call %zu: %lld key blocks", n / 2, (long long)parts.blocks);
        cr_assert_eq(k->variant == FATTNI_VARIANT_PARTS, parts.most > 1, "call %zu: %s", n / 2, k->name);
        const size_t rows = (size_t)(calls[n / 2].B * calls[n / 2].H * fattni_ceil_div(calls[n / 2].Sq, k->BM) * k->BM),
                     stored = fattni_fwd_parts_stored(&p, k, &parts), sums = fattni_fwd_parts_sums(&p, k, &parts);
        cr_assert_eq(sums, rows * (size_t)((parts.most - 1) * k->Dv) * 4);
        cr_assert(sums < 50 << 20 && (stored > 0) == (parts.most > 1));
        cr_assert_eq(plan_of(&ctx, &x).fwd_workspace,
                     FATTNI_ALIGN + stored + sums + fattni_fwd_parts_rows(&p, k, &parts));
        for (int moved = 0; moved <= V; ++moved) {
            shapes y = x;
            fattn_attention_io *const io = &y.io;
            io->q = &y.t[Q], io->k = &y.t[K], io->v = &y.t[V], io->o = &y.t[O], io->lse = &y.lse;
            y.t[moved].data = (char *)y.t[moved].data + 2;
            cr_assert_eq(plan_of(&ctx, &y).fwd_workspace, plan_of(&ctx, &x).fwd_workspace);
        }
    }
}

/* At head_dim 64 tiles have 192 rows, or 128 where the last wave is shorter so. */
Test(host_parts, tiles_of_fewer_rows) {
    static const struct {
        int64_t H, N;
        uint32_t flags;
        const char *kernel;
    } calls[] = {
        {8, 4096, 0, "_d64_full_128x128"},
        {8, 4096, FATTN_CAUSAL, "_d64_short_128x128"},
        {64, 4096, 0, "_d64_full_192x128"},
        {64, 4096, FATTN_CAUSAL, "_d64_causal_192x128"},
        {64, 1000, FATTN_CAUSAL, "_d64_short_128x128"},
        {4000, 2000, FATTN_CAUSAL, "_d64_causal_192x128"},
    };
    for (size_t n = 0; n < sizeof calls / sizeof *calls; ++n) {
        fattn_ctx ctx = context_of(90);
        shapes x;
        describe(&x, FATTN_BF16, calls[n].H, calls[n].N, calls[n].N, 64);
        x.p.flags = calls[n].flags;
        const fattn_attention_plan plan = plan_of(&ctx, &x);
        cr_assert(strstr(plan.fwd_kernel, calls[n].kernel), "%zu: %s", n, plan.fwd_kernel);
    }
}

/* Bytes of one part's result. */
static size_t result_bytes(const fattni_cuda_kernel *k, fattn_dtype dtype, int64_t Sq, int64_t Dv) {
    const int64_t rows = fattni_min(Sq, k->BM), width = (Dv + 7) / 8 * 8;
    return (size_t)((rows * (width + 2) + 7) / 8 * 8) * (dtype == FATTN_F64 ? 8 : 4);
}

/* Which calls are split, and into how many parts, from the workspace: a result for each row block and part. */
Test(host_parts, small_grids_are_split) {
    static const struct {
        int64_t H, Sq, Sk;
        int32_t window;           /* half of it to the left and half to the right; 0: none */
        int64_t real, tf32, half; /* parts; not of 16 bits on Hopper */
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
                const int64_t want = type < TYPE_TF32    ? calls[n].real
                                     : type == TYPE_TF32 ? calls[n].tf32
                                     : arch < 90         ? calls[n].half
                                                         : 0;
                if (want == 0) continue; /* few rows, or a number that depends on BN and BM */
                const fattn_attention_plan plan = plan_of(&ctx, &x);
                const fattni_cuda_kernel *const k = kernel_called(fattni_fwd_cuda_kernels, plan.fwd_kernel);
                const size_t one = arch == 90 ? FATTNI_ALIGN : 0; /* the counter of Hopper's kernels */
                const int64_t blocks = (calls[n].Sq + k->BM - 1) / k->BM * calls[n].H;
                const size_t result = result_bytes(k, (fattn_dtype)x.t[Q].dtype, calls[n].Sq, 64);
                cr_assert_eq(plan.fwd_workspace, want == 1 ? one : (size_t)(blocks * want) * result,
                             "sm_%d, call %zu, type %d, %s: %zu bytes, not %lld parts of %zu", arch, n, type, k->name,
                             plan.fwd_workspace, (long long)want, result);
            }
}

/* On Hopper those of 16 bits depend on the call, unless it is deterministic. */
static void make_deterministic(shapes *x, int arch, int type) {
    if (arch == 90 && type >= TYPE_F16) x->p.flags |= FATTN_DETERMINISTIC;
}

/* Kernel and parts of a sequence do not depend on their number, and the workspace is proportional to it. */
Test(host_parts, parts_do_not_depend_on_the_batch) {
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
            make_deterministic(&x, architectures[n], type);
            const fattn_attention_plan one = plan_of(ctx, &x);
            describe_type(&x, type, 77, H, Sq, Sk, 128);
            make_deterministic(&x, architectures[n], type);
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
Test(host_parts, parts_of_some_heads) {
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
            make_deterministic(&whole, arch, n / 12), make_deterministic(&half, arch, n / 12);
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
Test(host_parts, parts_of_ragged_batches) {
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
Test(host_parts, parts_of_few_rows) {
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

/* The same of fwd_decode_rows.cuh; a tile that sees all keys has no more parts than the host takes as a bound. */
Test(host_parts, parts_of_rows_of_large_groups) {
    for (int heads = 1; heads <= 40; ++heads) {
        const int most = fattni_rows_most_parts(heads);
        cr_assert(most >= FATTNI_ROWS_PARTS / 8 && most * (heads < 8 ? heads : 8) < 2 * FATTNI_ROWS_PARTS);
        for (int bound = 1; bound <= 300000; bound += 1 + bound / 7)
            for (int keys = 1; keys <= bound; keys += 1 + keys / 50) {
                const int part = fattni_rows_keys_of_part(keys, most), parts = fattni_cuda_parts_of(keys, part);
                cr_assert(part % FATTNI_ROWS_BLOCK == 0 && part >= FATTNI_ROWS_LEAST && parts <= most &&
                              parts <= fattni_cuda_parts_of(bound, FATTNI_ROWS_LEAST),
                          "%d of %d keys in parts of %d", keys, bound, part);
            }
    }
}

/* Results are numbered in the order of their parts; an item and a half begin one each. */
Test(host_parts, results_of_halves) {
    for (int parts = 1; parts <= 128; ++parts)
        for (int each = 1; each <= parts; ++each) {
            const fattni_rows_order x = fattni_rows_order_of(parts, each);
            int results = 0;
            for (int part = 0; part < parts; ++part) {
                const bool joins = fattni_rows_joins(&x, part);
                cr_assert(!joins || (part % each && part != x.half), "part %d of %d, %d an item", part, parts, each);
                if (!joins) ++results;
                cr_assert_eq(fattni_rows_result(&x, part), results - 1, "part %d of %d, %d an item", part, parts, each);
            }
            cr_assert_eq(x.results, results, "%d parts, %d an item", parts, each);
            if (each < parts) cr_assert_leq(results, fattni_rows_most_results(parts, each));
            if (2 * each == parts) cr_assert_eq(results, 2, "%d parts in halves", parts);
        }
}

/* More parts of all sequences than CUDA has blocks. */
Test(host_parts, too_many_parts) {
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
