/* Host code for the Hopper kernels of both passes: tensor maps and the persistent schedule. */
#ifndef FATTNI_CORE_CUDA_SM90_H
#define FATTNI_CORE_CUDA_SM90_H

#include "core/cuda/kernels.h"
#include "core/cuda/sm90_args.h"

/* Whether a tensor map can describe it: rows that start at and are multiples of 16 bytes, strides that are multiples of
   16 bytes, not negative and below 2^40 bytes. */
bool fattni_sm90_maps(const fattni_array *a, int64_t width);
/* The same for q, k and v, which must not be empty. */
bool fattni_sm90_maps_inputs(const fattni_problem *p);

/* Whether a call is one for BIASED kernels: a 16-bit bias that a tensor map can describe, of q's dtype, and no other
   feature that is not BANDED's. */
bool fattni_sm90_stages_bias(const fattni_problem *p);

/* {width, rows, heads, batches} of `a`, boxes of 64 columns and `box` rows. Host work only; in the context's CUDA
   context (fattni_cuda_enter). */
fattn_status fattni_sm90_map(fattn_ctx *ctx, const fattni_array *a, fattn_dtype dtype, int64_t width, int box,
                             CUtensorMap *map, fattni_map_step *step);
/* The same of E4M3 codes, whose boxes have `columns` columns, 128, 64 or 32, and the swizzle of that size. */
fattn_status fattni_sm90_map_codes(fattn_ctx *ctx, const fattni_array *a, int64_t width, int columns, int rows,
                                   CUtensorMap *map, fattni_map_step *step);
/* Tiles, blocks and planes of a call with `blocks` blocks in each of `planes` (b, h); the caller sets next_tile. */
fattni_sm90_schedule fattni_sm90_schedule_of(int64_t blocks, int64_t planes, int64_t head_group);
/* The order in which a causal call ends soonest whose `count` blocks of each of `planes` planes take such times, the
   longest first; count 0: from the longest on. For calls of up to three and a third blocks for each SM. */
fattni_block_order fattni_sm90_order_of(const int32_t *times, int64_t count, int64_t planes, int64_t sms);
/* Whether there may be another order: else it gives count 0. */
bool fattni_sm90_may_order(int64_t count, int64_t planes, int64_t sms);
enum { FATTNI_ORDERED_BLOCKS = 128 }; /* most blocks of a plane */
/* Starts a kernel whose first `count` counters at next_tile are zero when it passes grid_dependency_wait, which it does
   not have to do before it reads the call's tensors: it may start while more than one counter are being zeroed. count
   0: it needs none. */
fattn_status fattni_sm90_start(fattn_ctx *ctx, const fattni_cuda_kernel *k, int64_t grid, const void *args,
                               size_t args_bytes, int32_t *next_tile, int64_t count);
/* Whether their numbers fit 32 bits. */
bool fattni_sm90_counts(int64_t blocks, int64_t planes);

#endif
