/* fattn/fp8.h - forward attention on 8-bit copies of q, k and v: FATTN_FP8 in params.flags of fattn_attention_fwd.

   q ~ q_scale q8, k - mean(k) ~ k_scale k8, v - mean(v) ~ v_scale v8, each code an E4M3 number (1 sign, 4 exponent,
   3 fraction bits, largest 448) nearest to the quotient; v_mean = mean(v - v_scale v8), which is mean(v) and what
   rounding takes off on average. A scale is the largest magnitude of what it scales, at least
   1e-30, divided by 448: of a row of q, of a head's keys, of a channel of a head's values (FlashAttention-3, Shah et
   al. 2024, section 3.3, with scales that are current and not delayed). Means are over the keys of a sequence, so that
   O = P (v - v_mean) + v_mean and L = L' + scale q.mean(k) are exact: what a channel has in common takes no part in
   rounding (SageAttention, Zhang et al. 2024), and long sums of the tensor core, which keep 13 bits, stay right.
   P is rounded to E4M3, too. Sums are F32.

   With FATTN_FP8_INT8 codes of q and k are integers in -127..127, the nearest ones, ties to even, for Q K^T in
   integers (SageAttention). A scale is the largest magnitude, at least 1e-30, divided by 127: of a row of q, and of
   32 keys of a sequence, 32 n to 32 n + 31 counted from its first, so that a large key costs only those beside it.
   Steps are uniform: S of normal numbers is off by a third of what it is with E4M3, L by a fourth. v8, P and all
   else are as without it.

   On Hopper GPUs (sm_90); the CPU computes the same by emulation, and other GPUs are UNSUPPORTED. q, k and v are F16,
   BF16 or F32, o theirs or F32. Masks, windows, lengths, packed batches, GQA and sinks are those of other calls;
   softcap, ALiBi, bias, dropout, pages, FATTN_MERGE and FATTN_EXACT_DELTA beside it are UNSUPPORTED, as are F64 and
   algorithms STANDARD and FLASH1. q, k and v must be finite: a NaN among the keys in use reaches every row of its head
   through their means. NUMERICS.md, section on FP8, says how far results are off.

   Backward ignores the flag: it computes in q's dtype from the original tensors, with the O and L of this forward.
   Where these are far off, exp(s - L) does not sum to 1 over the keys and delta does not belong to it. With
   FATTN_FP8_RENEW, in the query and in backward, backward first computes O' and L' by a forward call without FATTN_FP8
   into its workspace and takes P = exp(s - L') and delta = rowsum(dO*O') - dL from them: gradients have the bits of a
   forward and a backward call without FATTN_FP8, where backward repeats bitwise. That costs such a forward call, and
   O' and L' in the workspace. O' has io.o's dtype; io.o and io.lse must be given, but what they hold is not read, and
   gradients may lie in their place. Errors: backward refuses what forward does beside FATTN_FP8; ARG for a given delta,
   and without FATTN_FP8. Forward ignores this flag. */
#ifndef FATTN_FP8_H
#define FATTN_FP8_H

#include <fattn/attention.h>

/* The copies of one call. Dimension 0 of k_scale, v_scale and v_mean counts sequences. Of v8 a sequence's columns
   begin at 0, packed at cu_seqlens_k[b] rounded down to a multiple of 128, plus 128 b; key 16 a + 8 b + 2 t + c
   (b, c in 0..1, t in 0..3) is column 16 a + 4 t + 2 b + c, the order in which the tensor core multiplies. Columns past
   a sequence's length, up to a multiple of 128 and at least 128, are 0.

   With FATTN_FP8_INT8 dimension 0 of k_scale is that of v8, and a sequence's elements begin at an eighth of the
   place of its columns. Element c from there is the scale of keys 8 c to 8 c + 7: the four of 32 keys are equal.
   Where none of the 32 exists, up to a multiple of 128 keys and at least 128, it is 1e-30 / 127.

   In a call q8, k8 and v8, with FATTN_FP8_INT8 k_scale, too, may lie anywhere with addresses and strides that are
   multiples of 16 bytes, last dimensions contiguous in all. */
struct fattn_fp8 {
    uint32_t struct_size;
    float rope_base;       /* of fattn_fp8_quantize, which fattn_fp8_layout sets to 0: q and k as they are */
    fattn_tensor q8;       /* [B,Hq,Sq,D] F8E4M3; FATTN_FP8_INT8: I8 */
    fattn_tensor k8;       /* [B,Hkv,Sk,D] F8E4M3; FATTN_FP8_INT8: I8 */
    fattn_tensor v8;       /* [B,Hkv,Dv,columns] F8E4M3 */
    fattn_tensor q_scale;  /* [B,Hq,Sq] F32; FATTN_FP8_INT8: NaN where q_shift is not finite */
    fattn_tensor q_shift;  /* [B,Hq,Sq] F32: q.mean(k) */
    fattn_tensor k_scale;  /* [B,Hkv] F32; FATTN_FP8_INT8: [B,Hkv,columns/8] */
    fattn_tensor v_scale;  /* [B,Hkv,Dv] F32 */
    fattn_tensor v_mean;   /* [B,Hkv,Dv] F32: mean(v - v_scale v8) */
    fattn_tensor partials; /* [B,Hkv,chunks of 128 keys,3(D+Dv)] F32: scratch of fattn_fp8_quantize */
};

/* The copies of a call with these params and q, k, v, in `memory` of *bytes bytes, aligned to 256. With memory NULL
   only *bytes is written, what it must be; out may be NULL then. No data is read, nor io->fp8. Errors: those of
   fattn_attention_query, for FATTN_FP8; ARG without this flag; WORKSPACE. */
FATTN_API FATTN_CHECKED fattn_status fattn_fp8_layout(fattn_ctx *ctx, const fattn_attention_params *p,
                                                      const fattn_attention_io *io, void *memory, size_t *bytes,
                                                      fattn_fp8 *out);

/* Fills io->fp8, which fattn_fp8_layout has made for the same params, shapes and lengths. The codes are the same on the
   CPU and on a GPU. With FATTN_FP8_HADAMARD q and k - mean(k) are first multiplied by the Hadamard matrix of size D,
   divided by sqrt(D), whose columns have random signs from params.rng: products stay, outliers spread over all channels
   (QuIP, Chee et al. 2023). D is a power of two of 16 or more then.

   With io->fp8->rope_base, finite and above 0, q and k are turned before that as by fattn_op_rope: row i by the angles
   of position i' + off, key j by those of j' (fattn/attention.h), the positions of the mask. They are turned in F32 and
   not rounded to their dtype; D is a multiple of 16. Cosines and sines are off by 1e-7 and the same on the CPU and on a
   GPU, so that scores are those of fattn_op_rope's F32 results but for their last bits. Forward does not look at
   rope_base. Backward, also with FATTN_FP8_RENEW, computes from the q and k of its own call: give it turned ones.

   Of q8 and k8 bytes after D, up to a multiple of 8, may be written, too. Enqueue only; capturable. A later
   fattn_attention_fwd with io->fp8 reads the copies; one without makes its own in the workspace, without rope. Errors:
   as above, and ARG, DEVICE, SHAPE for what io->fp8 holds; ARG for a rope_base that is none, SHAPE for a D that is no
   multiple of 16 beside it. */
FATTN_API FATTN_CHECKED fattn_status fattn_fp8_quantize(fattn_ctx *ctx, const fattn_attention_params *p,
                                                        const fattn_attention_io *io);

#endif
