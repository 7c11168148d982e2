/* The dropout mask as memory, for the algorithm that stores it. */
#ifndef FATTNI_DROPOUT_H
#define FATTNI_DROPOUT_H

#include "problem.h"

/* keep[(i - begin) * row + j * column] = 1 or 0 for rows begin <= i < end and keys j < Sk of plane
   (b, h). One Philox block serves eight elements when begin + q_pos0 is a multiple of 16. */
void fattni_dropout_rows(const fattni_problem *p, int64_t b, int64_t h, int64_t begin, int64_t end,
                         int64_t Sk, uint8_t *keep, int64_t row, int64_t column);

#endif
