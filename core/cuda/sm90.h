/* Hopper's host side: tensor maps and the persistent schedule. */
#ifndef FATTNI_CORE_CUDA_SM90_H
#define FATTNI_CORE_CUDA_SM90_H

#include "core/cuda/kernels.h"
#include "core/cuda/sm90_args.h"

/* Whether tensor maps can describe q, k, v (and d_o): rows of 16-byte multiples at 16-byte addresses,
   strides of 16-byte multiples that are not negative; there are rows and keys; with dropout positions start
   at multiples of 16; and forward a bias only up to head_dim 128. */
bool fattni_sm90_fits(const fattni_problem *p);
/* Whether kernel k can count the call's tiles, steps and pieces. */
bool fattni_sm90_counts(const fattni_problem *p, const fattni_cuda_kernel *k);
/* Whether O has a tensor map: forward kernels for plain masks up to head_dim 128 and short ones store by it alone. */
bool fattni_sm90_maps_o(const fattni_problem *p);
/* Everything but next_tile and what fattni_cut sets. The maps are encoded here: host work only. */
fattn_status fattni_sm90_args_of(fattn_ctx *ctx, const fattni_problem *p,
                                 const fattni_cuda_kernel *k, fattni_sm90_args *out);

#endif
