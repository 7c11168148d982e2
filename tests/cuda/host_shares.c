/* How the CUDA backend's host code shares out work, tested without a GPU: Hopper's backward divides key blocks, takes
   causal blocks in another order, and heads in groups. */
#include "bwd/cuda/bwd_cuda.h"
#include "core/attention/kernel.h"
#include "core/cuda/sm90.h"
#include "fwd/cuda/fwd_cuda.h"
#include "host_calls.h"
#include "host_driver.h"

#include <criterion/criterion.h>

/* ---- key blocks in parts ---- */

/* Which calls are divided; sm_limit does not matter. */
Test(host_shares, few_heads_are_divided) {
    static const struct {
        int64_t H, Sq, Sk, D, most, blocks;
        uint32_t flags;
        int64_t whole;
    } calls[] = {
        {16, 1024, 1024, 128, 2, 12, FATTN_CAUSAL},
        {4, 4096, 4096, 128, 2, 47, FATTN_CAUSAL},
        {1, 8192, 8192, 128, 3, 44, FATTN_CAUSAL},
        {4, 1024, 1024, 128, 3, 6, 0},
        {1, 2048, 2048, 96, 5, 7, 0},
        {1, 4096, 4096, 64, 5, 7, FATTN_CAUSAL},
        {1, 64, 1 << 14, 64, 1, 0, 0},
        {1, 128, 128, 128, 1, 0, 0},
        {16, 4096, 4096, 128, 1, 0, 0},
        {9, 4096, 4096, 128, 5, 13, 0, 264}, /* the last of three waves */
        {5, 4096, 4096, 128, 4, 16, 0, 132},
        {20, 2048, 2048, 96, 2, 16, 0, 264},
        {9, 4096, 4096, 128, 1, 0, FATTN_DETERMINISTIC},
        {11, 2560, 2560, 128, 1, 0, FATTN_CAUSAL_TOP_LEFT},
        {9, 4096, 4096, 128, 1, 0, FATTN_CAUSAL},
        {64, 4096, 4096, 128, 1, 0, FATTN_CAUSAL},
        {1, 8192, 8192, 256, 1, 0, FATTN_CAUSAL}, /* clusters */
        {1, 8192, 8192, 128, 1, 0, FATTN_CAUSAL | FATTN_DETERMINISTIC},
    };
    for (size_t n = 0; n < 2 * sizeof calls / sizeof *calls; ++n) {
        fattn_ctx ctx = context_of(90);
        shapes x;
        fattni_problem p;
        fattni_bwd_choice choice;
        if (n % 2) ctx.gpu.sms = 2;
        describe(&x, FATTN_BF16, calls[n / 2].H, calls[n / 2].Sq, calls[n / 2].Sk, calls[n / 2].D);
        x.p.flags = calls[n / 2].flags;
        cr_assert_eq(fattni_problem_init(&ctx, &x.p, &x.io, FATTNI_BWD, true, &p), FATTN_OK);
        cr_assert(!fattni_bwd_cuda_choose(&ctx, &p, &choice));
        const fattni_bwd_parts parts = fattni_bwd_sm90_parts(&ctx, &p, choice.main);
        cr_assert_eq(parts.most, calls[n / 2].most, "call %zu: %lld parts", n / 2, (long long)parts.most);
        cr_assert_eq(parts.blocks, calls[n / 2].blocks, "call %zu: %lld row blocks", n / 2, (long long)parts.blocks);
        cr_assert_eq(parts.whole, calls[n / 2].whole, "call %zu: %lld are whole", n / 2, (long long)parts.whole);
        const int64_t divided = calls[n / 2].H * fattni_ceil_div(calls[n / 2].Sk, 128) - parts.whole;
        const size_t others = (size_t)((parts.most - 1) * divided);
        cr_assert_eq(parts.sums, others * 128 * (size_t)(choice.main->D + choice.main->Dv) * 4);
        cr_assert(parts.sums < 50 << 20 && (parts.stored > 0) == (parts.most > 1));
    }
}

/* A call with `keys` key heads, each of `group` query heads. */
static fattn_status grouped(fattn_ctx *ctx, shapes *x, int64_t keys, int64_t group, int64_t Sq, int64_t Sk, int64_t D,
                            uint32_t flags, fattni_problem *p) {
    describe(x, FATTN_BF16, keys * group, Sq, Sk, D);
    const int64_t of_keys[4] = {1, keys, Sk, D};
    for (int t = 0; t < TENSORS; ++t)
        if (t == K || t == V || t == DK || t == DV)
            x->t[t] = fattn_tensor_view(x->t[t].data, FATTN_BF16, FATTN_CUDA, 0, 4, of_keys);
    x->p.flags = flags;
    return fattni_problem_init(ctx, &x->p, &x->io, FATTNI_BWD, true, p);
}

/* Query heads that share keys are divided where that ends sooner than dividing their rows, and whole tasks turn. */
Test(host_shares, groups_are_divided) {
    static const struct {
        int64_t keys, group, N, D, most, blocks, heads, by_rows, turns;
        uint32_t flags;
        int64_t whole;
    } calls[] = {
        {2, 8, 8192, 128, 2, 0, 4, 1, 1, FATTN_CAUSAL},
        {4, 7, 4096, 128, 4, 0, 2, 1, 1, FATTN_CAUSAL}, /* the first part has one head */
        {8, 4, 2048, 128, 2, 0, 2, 1, 1, FATTN_CAUSAL},
        {4, 7, 6656, 128, 2, 0, 4, 1, 1, FATTN_CAUSAL},
        {4, 7, 10240, 128, 4, 0, 2, 1, 1, FATTN_CAUSAL, 264}, /* those that are left after two waves */
        {8, 4, 5120, 128, 4, 4, 0, 1, 1, FATTN_CAUSAL, 264},
        {1, 71, 2048, 64, 15, 0, 5, 1, 1, FATTN_CAUSAL},
        {2, 6, 2048, 128, 7, 5, 0, 0, 0, FATTN_CAUSAL}, /* rows */
        {2, 8, 2048, 128, 4, 8, 0, 1, 0, 0},
        {4, 7, 8192, 128, 1, 0, 0, 1, 1, FATTN_CAUSAL},
        {8, 8, 8192, 128, 1, 0, 0, 1, 1, FATTN_CAUSAL},
        {8, 8, 8192, 64, 1, 0, 0, 1, 1, FATTN_CAUSAL},
        {16, 1, 8192, 128, 1, 0, 0, 0, 0, FATTN_CAUSAL},
        {8, 8, 6144, 128, 2, 0, 4, 1, 1, FATTN_CAUSAL, 264},
        {24, 8, 2048, 128, 1, 0, 0, 1, 0, FATTN_CAUSAL}, /* as many tasks, but short ones; in another order */
        {8, 4, 8192, 64, 1, 0, 0, 1, 1, FATTN_CAUSAL},
        {40, 4, 1024, 128, 1, 0, 0, 0, 0, FATTN_CAUSAL},
        {8, 4, 8192, 128, 1, 0, 0, 0, 0, FATTN_CAUSAL | FATTN_DETERMINISTIC},
        {8, 8, 8192, 128, 1, 0, 0, 1, 0, FATTN_CAUSAL | FATTN_DETERMINISTIC},
        {8, 8, 8192, 64, 1, 0, 0, 0, 0, FATTN_CAUSAL | FATTN_DETERMINISTIC},
    };
    for (size_t n = 0; n < sizeof calls / sizeof *calls; ++n) {
        fattn_ctx ctx = context_of(90);
        shapes x;
        fattni_problem p;
        fattni_bwd_choice choice;
        cr_assert_eq(
            grouped(&ctx, &x, calls[n].keys, calls[n].group, calls[n].N, calls[n].N, calls[n].D, calls[n].flags, &p),
            FATTN_OK);
        cr_assert(!fattni_bwd_cuda_choose(&ctx, &p, &choice));
        const fattni_bwd_parts parts = fattni_bwd_sm90_parts(&ctx, &p, choice.main);
        cr_expect_eq(parts.most, calls[n].most, "call %zu: %lld parts", n, (long long)parts.most);
        cr_expect_eq(parts.blocks, calls[n].blocks, "call %zu: %lld row blocks", n, (long long)parts.blocks);
        cr_expect_eq(parts.heads, calls[n].heads, "call %zu: %lld heads", n, (long long)parts.heads);
        cr_expect_eq(parts.whole, calls[n].whole, "call %zu: %lld are whole", n, (long long)parts.whole);
        fattni_bwd_sm90_args s = {.bwd.a = fattni_cuda_args_of(&p), .most_parts = (int32_t)parts.most};
        s.schedule.blocks = (int32_t)fattni_bwd_sm90_blocks(&p, choice.main), s.part_heads = (int32_t)parts.heads;
        s.whole = (int32_t)parts.whole;
        s.schedule.order = fattni_bwd_sm90_order(&ctx, &p, choice.main, &parts);
        fattni_bwd_sm90_order_rows(&s, &p, choice.main);
        cr_expect_eq(s.by_rows, calls[n].by_rows, "call %zu: by_rows %d", n, s.by_rows);
        cr_expect_eq(s.turns, calls[n].turns, "call %zu: turns %d", n, s.turns);
    }
}

/* Of few key heads and long groups, whose tasks are divided most, at most 512 results of parts are stored. */
Test(host_shares, results_of_parts_are_bounded) {
    static const uint32_t masks[] = {FATTN_CAUSAL, FATTN_CAUSAL_TOP_LEFT, 0};
    int divided = 0;
    for (int n = 0; n < 2000; ++n) {
        const int64_t keys = 1 + n % 4, group = 1 + n / 4 % 8, Sq = 128 * (1 + n % 23), Sk = 128 * (1 + n * 7 % 97);
        fattn_ctx ctx = context_of(90);
        shapes x;
        fattni_problem p;
        fattni_bwd_choice choice;
        cr_assert_eq(grouped(&ctx, &x, keys, group, Sq, Sk, 128, masks[n % 3], &p), FATTN_OK);
        cr_assert(!fattni_bwd_cuda_choose(&ctx, &p, &choice));
        const fattni_bwd_parts parts = fattni_bwd_sm90_parts(&ctx, &p, choice.main);
        divided += parts.most > 1;
        cr_assert(parts.sums <= 512u * 128 * 256 * 4, "%lld/%lld heads, %lld x %lld: %zu bytes",
                  (long long)(keys * group), (long long)keys, (long long)Sq, (long long)Sk, parts.sums);
    }
    cr_assert(divided > 500, "%d calls are divided", divided);
}

/* ---- the order of blocks, and rows of head groups ---- */

enum { BLOCKS = 128 }; /* of a head, at most */
typedef struct ordered_call {
    fattni_block_order order;
    int count, times[BLOCKS]; /* blocks, the longest first */
} ordered_call;

/* What a pass takes for the blocks of a causal head, as it estimates them, and their order. */
static ordered_call ordered_call_of(enum fattni_pass pass, int64_t heads, int64_t N, int64_t D, uint32_t flags) {
    fattn_ctx ctx = context_of(90);
    shapes x;
    fattni_problem p;
    ordered_call c = {0};
    describe(&x, FATTN_BF16, heads, N, N, D);
    x.p.flags = flags;
    cr_assert_eq(fattni_problem_init(&ctx, &x.p, &x.io, pass, true, &p), FATTN_OK);
    if (pass == FATTNI_BWD) {
        fattni_bwd_choice choice;
        cr_assert(!fattni_bwd_cuda_choose(&ctx, &p, &choice));
        const fattni_bwd_parts parts = fattni_bwd_sm90_parts(&ctx, &p, choice.main);
        const int64_t BM = choice.main->BM;
        c.order = fattni_bwd_sm90_order(&ctx, &p, choice.main, &parts);
        for (int64_t j0 = 0; j0 < N && c.count < BLOCKS; j0 += 128)
            c.times[c.count++] = (int)(4 * (fattni_ceil_div(N, BM) - j0 / BM) + (BM == 64 ? 12 : 5));
    } else {
        const fattni_cuda_kernel *const k = fattni_fwd_cuda_choose(&ctx, &p).kernel;
        const fattni_fwd_parts parts = fattni_fwd_sm90_parts(&ctx, &p, k);
        c.order = fattni_fwd_sm90_order(&ctx, &p, k, &parts);
        for (int64_t n = fattni_ceil_div(N, k->BM); n > 0 && c.count < BLOCKS; --n)
            c.times[c.count++] = (int)(10 * fattni_ceil_div(fattni_min(N, n * k->BM), k->BN) + 10);
    }
    return c;
}
/* When 132 SMs end that claim these blocks of `heads` heads in an order, each the one that is free first. */
static int64_t end_of_order(const ordered_call *x, const fattni_block_order *order, int64_t heads) {
    int64_t time[132] = {0}, last = 0;
    for (int n = 0; n < x->count; ++n)
        for (int64_t head = 0; head < heads; ++head) {
            int first = 0;
            for (int sm = 1; sm < 132; ++sm)
                if (time[sm] < time[first]) first = sm;
            time[first] += x->times[fattni_ordered_block(order, n)];
            last = fattni_max(last, time[first]);
        }
    return last;
}

/* Each block comes once, and the call ends a 32nd sooner or more. */
Test(host_shares, another_order_of_blocks_ends_sooner) {
    const fattni_block_order from_longest = {0, 0, 0};
    for (int pass = FATTNI_FWD; pass <= FATTNI_BWD; ++pass) {
        int others = 0;
        for (int64_t D = 64; D <= 128; D += 64)
            for (int64_t heads = 3; heads <= 48; ++heads)
                for (int64_t N = 512; N <= 12288; N += N / 2 / 128 * 128) {
                    const ordered_call x = ordered_call_of((enum fattni_pass)pass, heads, N, D, FATTN_CAUSAL);
                    bool seen[BLOCKS] = {false}, good = true;
                    for (int n = 0; n < x.count; ++n) {
                        const int block = fattni_ordered_block(&x.order, n);
                        good &= block >= 0 && block < x.count && !seen[block];
                        if (good) seen[block] = true;
                    }
                    cr_assert(good);
                    if (!x.order.count) continue;
                    others += 1;
                    const int64_t end = end_of_order(&x, &x.order, heads),
                                  before = end_of_order(&x, &from_longest, heads);
                    cr_assert(32 * end <= 31 * before + 31, "%lld heads of %lld: %lld, not %lld", (long long)heads,
                              (long long)N, (long long)end, (long long)before);
                }
        cr_assert(others >= 10, "%d orders", others);
        const fattni_block_order twelve = ordered_call_of((enum fattni_pass)pass, 12, 4096, 128, FATTN_CAUSAL).order;
        cr_assert(twelve.begin == 11 && twelve.count == 11 && twelve.shift == 4);
        cr_assert_eq(ordered_call_of((enum fattni_pass)pass, 12, 4096, 128, 0).order.count, 0);
        cr_assert_eq(ordered_call_of((enum fattni_pass)pass, 48, 4096, 128, FATTN_CAUSAL).order.count, 0, "many");
    }
    cr_assert_eq(ordered_call_of(FATTNI_BWD, 12, 4096, 128, FATTN_CAUSAL | FATTN_DETERMINISTIC).order.count, 0);
    cr_assert_eq(ordered_call_of(FATTNI_BWD, 12, 4096, 256, FATTN_CAUSAL).order.count, 0, "clusters");
    /* Calls of cuda_attention: shares_of_work; each block of 128 is one of its lengths. */
    for (int64_t D = 64; D <= 128; D += 64) {
        cr_assert(ordered_call_of(FATTNI_BWD, 33, 1150, D, FATTN_CAUSAL).order.count);
        cr_assert(ordered_call_of(FATTNI_BWD, 44, 1000, D, FATTN_CAUSAL).order.count);
    }
    cr_assert(ordered_call_of(FATTNI_FWD, 44, 1000, 128, FATTN_CAUSAL).order.count);
}

/* Every row of a head group is of one work item; where there are few head groups each SM has one at most of the first,
   or of the first two, of as few rows as that allows. */
Test(host_shares, rows_of_head_groups_are_divided) {
    int divided = 0, many = 0;
    for (int n = 0; n < 2000; ++n) {
        const int32_t D = n % 2 ? 64 : 128, block = D == 64 ? 128 : 64, group = 1 + n % 5, heads = 1 + n * 7 % 90;
        const int32_t planes = heads * (1 + n % 6), rows = block * (1 + n * 11 % 70), blocks = (rows + 127) / 128;
        fattni_bwd_sm90_args s = {.schedule = fattni_sm90_schedule_of(blocks, planes, heads), .most_parts = 1};
        s.schedule.next_tile = place(0);
        s.whole = s.schedule.tiles;
        s.bwd.padded_rows = rows, s.bwd.row_block = block, s.bwd.D_padded = D;
        s.bwd.a.group = group, s.bwd.a.Hq = planes * group;
        fattni_schedule_backward(&s, 1, 132);
        const int32_t all = heads * group;
        int64_t seen = 0;
        bool empty = false;
        for (int32_t item = 0; item < s.row_items; ++item) { /* as rows_of_item has it */
            int head = item;
            const int chunk = fattni_divide(&head, &s.by_chunks), begin = chunk * s.rows_at_once;
            const int32_t of_item = (int32_t)fattni_min(s.row_heads, all - head * s.row_heads);
            empty |= of_item <= 0 || begin >= rows;
            seen += of_item * (fattni_min(begin + s.rows_at_once, rows) - begin);
        }
        cr_assert(!empty && seen == (int64_t)all * rows, "case %d", n);
        cr_assert(s.rows_at_once % block == 0 && s.rows_at_once <= FATTNI_ROWS_AT_ONCE(D));
        const int32_t most = 132 / (s.head_groups > 1 ? 2 : 1);
        const bool fewer = s.rows_at_once < FATTNI_ROWS_AT_ONCE(D), few = s.head_groups <= FATTNI_FEW_GROUPS;
        divided += fewer, many += !few;
        cr_assert(few || !fewer, "case %d", n);
        if (fewer) cr_assert_leq(s.row_items, most, "case %d", n);
        if (few && s.rows_at_once > block)
            cr_assert_gt(fattni_items_of_rows(&s, all, s.rows_at_once - block), most, "case %d", n);
    }
    cr_assert(divided > 100 && many > 100, "%d calls with fewer rows, %d of many head groups", divided, many);
}

/* ---- heads in groups ---- */

Test(host_shares, the_last_group_of_heads_is_large) {
    static const int64_t known[][3] = {{8, 9, 9},    {8, 12, 6}, {8, 13, 7},   {8, 25, 9}, {8, 100, 10},
                                       {16, 20, 20}, {4, 5, 5},  {32, 50, 25}, {1, 7, 1},  {2, 3, 3}};
    for (size_t i = 0; i < sizeof known / sizeof *known; ++i)
        cr_assert_eq(fattni_cuda_even_group(known[i][0], known[i][1]), known[i][2], "case %zu", i);
    for (int64_t n = 1; n <= 256; n *= 2)
        for (int64_t planes = 1; planes <= 2000; ++planes) {
            const int64_t even = fattni_cuda_even_group(n, planes), before = planes % n, last = planes % even;
            if (planes <= n || before == 0 || planes > 16 * n) {
                cr_assert_eq(even, n, "%lld of %lld", (long long)n, (long long)planes);
                continue;
            }
            cr_assert(2 * even > n && (4 * even <= 5 * n || even == n + 1) && even <= planes, "%lld: %lld of %lld",
                      (long long)even, (long long)n, (long long)planes);
            cr_assert(last == 0 || last >= before, "%lld: the last of %lld has %lld", (long long)even,
                      (long long)planes, (long long)last);
            cr_assert(last == 0 || 4 * last >= even, "%lld: the last of %lld has %lld", (long long)even,
                      (long long)planes, (long long)last);
        }
}

/* Of kernels with a CTA for each block. */
Test(host_shares, planes_are_taken_together_below_a_diagonal) {
    fattn_ctx ctx = context_of(80);
    ctx.gpu.l2_bytes = 40 << 20, ctx.gpu.sms = 108;
    fattni_attention_args a = {.left = FATTNI_FAR, .right = 0};
    cr_assert_eq(fattni_cuda_planes_at_once(&ctx, &a, 1 << 20, 32, 100), 20); /* 16 fit; 20 five times */
    cr_assert_eq(fattni_cuda_planes_at_once(&ctx, &a, 1 << 20, 32, 12), 12);
    cr_assert_eq(fattni_cuda_planes_at_once(&ctx, &a, 100 << 20, 16, 96), 16); /* none fits, 216 CTAs have 14 */
    cr_assert_eq(fattni_cuda_planes_at_once(&ctx, &a, 1 << 20, 2, 12), 0);
    a.right = FATTNI_FAR;
    cr_assert_eq(fattni_cuda_planes_at_once(&ctx, &a, 1 << 20, 32, 100), 0);
    a.right = 0, a.left = 100;
    cr_assert_eq(fattni_cuda_planes_at_once(&ctx, &a, 1 << 20, 32, 100), 0);
}
