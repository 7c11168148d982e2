/* The end of a row in the F32 and F64 forward kernels: what sink, dropout's scale and merge do to it. */
#ifndef FATTNI_CORE_DEVICE_FINISH_ROW_H
#define FATTNI_CORE_DEVICE_FINISH_ROW_H

#include "core/device/float_types.cuh"

/* Row epilogue: O = scale * accumulator + keep_old * old O, and the row's L. */
typedef struct row_result {
    real scale, L, keep_old;
} row_result;

/* top: the row's maximum; sum: its sum of exp(s - top); old_L: L of the earlier partial result, -inf without one, and
   then its O is not read. */
DEVICE row_result finish_row(const fattni_attention_args *a, real top, real sum, int h, real old_L) {
    row_result row = {sum != 0 ? 1 / sum : (real)0, sum != 0 ? top + log(sum) : -(real)INFINITY, 0};
    if (a->sink.p) {
        const real sink = real_at(&a->sink, h), both = top > sink ? top : sink; /* NaN if it is */
        if (sink == (real)INFINITY) {
            row.scale = 0, row.L = sink;
        } else if (both != -(real)INFINITY) {
            const real weight = exp(top - both), total = sum * weight + exp(sink - both);
            row.scale = weight / total;
            row.L = both + log(total);
        }
    }
    row.scale *= ARG(a, keep_scale);
    if (old_L == -(real)INFINITY) return row;
    const real high = old_L > row.L ? old_L : row.L, low = old_L > row.L ? row.L : old_L;
    const real joint = low == -(real)INFINITY || high == (real)INFINITY ? high : high + log1p(exp(low - high));
    row.keep_old = share_of(old_L, joint);
    row.scale *= share_of(row.L, joint);
    row.L = joint;
    return row;
}

#endif
