/* FlashAttention-3's kernels for Hopper behind C functions, so that peers.py --fa3 and shapes.py --fa3 can time them
   beside ours. Only this glue is here; the kernels, and the dispatch that chooses their template arguments, come from
   a checkout of their repository and of the CUTLASS commit it names. fa3.sh builds the library, from one object per

       -DPASS=fwd or bwd
       -DHEAD_DIM=64, 96, 128, 192, 256 and -DHEAD_DIM_V, which differs only in 192/128: what they round to
       -DDTYPE=bf16 or f16
       -DKIND=a sum of 1 (GQA), 2 (a window), 4 (packed: varlen), or 8 (forward: keys split for few queries)

   with one function fa3_<PASS>_<HEAD_DIM>_<HEAD_DIM_V>_<DTYPE>_<KIND>. What their kernels take from run time in
   flash_api.cpp (mha_fwd and mha_bwd with num_splits 1, as their flash_attn_func calls them; of KIND 8 with their own
   choice, all sequences being of one length) is set here. */
#include "static_switch.h"

#define GQA_KIND (KIND & 1)
#define LOCAL_KIND (KIND >> 1 & 1)
#define VARLEN_KIND (KIND >> 2 & 1)
#define SPLIT_KIND (KIND >> 3 & 1)

/* Their switches, by the name of the constant that each declares: one value in this object, but for the causal mask
   and for clusters. */
#define FIXED_Varlen VARLEN_KIND
#define FIXED_GQA GQA_KIND
#define FIXED_Deterministic_ false
#define FIXED_HasQV_ false
#define FIXED_AppendKV false
#define FIXED(COND, NAME, ...)                                                                                         \
    [&] {                                                                                                              \
        constexpr static bool NAME = FIXED_##NAME;                                                                     \
        return __VA_ARGS__();                                                                                          \
    }()
#define EITHER(COND, NAME, ...)                                                                                        \
    [&] {                                                                                                              \
        if (COND) {                                                                                                    \
            constexpr static bool NAME = true;                                                                         \
            return __VA_ARGS__();                                                                                      \
        } else {                                                                                                       \
            constexpr static bool NAME = false;                                                                        \
            return __VA_ARGS__();                                                                                      \
        }                                                                                                              \
    }()
#undef BOOL_SWITCH
#undef VARLEN_SWITCH
#undef APPENDKV_SWITCH
#undef CLUSTER_SWITCH
#undef CAUSAL_LOCAL_SWITCH
#define BOOL_SWITCH FIXED
#define VARLEN_SWITCH FIXED
#define APPENDKV_SWITCH FIXED
#define CLUSTER_SWITCH EITHER
#if LOCAL_KIND
#define CAUSAL_LOCAL_SWITCH(CAUSAL_COND, LOCAL_COND, CAUSAL, LOCAL, ...)                                               \
    [&] {                                                                                                              \
        constexpr static bool CAUSAL = false, LOCAL = true;                                                            \
        return __VA_ARGS__();                                                                                          \
    }()
#else
#define CAUSAL_LOCAL_SWITCH(CAUSAL_COND, LOCAL_COND, CAUSAL, LOCAL, ...)                                               \
    EITHER(CAUSAL_COND, CAUSAL, [&] {                                                                                  \
        constexpr static bool LOCAL = false;                                                                           \
        return (__VA_ARGS__)();                                                                                        \
    })
#endif

#define IS_fwd 1
#define IS_bwd 0
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define FORWARD JOIN(IS_, PASS)
#if FORWARD
#include "flash_fwd_combine_launch_template.h"
#include "flash_fwd_launch_template.h"
#include "heuristics.h"
#else
#include "flash_bwd_launch_template.h"
#endif

#define PASTE_(pass, d, dv, dtype, kind) fa3_##pass##_##d##_##dv##_##dtype##_##kind
#define PASTE(pass, d, dv, dtype, kind) PASTE_(pass, d, dv, dtype, kind)
#define NAME(pass, kind) PASTE(pass, HEAD_DIM, HEAD_DIM_V, DTYPE, kind)

typedef cutlass::bfloat16_t bf16;
typedef cutlass::half_t f16;
enum { Q, K, V, O, DO, DQ, DK, DV, TENSORS };

/* One attention. Strides in elements: of batches (0 where packed), rows, heads; B: sequences; Sq, Sk: the longest;
   total_q, total_k: rows. left, right: the window, less than 0 without bound; neither: the mask is full or causal.
   Both passes: lse [B,H,Sq], packed [H,total_q]. Forward: counters, 4 B + 17 ints.
   Backward, R rows of q and P of k: lse2, delta [R,H]; dq_sums [R,H,HEAD_DIM]; dk_sums, dv_sums [P,Hkv,HEAD_DIM]
   (GQA); counters, B H ints per 64 of Sq. R = B (Sq + 128), packed total_q + 128 (B + 1); P the same of k.
   KIND 8: o_parts, lse_parts, 128 of o and lse in F32. */
struct Fa3 {
    void *tensor[TENSORS];
    int64_t stride[TENSORS][3];
    float *lse, *lse2, *delta, *dq_sums, *dk_sums, *dv_sums;
    int *counters, *cu_seqlens_q, *cu_seqlens_k;
    int B, H, Hkv, Sq, Sk, total_q, total_k, d, dv, causal, left, right;
    float *o_parts, *lse_parts;
};

static int rounded(int n, int step) { return (n + step - 1) / step * step; }

static void describe(Flash_fwd_params *p, const Fa3 *a) {
    p->is_bf16 = std::is_same<DTYPE, bf16>::value;
    p->q_ptr = a->tensor[Q], p->k_ptr = a->tensor[K], p->v_ptr = a->tensor[V], p->o_ptr = a->tensor[O];
    p->q_batch_stride = a->stride[Q][0], p->q_row_stride = a->stride[Q][1], p->q_head_stride = a->stride[Q][2];
    p->k_batch_stride = a->stride[K][0], p->k_row_stride = a->stride[K][1], p->k_head_stride = a->stride[K][2];
    p->v_batch_stride = a->stride[V][0], p->v_row_stride = a->stride[V][1], p->v_head_stride = a->stride[V][2];
    p->o_batch_stride = a->stride[O][0], p->o_row_stride = a->stride[O][1], p->o_head_stride = a->stride[O][2];
    p->v_dim_stride = 1, p->softmax_lse_ptr = a->lse;
    p->cu_seqlens_q = a->cu_seqlens_q, p->cu_seqlens_k = a->cu_seqlens_k;
    p->b = p->b_k = a->B, p->h = a->H, p->h_k = a->Hkv, p->seqlen_q = a->Sq, p->seqlen_k = a->Sk;
    p->seqlen_q_rounded = rounded(a->Sq, 128), p->seqlen_k_rounded = rounded(a->Sk, 128);
    p->total_q = a->total_q, p->total_k = a->total_k;
    p->d = a->d, p->dv = a->dv, p->d_rounded = HEAD_DIM, p->dv_rounded = HEAD_DIM_V;
    p->scale_softmax = 1.0f / sqrtf((float)a->d);
    p->p_dropout = p->rp_dropout = 1.0f, p->p_dropout_in_uint8_t = 255;
    p->is_causal = a->causal && !LOCAL_KIND, p->is_local = LOCAL_KIND;
    p->window_size_left = a->left < 0 ? a->Sk - 1 : a->left;
    p->window_size_right = a->causal ? 0 : a->right < 0 ? a->Sq - 1 : a->right;
    p->num_splits = 1, p->page_size = 1, p->arch = 90;
    cudaDeviceGetAttribute(&p->num_sm, cudaDevAttrMultiProcessorCount, 0);
}

#if FORWARD

#if GQA_KIND
#define WITHOUT_GQA_1 0
#define WITHOUT_GQA_3 2
#define WITHOUT_GQA_5 4
extern "C" int NAME(fwd, JOIN(WITHOUT_GQA_, KIND))(const Fa3 *a, cudaStream_t stream);
#endif

#if SPLIT_KIND
extern "C" int NAME(fwd, 0)(const Fa3 *a, cudaStream_t stream);
extern "C" int NAME(fwd, 1)(const Fa3 *a, cudaStream_t stream);

/* get_num_splits of flash_api.cpp. */
static int splits_of(const Flash_fwd_params *p) {
    const auto tile = tile_size_fwd_sm90(HEAD_DIM, HEAD_DIM_V, p->is_causal, p->is_local);
    const int rows = p->seqlen_q * (p->h / p->h_k), BM = std::get<0>(tile), BN = std::get<1>(tile);
    const int row_blocks = rounded(rows, BM) / BM, key_bytes = p->seqlen_k * (p->d + p->dv) * 2;
    return num_splits_heuristic(p->b * p->h_k * row_blocks, p->num_sm, rounded(p->seqlen_k, BN) / BN, row_blocks,
                                key_bytes, p->is_causal, 128);
}

static void describe_parts(Flash_fwd_params *p, const Fa3 *a) {
    p->pack_gqa = true;
    p->oaccum_ptr = a->o_parts, p->softmax_lseaccum_ptr = a->lse_parts;
    p->lseaccum_head_stride = p->seqlen_q, p->lseaccum_batch_stride = (int64_t)p->h * p->seqlen_q;
    p->lseaccum_split_stride = p->b * p->lseaccum_batch_stride;
    p->oaccum_row_stride = p->dv, p->oaccum_head_stride = (int64_t)p->dv * p->lseaccum_head_stride;
    p->oaccum_batch_stride = p->dv * p->lseaccum_batch_stride;
    p->oaccum_split_stride = p->dv * p->lseaccum_split_stride;
}
#endif

extern "C" int NAME(fwd, KIND)(const Fa3 *a, cudaStream_t stream) {
    Flash_fwd_params p = {};
    describe(&p, a);
#if SPLIT_KIND
    p.num_splits = splits_of(&p);
    if (p.num_splits == 1) return p.h == p.h_k ? NAME(fwd, 0)(a, stream) : NAME(fwd, 1)(a, stream);
    describe_parts(&p, a);
    run_mha_fwd_<90, DTYPE, HEAD_DIM, HEAD_DIM_V, true, false, false, true>(p, stream);
    run_mha_fwd_combine_<DTYPE, float, HEAD_DIM_V <= 64 ? 64 : 128>(p, stream, true);
    return (int)cudaGetLastError();
#endif
#if GQA_KIND
    const int BM = std::get<0>(tile_size_fwd_sm90(HEAD_DIM, HEAD_DIM_V, p.is_causal, p.is_local));
    p.pack_gqa = should_pack_gqa(p.cu_seqlens_q, p.seqlen_q, p.h / p.h_k, BM);
    if (!p.pack_gqa) return NAME(fwd, JOIN(WITHOUT_GQA_, KIND))(a, stream);
#endif
    if (VARLEN_KIND) {
        const int vector = rounded(p.b, 4);
        int vectors = 2;
        p.prepare_varlen_pdl = p.b <= 992;
        p.varlen_sort_batches = !p.is_local, p.head_swizzle = p.is_causal || p.is_local;
        p.num_splits_dynamic_ptr = a->counters, p.num_m_blocks_ptr = a->counters + vector;
        if (p.varlen_sort_batches) p.varlen_batch_idx_ptr = a->counters + vectors++ * vector;
        if (p.head_swizzle) p.num_nheads_in_l2_ptr = a->counters + vectors++ * vector;
        p.tile_count_semaphore_offset = vectors * vector;
        p.tile_count_semaphore = a->counters + p.tile_count_semaphore_offset;
    } else if (p.is_causal || p.is_local) {
        p.tile_count_semaphore = a->counters;
        cudaMemsetAsync(a->counters, 0, sizeof(int), stream);
    }
    run_mha_fwd_<90, DTYPE, HEAD_DIM, HEAD_DIM_V, false, false, false, GQA_KIND>(p, stream);
    return (int)cudaGetLastError();
}

#else

extern "C" int NAME(bwd, KIND)(const Fa3 *a, cudaStream_t stream) {
    Flash_bwd_params p = {};
    describe(&p, a);
    const bool full = !p.is_causal && !p.is_local;
    const int BM = HEAD_DIM == 64 ? 128 : HEAD_DIM == 128 && full ? 80 : 64;
    const int BN = HEAD_DIM <= 128 ? 128 : HEAD_DIM == 192 ? 96 : 80;
    p.seqlen_q_rounded = rounded(a->Sq, BM), p.seqlen_k_rounded = rounded(a->Sk, BN), p.dv_rounded = HEAD_DIM;
    p.do_ptr = a->tensor[DO], p.dq_ptr = a->tensor[DQ], p.dk_ptr = a->tensor[DK], p.dv_ptr = a->tensor[DV];
    p.do_batch_stride = a->stride[DO][0], p.do_row_stride = a->stride[DO][1], p.do_head_stride = a->stride[DO][2];
    p.dq_batch_stride = a->stride[DQ][0], p.dq_row_stride = a->stride[DQ][1], p.dq_head_stride = a->stride[DQ][2];
    p.dk_batch_stride = a->stride[DK][0], p.dk_row_stride = a->stride[DK][1], p.dk_head_stride = a->stride[DK][2];
    p.dv_batch_stride = a->stride[DV][0], p.dv_row_stride = a->stride[DV][1], p.dv_head_stride = a->stride[DV][2];
    p.softmax_lse_log2_ptr = a->lse2, p.dsoftmax_sum = a->delta, p.dq_accum_ptr = a->dq_sums;
    p.dq_semaphore = a->counters;
    if (GQA_KIND) {
        const int rows = VARLEN_KIND ? rounded(a->total_k + a->B * BN, BN) : a->B * p.seqlen_k_rounded;
        const size_t bytes = (size_t)rows * a->Hkv * HEAD_DIM * sizeof(float);
        p.dk_accum_ptr = a->dk_sums, p.dv_accum_ptr = a->dv_sums;
        cudaMemsetAsync(a->dk_sums, 0, bytes, stream);
        cudaMemsetAsync(a->dv_sums, 0, bytes, stream);
    }
    JOIN(run_mha_bwd_hdim, HEAD_DIM)<90, DTYPE, false>(p, stream);
    return (int)cudaGetLastError();
}

#endif
