/* The dropout mask stored in memory, for FATTN_ALGO_STANDARD and fattn_dropout_mask. */
#ifndef FATTNI_CORE_ATTENTION_DROPOUT_H
#define FATTNI_CORE_ATTENTION_DROPOUT_H

#include "core/attention/problem.h"

/* keep[(i - begin) * row + j * column] = 1 or 0 for rows begin <= i < end and keys j < Sk of plane
   (b, h). One Philox block serves eight elements when begin + q_pos0 is a multiple of 16. */
void fattni_dropout_rows(const fattni_problem *p, int64_t b, int64_t h, int64_t begin, int64_t end, int64_t Sk,
                         uint8_t *keep, int64_t row, int64_t column);

/* fattni_device_ops.dropout_mask in host memory. Always FATTN_OK. */
fattn_status fattni_host_mask(fattn_ctx *ctx, const fattni_problem *p, uint8_t *keep, const int64_t stride[4],
                              int64_t rows, int64_t columns);

#endif
