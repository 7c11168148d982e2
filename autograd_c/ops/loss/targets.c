#include "autograd_c/ops/loss/targets.h"

fattni_targets fattni_targets_of(const fattn_tensor *t, int32_t ignore) {
    return (fattni_targets){
        .data = t->data, .rows = fattni_rows_of(t), .count = fattn_tensor_numel(t), .ignore = ignore};
}

fattn_status fattni_targets_check(fattn_ctx *ctx, const char *op, const fattni_targets *t, int64_t V, int64_t *kept) {
    *kept = 0;
    for (int64_t row = 0; row < t->count; ++row) {
        const int32_t target = fattni_target(t, row);
        if (target == t->ignore) continue;
        if (target < 0 || target >= V)
            return fattn_ctx_fail(ctx, FATTN_E_ARG, "%s: target[%lld] is %d, the classes are 0..%lld and %d is ignored",
                                  op, (long long)row, target, (long long)V - 1, t->ignore);
        *kept += 1;
    }
    return FATTN_OK;
}
