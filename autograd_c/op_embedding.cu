/* Rows of a table on the device; see op_embedding.c. Nobody can look at ids without waiting for
   them: an id outside the table gives a row of NaN, and no gradient. */
#include "autograd_c/op_cuda.h"

#include "cuda_element.h"

DEVICE int32_t id_of(const fattni_embedding_args *a, int64_t r) {
    return a->id[walk_offset(&a->ids, r / a->id_columns) + r % a->id_columns * a->id_step];
}

#define BODY "autograd_c/op_embedding_cuda.inc"
#include "cuda_reals.inc"
