/* From a validated problem to the kernels' arguments. */
#include "core/cuda/device.h"

fattni_view fattni_cuda_view_of(const fattni_array *a) {
    return (fattni_view){a->p, a->s[0], a->s[1], a->s[2], a->s[3]};
}

fattni_line fattni_cuda_line_of(const fattni_array *a) { return (fattni_line){a->p, a->s[0]}; }

bool fattni_cuda_vector(const fattni_array *a, int64_t width) {
    const int64_t step = 16 / (int64_t)fattn_dtype_size((fattn_dtype)a->dtype);
    return width % step == 0 && (uintptr_t)a->p % 16 == 0 && a->s[0] % step == 0 && a->s[1] % step == 0 &&
           a->s[2] % step == 0;
}

const char *fattni_cuda_why_unsupported(const fattn_ctx *ctx, const fattni_problem *p) {
    const int64_t most = 1 << 28;
    if (ctx->gpu.arch < 80 && p->dtype == FATTN_BF16) return "needs sm_80 or later for BF16; F16 and F32 run here";
    if (p->Sq > most || p->Sk > most || p->rows_q > most || p->rows_k > most) return "supports at most 2^28 rows";
    if (p->B > INT32_MAX || p->Hq > INT32_MAX || p->B * p->Hq > INT32_MAX)
        return "supports at most 2^31-1 heads of all sequences";
    return NULL;
}

const char *fattni_cuda_why_grid_unsupported(int64_t blocks) {
    return blocks > INT32_MAX ? "needs more blocks than CUDA's limit of 2^31-1" : NULL;
}

fattni_attention_args fattni_cuda_args_of(const fattni_problem *p) {
    const bool causal = p->flags & (FATTN_CAUSAL | FATTN_CAUSAL_TOP_LEFT);
    /* A window bound that masks nothing is dropped. Sums of rows, keys and diagonals then fit 31 bits, with
       at most 2^28 rows and positions of at most 2^29. */
    const int64_t shift = p->q_pos0 - p->k_pos0, reach = p->Sq + p->Sk;
    const int64_t left = p->window_left < reach + shift ? p->window_left : FATTNI_FAR;
    const int64_t right = causal ? 0 : p->window_right < reach - shift ? p->window_right : FATTNI_FAR;
    const bool half = p->dtype == FATTN_BF16 || p->dtype == FATTN_F16;
    const fattni_array o_rest = fattni_o_rest_of(p);
    fattni_attention_args a = {
        .q = fattni_cuda_view_of(&p->q),
        .k = fattni_cuda_view_of(&p->k),
        .v = fattni_cuda_view_of(&p->v),
        .o = fattni_cuda_view_of(&p->o),
        .lse = fattni_cuda_view_of(&p->lse),
        .bias = fattni_cuda_view_of(&p->bias),
        .o_rest = fattni_cuda_view_of(&o_rest),
        .alibi = fattni_cuda_line_of(&p->alibi),
        .sink = fattni_cuda_line_of(&p->sink),
        .seqlens_q = fattni_cuda_line_of(&p->seqlens_q),
        .seqlens_k = fattni_cuda_line_of(&p->seqlens_k),
        .cu_seqlens_q = fattni_cuda_line_of(&p->cu_seqlens_q),
        .cu_seqlens_k = fattni_cuda_line_of(&p->cu_seqlens_k),
        .rng_step = p->rng_step.p,
        .B = (int32_t)p->B,
        .Hq = (int32_t)p->Hq,
        .Hkv = (int32_t)p->Hkv,
        .group = (int32_t)p->group,
        .Sq = (int32_t)p->Sq,
        .Sk = (int32_t)p->Sk,
        .D = (int32_t)p->D,
        .Dv = (int32_t)p->Dv,
        .rows_q = (int32_t)p->rows_q,
        .rows_k = (int32_t)p->rows_k,
        .top_left = (p->flags & (FATTN_CAUSAL_TOP_LEFT | FATTN_TOP_LEFT)) != 0,
        .shift = (int32_t)shift,
        .left = (int32_t)left,
        .right = (int32_t)right,
        .scale = (float)p->scale,
        .softcap = (float)p->softcap,
        .scale_f64 = p->scale,
        .softcap_f64 = p->softcap,
        .keep_scale_f64 = p->keep_scale,
        .drop_T = p->drop_T,
        .keep_scale = (float)p->keep_scale,
        .seed = p->rng.seed,
        .stream = p->rng.stream,
        .rng_plane0 = fattni_dropout_plane(p, 0, 0),
        .rng_heads = (uint32_t)p->rng_heads,
        .q_pos0 = (int32_t)p->q_pos0,
        .k_pos0 = (int32_t)p->k_pos0,
        .o_f32 = half && p->o.dtype == FATTN_F32,
        .bias_f32 = half && p->bias.dtype == FATTN_F32,
        .kind = p->dtype == FATTN_BF16,
        .f64 = p->dtype == FATTN_F64,
        .flags = p->flags,
    };
    a.vector_qkv = fattni_cuda_vector(&p->q, p->D) && fattni_cuda_vector(&p->k, p->D) &&
                   fattni_cuda_vector(&p->v, p->Dv) && (a.o_f32 || fattni_cuda_vector(&p->o, p->Dv));
    return a;
}
