/* In which order blocks of rows or keys are taken: heads that go from long to short ones together (device.h); and
   another order of the blocks, where few for each SM would end badly (sm90.h). */
#include "core/cuda/device.h"
#include "core/cuda/sm90.h"

#include <stdlib.h>
#include <string.h>

int64_t fattni_cuda_even_group(int64_t n, int64_t planes) {
    enum { MANY = 16, TRIED = 32 }; /* groups: the last of more does not matter; of n numbers so many are tried */
    int64_t even = n, most = planes % n;
    if (n >= planes || most == 0 || planes > MANY * n) return n;
    for (int64_t some = n / 2 + 1; some <= fattni_min(n + fattni_max(n / 4, 1), planes);
         some += fattni_ceil_div(n, TRIED)) {
        const int64_t last = planes % some ? planes % some : some;
        if (last > most || (last == most && llabs(some - n) < llabs(even - n))) even = some, most = last;
    }
    return even;
}

int64_t fattni_cuda_planes_in_l2(const fattn_ctx *ctx, int64_t bytes) {
    const int64_t fit = (int64_t)ctx->gpu.l2_bytes * 5 / 8 / fattni_max(bytes, 1);
    int64_t n = 1;
    while (2 * n <= fit) n *= 2;
    return n;
}

int64_t fattni_cuda_planes_at_once(const fattn_ctx *ctx, const fattni_attention_args *a, int64_t bytes, int64_t blocks,
                                   int64_t planes) {
    enum { CTAS = 2, FEW = 2 }; /* of an SM; blocks whose order does not matter */
    if (a->left < FATTNI_FAR || a->right == FATTNI_FAR || blocks <= FEW) return 0;
    const int64_t together = fattni_ceil_div(CTAS * ctx->gpu.sms, blocks),
                  n = fattni_max(fattni_cuda_planes_in_l2(ctx, bytes), together);
    return fattni_min(fattni_cuda_even_group(n, planes), planes);
}

/* Blocks below a diagonal are claimed from the longest on. Where there are up to three and a third for each SM that can
   end badly: with 2.9 (12 heads of 32 blocks) all SMs have had two at about the same time, and then take up to a sixth
   of the call for one of the last, or have none. So the blocks of the second wave come in another order, by which SMs
   end them at different times, and the last ones, still from the longest on, fill what is left. */

/* SMs that end at the same time. */
typedef struct ending {
    int64_t time, sms;
} ending;
/* When the last SM ends that claims blocks in an order. */
static int64_t end_in_order(const int32_t *times, int64_t count, int64_t planes, const fattni_block_order *order,
                            int64_t sms) {
    ending at[FATTNI_ORDERED_BLOCKS + 2] = {{0, sms}}; /* the soonest first; a block adds one at most */
    int size = 1;
    for (int n = 0; n < count; ++n)
        for (int64_t left = planes; left > 0;) {
            const ending next = {at[0].time + times[fattni_ordered_block(order, n)], fattni_min(at[0].sms, left)};
            left -= next.sms, at[0].sms -= next.sms;
            if (at[0].sms == 0) memmove(at, at + 1, (size_t)--size * sizeof *at);
            int to = size;
            while (to > 0 && at[to - 1].time > next.time) --to;
            if (to > 0 && at[to - 1].time == next.time) {
                at[to - 1].sms += next.sms;
            } else {
                memmove(at + to + 1, at + to, (size_t)(size++ - to) * sizeof *at);
                at[to] = next;
            }
        }
    return at[size - 1].time;
}

static fattni_block_order soonest(const int32_t *times, int64_t count, int64_t planes, int64_t sms) {
    fattni_block_order best = {0, 0, 0};
    const int64_t whole = end_in_order(times, count, planes, &best, sms);
    int64_t all = 0, least = whole - whole / 32; /* less is not worth it */
    for (int n = 0; n < count; ++n) all += times[n] * planes;
    if (all > least * sms) return best;
    const int32_t wave = (int32_t)(sms / planes);
    for (int32_t begin = wave; begin <= wave + 1; ++begin)
        for (int32_t turned = wave - 1; turned <= wave + 1; ++turned)
            for (int32_t shift = 0; shift < turned; shift += 1 + turned / 12) {
                const fattni_block_order order = {begin, turned, shift};
                if (begin < 1 || turned < 2 || begin + turned > count) continue;
                const int64_t end = end_in_order(times, count, planes, &order, sms);
                if (end < least) best = order, least = end;
            }
    return best;
}

/* Most calls of a thread are of a few shapes, of both passes, and `soonest` takes up to 0.3 ms (12 planes of 32 blocks:
   0.014). */
enum { KEPT = 8 };
typedef struct kept_order {
    int64_t count, planes, sms;
    int32_t times[FATTNI_ORDERED_BLOCKS];
    fattni_block_order order;
} kept_order;

bool fattni_sm90_may_order(int64_t count, int64_t planes, int64_t sms) {
    return count <= FATTNI_ORDERED_BLOCKS && planes * count > sms && 3 * planes * count <= 10 * sms;
}

fattni_block_order fattni_sm90_order_of(const int32_t *times, int64_t count, int64_t planes, int64_t sms) {
    static _Thread_local kept_order kept[KEPT];
    static _Thread_local unsigned next;
    if (!fattni_sm90_may_order(count, planes, sms)) return (fattni_block_order){0};
    const size_t bytes = (size_t)count * sizeof *times;
    for (int n = 0; n < KEPT; ++n)
        if (kept[n].count == count && kept[n].planes == planes && kept[n].sms == sms &&
            !memcmp(kept[n].times, times, bytes))
            return kept[n].order;
    kept_order *const x = &kept[next++ % KEPT];
    x->count = count, x->planes = planes, x->sms = sms;
    memcpy(x->times, times, bytes);
    return x->order = soonest(times, count, planes, sms);
}
