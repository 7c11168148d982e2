/* The 8-bit copies of an attention call (include/fattn/fp8.h): where they lie, and the two ways to fill them. */
#ifndef FATTNI_CORE_FP8_FP8_H
#define FATTNI_CORE_FP8_FP8_H

#include "core/attention/problem.h"

/* Keys of a partial sum, and what a sequence's columns of v8 are a multiple of. */
enum { FATTNI_FP8_CHUNK = 128 };

/* Chunks of all keys of dimension 0's one index: a packed sequence b begins at chunk cu_seqlens_k[b] / 128 + b. At
   least one. */
int64_t fattni_fp8_chunks(const fattni_problem *p);
static inline int64_t fattni_fp8_first_chunk(const fattni_problem *p, const fattni_sequence *s) {
    return p->packed ? s->k0 / FATTNI_FP8_CHUNK + s->b : 0;
}

/* Of q8, k8 and v8. */
static inline bool fattni_is_code(int32_t dtype) { return dtype == FATTN_F8E4M3 || dtype == FATTN_I8; }

/* FATTN_FP8_INT8: keys that share a scale, and those that an element of k_scale is for. */
enum { FATTNI_FP8_SCALED_KEYS = 32, FATTNI_FP8_KEYS_OF_SCALE = 8 };
/* The element of k_scale's row for key j of a sequence. */
static inline int64_t fattni_fp8_scale_of(const fattni_problem *p, const fattni_sequence *s, int64_t j) {
    return (fattni_fp8_first_chunk(p, s) * FATTNI_FP8_CHUNK + j) / FATTNI_FP8_KEYS_OF_SCALE;
}

/* Copies in memory that begins at `memory`, and its bytes. Rows of q8 and k8 are padded to multiples of 16 bytes.
   partials: [batch][Hkv][chunk][3][D + Dv], the sum, minimum and maximum of each channel of k, then of v; the latter's
   maxima give their place to sums of fattni_fp8_rest (rest.h). */
fattni_fp8 fattni_fp8_lay_out(const fattni_problem *p, void *memory);
size_t fattni_fp8_bytes(const fattni_problem *p);

/* The copies that a forward call reads: those of the caller, or made here in the workspace, where they come first. */
fattn_status fattni_fp8_copies(fattn_ctx *ctx, const fattni_problem *p, fattni_fp8 *out);

/* FATTN_FP8_RENEW: puts row-major o, of the same dtype, and lse of backward's own at `memory` (NULL: without
   addresses). Their bytes, a multiple of FATTNI_ALIGN. */
size_t fattni_fp8_renew(fattni_problem *p, void *memory);

/* NULL, or why a call with FATTN_FP8 has no kernel on any device, as the end of an error message. */
const char *fattni_fp8_why_unsupported(const fattni_problem *p);

fattn_status fattni_fp8_quantize_cpu(fattn_ctx *ctx, const fattni_problem *p, const fattni_fp8 *to);
fattn_status fattni_fp8_quantize_cuda(fattn_ctx *ctx, const fattni_problem *p, const fattni_fp8 *to);

#endif
