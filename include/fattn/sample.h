/* fattn/sample.h - the choice of a token by its logits, where they are: what decoding ends with. */
#ifndef FATTN_SAMPLE_H
#define FATTN_SAMPLE_H

#include <fattn/tensor.h>

/* Temperature, top_k and top_p apply in this order. Of equal logits the first counts as the likelier one. */
typedef struct fattn_sample_io {
    uint32_t struct_size;
    int32_t top_k;      /* choose among the k likeliest; 0 = among all */
    double temperature; /* divides the logits: 0 = always the likeliest token, else from 1e-300 on */
    double top_p;       /* of these among the likeliest whose probabilities, which sum to 1 over them, first sum to
                           top_p or more (Holtzman et al. 2020, "nucleus sampling"); 0 or 1 = among all of them */
    fattn_rng rng;
    /* [B,V], F64, F32, F16 or BF16, any strides; F64 is rounded to F32 first. V is 1 to 2^31-1. Required. */
    const fattn_tensor *logits;
    /* [B] I32: which of the choices of this seed and stream row b is; rows of the same number have the same random
       numbers. NULL = b. */
    const fattn_tensor *draws;
    /* [B] I32: written: draws + 1; may be draws itself; NULL = not wanted. Needs draws. */
    const fattn_tensor *draws_after;
    /* [B] I32: written: a token 0..V-1, or -1 where a logit is NaN or infinity, or all are -infinity. Required. */
    const fattn_tensor *tokens;
} fattn_sample_io;

/* tokens[b] has the probability softmax(logits[b] / temperature) over those that top_k and top_p leave: the largest of
   logit / temperature - log(-log u), Gumbel's trick, over Philox4x32-10 uniforms u of which token i takes word i of the
   row's draw. A logit of -infinity is a token that is never chosen.

   The result is the same on the CPU and on a GPU but for the last bits of exp and log in double: it differs where two
   of these sums are as near to each other. It does not depend on the number of threads, other rows or strides.

   Enqueue only: no allocation, no synchronisation, no host read of device data. Capturable. Errors: ARG, ABI, SHAPE,
   DTYPE, DEVICE; nothing is written then. Outputs must not overlap inputs, but for draws_after, or each other: ARG
   where addresses prove it. On the CPU a negative draw is ARG; a GPU takes it modulo 2^32. */
FATTN_API FATTN_CHECKED fattn_status fattn_sample(fattn_ctx *ctx, const fattn_sample_io *io);

#endif
