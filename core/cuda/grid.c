#include "core/cuda/grid.h"

#include "core/base/internal.h"

#include <string.h>

static void push(fattni_grid *g, int64_t shape, const int64_t *stride) {
    g->count *= shape;
    if (shape == 1) return;
    bool joins = g->n > 0;
    for (int k = 0; k < FATTNI_GRID_OPERANDS && joins; ++k) joins = g->stride[g->n - 1][k] == shape * stride[k];
    if (!joins) g->shape[g->n++] = 1;
    g->shape[g->n - 1] *= shape;
    memcpy(g->stride[g->n - 1], stride, sizeof g->stride[0]);
}

fattni_grid fattni_grid_of(const fattn_tensor *const *t, int operands) {
    fattni_grid g = {.count = 1};
    for (int d = 0; d < t[0]->ndim; ++d) {
        int64_t stride[FATTNI_GRID_OPERANDS] = {0};
        for (int k = 0; k < operands; ++k) {
            const int own = d - (t[0]->ndim - t[k]->ndim);
            if (own >= 0 && t[k]->shape[own] > 1) stride[k] = t[k]->stride[own];
        }
        push(&g, t[0]->shape[d], stride);
    }
    return g;
}

int64_t fattni_grid_blocks(const fattni_grid *g, int each) {
    return fattni_ceil_div(fattni_ceil_div(g->count, each), FATTNI_GRID_THREADS);
}
