/* Small grids: kernels with one CTA per row block split their keys into parts, a CTA each. A CTA stores what its keys
   give, O not divided by the sum, maximum and sum of each row, and a second kernel adds the parts (fwd_add_parts.cuh).

   The parts of a sequence follow from its own keys and mask, the call's bound of rows, the number of heads and the
   kernel: its results do not depend on the other sequences of a batch, nor on the device's number of SMs. Plain C and
   C++: device code includes it, too. */
#ifndef FATTNI_FWD_CUDA_FWD_SPLIT_H
#define FATTNI_FWD_CUDA_FWD_SPLIT_H

#include "core/cuda/args.h"

#ifdef __CUDACC__
#define FATTNI_FWD_SPLIT static __host__ __device__ __forceinline__
#else
#define FATTNI_FWD_SPLIT static inline
#endif

enum { FATTNI_SPLIT_CTAS = 256 }; /* of a sequence whose keys are split, at most: one or two for each SM */

/* The argument of kernels with one CTA per row block. */
typedef struct fattni_fwd_split_args {
    fattni_attention_args a;
    int32_t parts;       /* of a row block, at most */
    int32_t least_part;  /* keys of a part, at least */
    int32_t BM, BN;      /* of the kernel that computes the parts: for the one that adds them */
    int32_t rows, width; /* of a part's result: rows of a block, Dv rounded up to 8 */
    int32_t step;        /* elements from one result to the next */
    void *results; /* [B, parts, Hq, row blocks from the last to the first, step], F32, F64 if the call is: of each
                            O [rows, width], maxima [rows], sums [rows]. NULL: keys are not split */
} fattni_fwd_split_args;

/* Keys that a row block of a sequence of Sk keys sees, at most, from a multiple of BN on. */
FATTNI_FWD_SPLIT int fattni_fwd_most_keys(const fattni_attention_args *a, int Sk, int BM, int BN) {
    const int64_t band = (int64_t)a->left + a->right + BM + BN;
    return a->left < FATTNI_FAR && a->right < FATTNI_FAR && band < Sk ? (int)band : Sk;
}
/* Into how many parts at most each of `blocks` row blocks of all heads is split. */
FATTNI_FWD_SPLIT int fattni_fwd_parts_wanted(int blocks) {
    return blocks < FATTNI_SPLIT_CTAS ? FATTNI_SPLIT_CTAS / blocks : 1;
}
/* Keys of a part, a multiple of BN, where each of these row blocks sees so many; and the parts. */
FATTNI_FWD_SPLIT int fattni_fwd_keys_of_part(int keys, int blocks, int least, int BN) {
    const int most = fattni_fwd_parts_wanted(blocks), part = keys / most + (keys % most != 0);
    return ((part > least ? part : least) + BN - 1) / BN * BN;
}
FATTNI_FWD_SPLIT int fattni_fwd_parts_of(int keys, int part) {
    return keys > part ? keys / part + (keys % part != 0) : 1;
}
/* Parts in a call whose longest sequence has so many keys, at most. ragged: others have fewer keys, but may have more
   parts: of 32 parts wanted of 8192 keys each has 256, of 8208 keys 26 have 320. */
FATTNI_FWD_SPLIT int fattni_fwd_most_parts(int keys, int blocks, int least, int BN, int ragged) {
    if (!ragged) return fattni_fwd_parts_of(keys, fattni_fwd_keys_of_part(keys, blocks, least, BN));
    const int most = fattni_fwd_parts_wanted(blocks), parts = fattni_fwd_parts_of(keys, (least + BN - 1) / BN * BN);
    return parts < most ? parts : most;
}

#endif
