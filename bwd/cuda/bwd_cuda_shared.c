/* Code that the CUDA rows of the backward table share (bwd_cuda.h). */
#include "bwd/cuda/bwd_cuda.h"

extern void fattn_bwd_key_mean(fattni_bwd_args);
extern void fattn_bwd_zero(fattni_bwd_args);
extern void fattn_bwd_sink_f32(fattni_bwd_args);
extern void fattn_bwd_sink_f64(fattni_bwd_args);

static bool vector_if_present(const fattni_array *a, int64_t width) {
    return !a->present || fattni_cuda_vector(a, width);
}

fattni_bwd_args fattni_bwd_args_of(const fattni_problem *p) {
    const bool half = p->dtype == FATTN_BF16 || p->dtype == FATTN_F16;
    fattni_bwd_args x = {
        .a = fattni_cuda_args_of(p),
        .d_o = fattni_cuda_view_of(&p->d_o),
        .d_lse = fattni_cuda_view_of(&p->d_lse),
        .given_delta = fattni_cuda_view_of(&p->delta),
        .dq = fattni_cuda_view_of(&p->dq),
        .dk = fattni_cuda_view_of(&p->dk),
        .dv = fattni_cuda_view_of(&p->dv),
        .d_bias = fattni_cuda_view_of(&p->d_bias),
        .d_sink = fattni_cuda_line_of(&p->d_sink),
        .d_o_f32 = half && p->d_o.dtype == FATTN_F32,
        .dq_f32 = half && p->dq.dtype == FATTN_F32,
        .dk_f32 = half && p->dk.dtype == FATTN_F32,
        .dv_f32 = half && p->dv.dtype == FATTN_F32,
    };
    for (int d = 0; d < 4; ++d) x.d_bias_n[d] = p->d_bias.s[d] ? p->d_bias.n[d] : fattni_min(p->d_bias.n[d], 1);
    x.a.vector_qkv = x.a.vector_qkv && (x.d_o_f32 || fattni_cuda_vector(&p->d_o, p->Dv));
    x.vector_gradients = x.a.vector_qkv && vector_if_present(&p->dq, p->D) && vector_if_present(&p->dk, p->D) &&
                         vector_if_present(&p->dv, p->Dv);
    return x;
}

int64_t fattni_bwd_cuda_row_grid(const fattni_problem *p, const fattni_cuda_kernel *k) {
    return fattni_ceil_div(p->Sq, k->BM) * p->Hq * p->B;
}
int64_t fattni_bwd_cuda_key_grid(const fattni_problem *p, const fattni_cuda_kernel *k) {
    return fattni_ceil_div(p->Sk, k->BN) * p->Hkv * p->B;
}

int32_t fattni_bwd_cuda_at_once(const fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k,
                                const fattni_attention_args *a) {
    const int64_t row = (p->D + p->Dv) * (int64_t)fattn_dtype_size(p->dtype) + k->D * 4; /* of Q, dO and dQ's sum */
    return (int32_t)fattni_cuda_planes_at_once(ctx, a, p->Sq * p->group * row, fattni_ceil_div(p->Sk, k->BN),
                                               p->B * p->Hkv);
}

static size_t row_blocks(const fattni_problem *p, const fattni_cuda_kernel *k) {
    return (size_t)fattni_bwd_cuda_row_grid(p, k);
}

static size_t aligned(size_t bytes) { return (size_t)fattni_round_up((int64_t)bytes, FATTNI_ALIGN); }

size_t fattni_bwd_cuda_sink_bytes(const fattni_problem *p, const fattni_cuda_kernel *k) {
    return p->d_sink.present ? aligned(row_blocks(p, k) * fattn_dtype_size((fattn_dtype)p->lse.dtype)) : 0;
}

size_t fattni_bwd_cuda_semaphore_bytes(const fattni_problem *p, const fattni_cuda_kernel *k) {
    const bool ordered = (p->flags & FATTN_DETERMINISTIC) && p->dq.present;
    return ordered ? aligned(row_blocks(p, k) * sizeof(int32_t)) : 0;
}

fattn_status fattni_bwd_cuda_zero(fattn_ctx *ctx, const fattni_problem *p, const fattni_bwd_args *bwd) {
    if (!p->d_bias.present || (p->flags & FATTN_ACC_DBIAS)) return FATTN_OK;
    return FATTNI_START(ctx, fattn_bwd_zero, ctx->gpu.sms, 256, bwd);
}

fattn_status fattni_bwd_cuda_sink(fattn_ctx *ctx, const fattni_problem *p, const fattni_bwd_args *bwd) {
    if (!p->d_sink.present) return FATTN_OK;
    return bwd->a.f64 ? FATTNI_START(ctx, fattn_bwd_sink_f64, p->Hq, 256, bwd)
                      : FATTNI_START(ctx, fattn_bwd_sink_f32, p->Hq, 256, bwd);
}

fattni_bwd_key_mean fattni_bwd_cuda_key_mean_parts(const fattni_problem *p, const fattni_cuda_kernel *k,
                                                   const fattni_cuda_kernel *huge, size_t begin) {
    const bool rounds_ds = p->dtype == FATTN_BF16 || p->dtype == FATTN_F16 || k->tf32;
    fattni_bwd_key_mean at = {.mean = begin, .used = begin, .end = begin};
    at.present = rounds_ds && p->dq.present && !(p->flags & FATTN_MERGE) && !p->delta.present;
    if (!at.present) return at;
    at.used = at.mean + aligned((size_t)(p->B * p->Hkv * huge->D) * 4);
    at.end = at.used + aligned((size_t)(p->B * p->Hkv) * 4);
    return at;
}

void fattni_bwd_cuda_key_mean_args(const fattni_problem *p, const fattni_cuda_kernel *huge,
                                   const fattni_bwd_key_mean *parts, fattni_bwd_args *bwd) {
    if (!parts->present) return;
    bwd->key_mean = (float *)((char *)p->workspace + parts->mean);
    bwd->key_mean_used = (int32_t *)((char *)p->workspace + parts->used);
    bwd->key_mean_pitch = huge->D;
    bwd->key_mean_f32 = p->dtype == FATTN_F32;
}

fattn_status fattni_bwd_cuda_zero_counters(fattn_ctx *ctx, const fattni_problem *p, fattni_bwd_args *bwd, size_t zero,
                                           size_t end, bool find_means) {
    bwd->counters = (char *)p->workspace + zero;
    bwd->counter_chunks = (int64_t)((end - zero) / 16);
    if (!find_means) return fattni_cuda_zero_beside(ctx, bwd->counters, end - zero);
    /* A thread loads 16 bytes of at least 8 of Sk / 8 or 64 keys. */
    const int64_t loads = fattni_max(p->Sk / 8, 64) * bwd->key_mean_pitch / 64;
    const int threads = loads <= 64 ? 64 : loads <= 128 ? 128 : loads <= 256 ? 256 : 512;
    const size_t shared = (size_t)(fattni_max(threads / 32, 8) * bwd->key_mean_pitch) * 2 * sizeof(float);
    return fattni_cuda_start(ctx, "fattn_bwd_key_mean", (fattni_cuda_any)fattn_bwd_key_mean, p->B * p->Hkv, threads,
                             shared, bwd);
}

fattni_bwd_huge fattni_bwd_cuda_huge_parts(const fattni_problem *p, const fattni_cuda_kernel *k, size_t begin,
                                           int64_t rows) {
    const size_t real = fattn_dtype_size((fattn_dtype)p->lse.dtype), blocks = row_blocks(p, k);
    fattni_bwd_huge at = {.max = begin};
    at.log_sum = at.max + aligned((size_t)rows * real);
    at.blocks = at.log_sum + aligned((size_t)rows * real);
    at.zero = at.sink = at.blocks + aligned(blocks * sizeof(int32_t));
    at.counters = at.sink + (p->d_sink.present ? aligned(blocks * real) : 0);
    at.end = at.counters + FATTNI_ALIGN;
    return at;
}

void fattni_bwd_cuda_huge_args(const fattni_problem *p, const fattni_cuda_kernel *k, const fattni_bwd_huge *parts,
                               fattni_bwd_args *bwd) {
    char *const workspace = p->workspace;
    bwd->huge = (int32_t *)(workspace + parts->counters);
    bwd->huge_blocks = (int32_t *)(workspace + parts->blocks);
    bwd->huge_max = workspace + parts->max;
    bwd->huge_log_sum = workspace + parts->log_sum;
    bwd->huge_sink = workspace + parts->sink;
    bwd->huge_block = k->BM;
}

fattn_status fattni_bwd_cuda_huge(fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k,
                                  const fattni_cuda_kernel *after, const fattni_bwd_args *bwd) {
    const int64_t tasks = fattni_bwd_cuda_row_grid(p, k) + fattni_bwd_cuda_key_grid(p, k);
    /* With as much shared memory as the kernel before: only an idle SM changes its split of L1 and shared memory. */
    const size_t most = fattni_cuda_most_shared(ctx);
    const size_t shared = after->shared > most ? most : after->shared > k->shared ? after->shared : k->shared;
    FATTNI_TRY(fattni_cuda_ready(ctx, k));
    return fattni_cuda_start(ctx, k->name, k->stub, fattni_min(tasks, ctx->gpu.sms), k->threads, shared, bwd);
}
