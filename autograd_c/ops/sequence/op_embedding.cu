/* Rows of a table on the device; see op_embedding.c. The host cannot check ids without waiting
   for the stream: an id outside the table gives a row of NaN, and no gradient. */
#include "autograd_c/ops/op_cuda.h"

#include "core/device/any_dtype.cuh"

DEVICE int32_t id_of(const fattni_embedding_args *a, int64_t r) {
    return a->id[walk_offset(&a->ids, r / a->id_columns) + r % a->id_columns * a->id_step];
}

#define BODY "autograd_c/ops/sequence/op_embedding_cuda.inc"
#include "core/device/for_each_real.inc"
