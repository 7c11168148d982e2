/* The dropout mask as memory, for the algorithm that stores it. */
#ifndef FATTNI_CORE_ATTENTION_DROPOUT_H
#define FATTNI_CORE_ATTENTION_DROPOUT_H

#include "core/attention/problem.h"

/* keep[(i - begin) * row + j * column] = 1 or 0 for rows begin <= i < end and keys j < Sk of plane
   (b, h). One Philox block serves eight elements when begin + q_pos0 is a multiple of 16. */
void fattni_dropout_rows(const fattni_problem *p, int64_t b, int64_t h, int64_t begin, int64_t end,
                         int64_t Sk, uint8_t *keep, int64_t row, int64_t column);

#ifdef FATTNI_HAVE_CUDA
/* The same on the device: keep[b,h,i,j] for i < rows, j < columns of every plane; strides in
   elements. */
fattn_status fattni_cuda_mask(fattn_ctx *ctx, const fattni_problem *p, uint8_t *keep,
                              const int64_t stride[4], int64_t rows, int64_t columns);
#endif

#endif
