/* In which order blocks of rows or keys are taken: heads that go from long to short ones together (device.h). */
#include "core/cuda/device.h"

#include <stdlib.h>

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
