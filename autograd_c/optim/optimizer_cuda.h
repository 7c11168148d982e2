/* Arguments of the optimizers' kernels. */
#ifndef FATTNI_AUTOGRAD_OPTIM_OPTIMIZER_CUDA_H
#define FATTNI_AUTOGRAD_OPTIM_OPTIMIZER_CUDA_H

#include "autograd_c/optim/optimizer_state.h"

/* One parameter; its chunks begin at first_chunk. */
typedef struct fattni_optimizer_part {
    void *value, *grad, *m, *v, *master; /* m, v: F32, F64 for F64 values; master: NULL or F32;
                                           of SGD no v, m may be NULL. Where element 0 is, or would be */
    int64_t begin, end, first_chunk;     /* elements that are updated here: of whole chunks, but for the last */
    int32_t value_dtype, grad_dtype;
    int32_t param; /* its number among the optimizer's */
    int8_t decays, frozen;
    int8_t narrow; /* the value has 16 bits and no master */
    int8_t packs;  /* F32 moments and gradients, all aligned: four elements at a time */
} fattni_optimizer_part;

/* So many parameters as fit the 4 KiB of a launch, so that one launch serves most of a model; kernels of
   one block get none. */
enum { FATTNI_OPTIMIZER_PARTS = 48 };
typedef struct fattni_optimizer_args {
    fattni_optimizer_part part[FATTNI_OPTIMIZER_PARTS];
    fattni_optimizer_state *state;
    double *partial;             /* [chunks of all]: norms */
    int64_t first_chunk, chunks; /* of the launch; for begin, of all */
    double beta1, beta2, eps, weight_decay, limit;
    fattni_loss_scaling scaling;
    fattni_optimizer_change change; /* of set */
    int32_t parts;
    int16_t nesterov, stochastic; /* stochastic: 16-bit values are rounded so, with the seed */
    uint64_t seed;
} fattni_optimizer_args;

#endif
