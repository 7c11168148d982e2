#include "fwd/cuda/fwd_pages.h"

#include "core/device/sequence.cuh"
#include "core/ptx/grid.h"

DEVICE void copy_unit(const fattni_pages_args *a, int which, int64_t to, int64_t from) {
    const void *const x = a->from[which].p;
    void *const y = a->to[which].p;
    switch (a->unit) {
    case 16: ((uint4 *)y)[to] = ((const uint4 *)x)[from]; break;
    case 8: ((uint64_t *)y)[to] = ((const uint64_t *)x)[from]; break;
    case 4: ((uint32_t *)y)[to] = ((const uint32_t *)x)[from]; break;
    default: ((uint16_t *)y)[to] = ((const uint16_t *)x)[from]; break;
    }
}

/* Threads are in the order of the copy: sequence, head, key, unit. */
extern "C" __global__ void __launch_bounds__(FATTNI_PAGES_THREADS)
    fattn_gather_pages(const __grid_constant__ fattni_pages_args a) {
    begin_grid();
    int64_t n = (int64_t)blockIdx.x * FATTNI_PAGES_THREADS + threadIdx.x;
    if (n >= a.threads) return;
    const int v = n >= a.k_threads;
    if (v) n -= a.k_threads;
    const int64_t row = n / a.row_units[v], unit = n % a.row_units[v];
    const int64_t head = row / a.Sk, b = head / a.Hkv;
    const int j = (int)(row % a.Sk), g = (int)(head % a.Hkv);
    if (j >= integer_at(&a.lengths, (int)b)) return;
    int page = ((const int32_t *)a.page_table.p)[b * a.page_table.b + (j >> a.page_log2) * a.page_table.h];
    if ((unsigned)page >= (unsigned)a.pages) page = 0;
    const int64_t in_page = j & ((1 << a.page_log2) - 1);
    copy_unit(&a, v, b * a.to[v].b + g * a.to[v].h + j * a.to[v].row + unit,
              page * a.from[v].b + g * a.from[v].h + in_page * a.from[v].row + unit);
}
