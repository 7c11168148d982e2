/* What the CUDA backend's host code prepares for launches, tested without a GPU: sizes of workspaces, sizes that are
   rejected before anything is enqueued, tensor maps and other arguments, and which CUDA context is current. Nothing
   calls CUDA. */
#include "bwd/cuda/bwd_cuda.h"
#include "core/attention/kernel.h"
#include "core/base/device.h"
#include "core/cuda/blas/blas.h"
#include "core/cuda/driver.h"
#include "core/cuda/library.h"
#include "core/cuda/sm90.h"
#include "fwd/cuda/fwd_cuda.h"
#include "fwd/cuda/fwd_decode.h"
#include "fwd/cuda/fwd_parts.h"
#include "fwd/cuda/fwd_split.h"
#include "host_calls.h"
#include "plans.h"

#include <criterion/criterion.h>
#include <dlfcn.h>
#include <string.h>

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
    return (fattn_ctx){.device = FATTN_CUDA,
                       .ops = fattni_device_ops_of(FATTN_CUDA),
                       .gpu = {.arch = arch,
                               .sms = 132,
                               .all_sms = 132,
                               .l2_bytes = (size_t)50 << 20,
                               .shared_limit = 232448,
                               .driver = &driver},
                       .allocator = {note_alloc, note_free, NULL}};
}

Test(host_launch, sizes_do_not_depend_on_addresses_or_d_o, .timeout = 120) {
    for (int arch = 80; arch <= 90; arch += 10) {
        fattn_ctx ctx = context_of(arch);
        ctx.gpu.blas = (struct fattni_cuda_blas *)&driver; /* STANDARD checks that it is not NULL */
        cr_assert_gt(plans_check(&ctx), 100000);
    }
}

/* ---- key blocks in parts ---- */

/* Which calls are divided; sm_limit does not matter. */
Test(host_launch, few_heads_are_divided) {
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
Test(host_launch, groups_are_divided) {
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
Test(host_launch, results_of_parts_are_bounded) {
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
Test(host_launch, another_order_of_blocks_ends_sooner) {
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
Test(host_launch, rows_of_head_groups_are_divided) {
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

Test(host_launch, the_last_group_of_heads_is_large) {
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
Test(host_launch, planes_are_taken_together_below_a_diagonal) {
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
Test(host_launch, few_row_blocks_are_divided) {
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
Test(host_launch, tiles_of_fewer_rows) {
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
Test(host_launch, small_grids_are_split) {
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
Test(host_launch, parts_do_not_depend_on_the_batch) {
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
Test(host_launch, parts_of_some_heads) {
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
Test(host_launch, parts_of_ragged_batches) {
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
Test(host_launch, parts_of_few_rows) {
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
Test(host_launch, parts_of_rows_of_large_groups) {
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
Test(host_launch, results_of_halves) {
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
Test(host_launch, too_many_parts) {
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
