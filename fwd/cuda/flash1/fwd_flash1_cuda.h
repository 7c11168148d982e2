/* Arguments of FlashAttention-1's forward kernel. */
#ifndef FATTNI_FWD_CUDA_FWD_FLASH1_CUDA_H
#define FATTNI_FWD_CUDA_FWD_FLASH1_CUDA_H

#include "core/materialized/standard_cuda.h"

typedef struct fattni_flash1_args {
    fattni_standard_args x; /* the problem */
    void *O;                /* REAL [B Hq Sq][Dv], not yet divided by the sum */
    void *max, *sum;        /* REAL [B Hq Sq] */
    int64_t keys;           /* of a tile */
} fattni_flash1_args;

#endif
