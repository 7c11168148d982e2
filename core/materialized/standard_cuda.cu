/* Between the caller's tensors and dense [B,heads,rows,width] buffers; one thread per element. */
#include "core/materialized/standard_cuda.h"

#include "core/device/any_dtype.cuh"

enum { THREADS = FATTNI_STANDARD_THREADS };
static_assert((int)THREADS == (int)ROW_THREADS, "block_sum and block_max want blocks of ROW_THREADS");

/* Element n of the dense buffer: its row, its place in the view; false past a sequence's end. */
DEVICE int locate(const fattni_dense_args *x, int64_t n, int64_t *row, int64_t *at) {
    const int64_t d = n % x->width, i = n / x->width % x->rows, plane = n / x->width / x->rows;
    const int h = (int)(plane % x->heads), b = (int)(plane / x->heads);
    const sequence s = sequence_of(&x->a, b);
    *row = n / x->width;
    *at = s.batch * x->view.b + h * x->view.h + (i + (x->keys ? s.k0 : s.q0)) * x->view.row + d;
    return i < (x->keys ? s.Sk : s.Sq);
}

extern "C" __global__ void __launch_bounds__(THREADS) fattn_gather(const __grid_constant__ fattni_dense_args x) {
    begin_grid();
    const int64_t n = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (n >= (int64_t)x.a.B * x.heads * x.rows * x.width) return;
    int64_t row, at;
    const int inside = locate(&x, n, &row, &at);
    if (x.dense_dtype == FATTN_F64)
        store_f64(x.dense, FATTN_F64, n, inside ? load_f64(x.view.p, FATTN_F64, at) : 0.0);
    else
        store_f32(x.dense, x.dense_dtype, n, inside ? load_f32(x.view.p, x.view_dtype, at) : 0.0f);
}

#define BODY "core/materialized/standard_cuda.inc"
#include "core/device/for_each_real.inc"

extern "C" __global__ void __launch_bounds__(THREADS) fattn_scatter(const __grid_constant__ fattni_dense_args x) {
    begin_grid();
    const int64_t n = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (n >= (int64_t)x.a.B * x.heads * x.rows * x.width) return;
    if (x.dense_dtype == FATTN_F64)
        scatter_f64(&x, n);
    else
        scatter_f32(&x, n);
}
