/* CUDA graphs: fattni_device_ops.graph_* (core/base/device.h). */
#ifndef FATTNI_CORE_CUDA_GRAPH_H
#define FATTNI_CORE_CUDA_GRAPH_H

#include "core/base/internal.h"

#include <fattn/graph.h>

fattn_status fattni_cuda_graph_begin(fattn_ctx *ctx);
fattn_status fattni_cuda_graph_end(fattn_ctx *ctx, fattn_graph **out);
fattn_status fattni_cuda_graph_launch(fattn_ctx *ctx, const fattn_graph *g);
void fattni_cuda_graph_destroy(fattn_ctx *ctx, fattn_graph *g);

#endif
