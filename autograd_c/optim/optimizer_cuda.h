/* Arguments of the optimizers' kernels. */
#ifndef FATTNI_AUTOGRAD_OPTIM_OPTIMIZER_CUDA_H
#define FATTNI_AUTOGRAD_OPTIM_OPTIMIZER_CUDA_H

#include "autograd_c/optim/optimizer_state.h"

/* One parameter, in 64 bytes. */
typedef struct fattni_optimizer_part {
    void *value, *grad, *m, *v, *master; /* m, v: F32, F64 for F64 values; master: NULL or F32;
                                           of SGD no v, m may be NULL. Where element 0 is, or would be */
    int64_t begin, end;                  /* elements that are updated here: of whole chunks, but for the last */
    int32_t param;                       /* its number among the optimizer's */
    int8_t value_dtype, grad_dtype;
    bool decays : 1, frozen : 1;
    bool narrow : 1; /* the value has 16 bits and no master */
    bool packs : 1;  /* F32 moments and gradients, all aligned: four elements at a time */
    bool keeps : 1;  /* the gradient is not zeroed */
} fattni_optimizer_part;

/* So many parameters as fit the 4 KiB of a launch, so that one launch serves most of a model; kernels of
   one block get none. */
enum { FATTNI_OPTIMIZER_PARTS = 58 };
enum { FATTNI_OPTIMIZER_PIECE = 1024 }; /* elements that a block updates: a pack for each thread */
typedef struct fattni_optimizer_args {
    fattni_optimizer_part part[FATTNI_OPTIMIZER_PARTS];
    int32_t first[FATTNI_OPTIMIZER_PARTS]; /* a part's first block of the launch */
    int32_t parts;
    int16_t nesterov, stochastic; /* stochastic: 16-bit values are rounded so, with the seed */
    fattni_optimizer_state *state;
    double *partial;             /* [chunks]: norms */
    int64_t first_chunk, chunks; /* first_chunk: of a launch for norms; chunks: of all */
    double beta1, beta2, eps, weight_decay, limit;
    fattni_loss_scaling scaling;
    uint64_t seed;
    int32_t decides; /* the launch for the last norms: its last block makes the norm of all */
    int32_t reserved;
} fattni_optimizer_args;

typedef struct fattni_optimizer_set_args {
    fattni_optimizer_state *state;
    fattni_optimizer_change change;
} fattni_optimizer_set_args;

#endif
