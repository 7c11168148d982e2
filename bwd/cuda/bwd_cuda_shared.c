/* bwd_cuda.h: what the CUDA rows of the backward table share. */
#include "bwd/cuda/bwd_cuda.h"

extern void fattn_bwd_zero(fattni_cuda_args);
extern void fattn_bwd_sink_f32(fattni_cuda_args);
extern void fattn_bwd_sink_f64(fattni_cuda_args);

/* Whether an element of d_bias is a sum over heads, sequences, rows or keys. */
static bool sums_bias(const fattni_problem *p) {
    const int64_t n[4] = {p->B, p->Hq, p->max_q, p->max_k};
    bool sums = false;
    for (int d = 0; d < 4; ++d) sums |= p->d_bias.present && p->d_bias.s[d] == 0 && n[d] > 1;
    return sums;
}

const char *fattni_bwd_cuda_refuses(const fattn_ctx *ctx, const fattni_problem *p) {
    const char *reason = fattni_cuda_refuses(p);
    if (reason) return reason;
    if ((p->flags & FATTN_DETERMINISTIC) && sums_bias(p))
        return "adds a dbias that broadcasts atomically: it is not deterministic";
    const fattni_cuda_kernel *const k = fattni_cuda_find(ctx, p);
    if (!k) return "has no kernel for this dtype, head_dim and these features on this device";
    const fattni_cuda_kernel *const huge = fattni_cuda_find_huge(ctx, p);
    if (!huge) return "has no kernel for huge rows of this dtype and head_dim on this device";
    const int64_t tasks = fattni_bwd_cuda_row_grid(p, huge) + fattni_bwd_cuda_key_grid(p, huge);
    return fattni_cuda_refuses_grid(
        fattni_max(tasks, fattni_max(fattni_bwd_cuda_row_grid(p, k), fattni_bwd_cuda_key_grid(p, k))));
}

bool fattni_bwd_cuda_repeats(const fattni_problem *p) {
    return (p->flags & FATTN_DETERMINISTIC) || !(p->dq.present || sums_bias(p));
}

int64_t fattni_bwd_cuda_row_grid(const fattni_problem *p, const fattni_cuda_kernel *k) {
    return fattni_ceil_div(p->Sq, k->BM) * p->Hq * p->B;
}
int64_t fattni_bwd_cuda_key_grid(const fattni_problem *p, const fattni_cuda_kernel *k) {
    return fattni_ceil_div(p->Sk, k->BN) * p->Hkv * p->B;
}

static size_t row_blocks(const fattni_problem *p, const fattni_cuda_kernel *k) {
    return (size_t)fattni_bwd_cuda_row_grid(p, k);
}

static size_t aligned(size_t bytes) {
    return (size_t)fattni_round_up((int64_t)bytes, FATTNI_ALIGN);
}

size_t fattni_bwd_cuda_sink_bytes(const fattni_problem *p, const fattni_cuda_kernel *k) {
    return p->d_sink.present
               ? aligned(row_blocks(p, k) * fattn_dtype_size((fattn_dtype)p->lse.dtype))
               : 0;
}

size_t fattni_bwd_cuda_turns_bytes(const fattni_problem *p, const fattni_cuda_kernel *k) {
    const bool turns = (p->flags & FATTN_DETERMINISTIC) && p->dq.present;
    return turns ? aligned(row_blocks(p, k) * sizeof(int32_t)) : 0;
}

fattn_status fattni_bwd_cuda_zero(fattn_ctx *ctx, const fattni_problem *p,
                                  const fattni_cuda_args *a) {
    if (!p->d_bias.present || (p->flags & FATTN_ACC_DBIAS)) return FATTN_OK;
    return FATTNI_START(ctx, fattn_bwd_zero, ctx->gpu.sms, 256, a);
}

fattn_status fattni_bwd_cuda_sink(fattn_ctx *ctx, const fattni_problem *p,
                                  const fattni_cuda_args *a) {
    if (!p->d_sink.present) return FATTN_OK;
    return a->f64 ? FATTNI_START(ctx, fattn_bwd_sink_f64, p->Hq, 256, a)
                  : FATTNI_START(ctx, fattn_bwd_sink_f32, p->Hq, 256, a);
}

fattni_bwd_huge fattni_bwd_cuda_huge_parts(const fattn_ctx *ctx, const fattni_problem *p, size_t begin, int64_t rows) {
    const fattni_cuda_kernel *const k = fattni_cuda_find_huge(ctx, p);
    const size_t real = fattn_dtype_size((fattn_dtype)p->lse.dtype), blocks = row_blocks(p, k);
    fattni_bwd_huge at = {.max = begin};
    at.log_sum = at.max + aligned((size_t)rows * real);
    at.blocks = at.log_sum + aligned((size_t)rows * real);
    at.zero = at.sink = at.blocks + aligned(blocks * sizeof(int32_t));
    at.counters = at.sink + (p->d_sink.present ? aligned(blocks * real) : 0);
    at.end = at.counters + FATTNI_ALIGN;
    return at;
}

void fattni_bwd_cuda_huge_args(const fattn_ctx *ctx, const fattni_problem *p, const fattni_bwd_huge *parts,
                               fattni_cuda_args *a) {
    char *const workspace = p->workspace;
    a->huge = (int32_t *)(workspace + parts->counters);
    a->huge_blocks = (int32_t *)(workspace + parts->blocks);
    a->huge_max = workspace + parts->max;
    a->huge_log_sum = workspace + parts->log_sum;
    a->huge_sink = workspace + parts->sink;
    a->huge_block = fattni_cuda_find_huge(ctx, p)->BM;
}

fattn_status fattni_bwd_cuda_huge(fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *after,
                                  const fattni_cuda_args *a) {
    const fattni_cuda_kernel *const k = fattni_cuda_find_huge(ctx, p);
    const int64_t tasks = fattni_bwd_cuda_row_grid(p, k) + fattni_bwd_cuda_key_grid(p, k);
    /* With as much shared memory as the kernel before: an SM that divides its memory anew has to be empty first. */
    const size_t most = fattni_cuda_most_shared(ctx);
    const size_t shared = after->shared > most ? most : after->shared > k->shared ? after->shared : k->shared;
    return fattni_cuda_start_early(ctx, k->name, k->kernel, fattni_min(tasks, ctx->gpu.sms), k->threads, shared, a);
}
