/* FlashAttention-3's kernels for Hopper behind C functions, so that peers.py --fa3 can time them beside
   ours. Only this glue is here; the kernels come from a checkout of their repository and of the CUTLASS
   commit it names. One object per head_dim (-DHEAD_DIM=64, 128, 256), then a shared library:

   nvcc -std=c++17 -O3 -arch=sm_90a --use_fast_math --expt-relaxed-constexpr --expt-extended-lambda \
       -DNDEBUG -DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED -DCUTLASS_ENABLE_GDC_FOR_SM90 -DHEAD_DIM=128 \
       -Iflash-attention/hopper -Icutlass/include -Xcompiler -fPIC -c bench/fa3.cu -o fa3_128.o
   nvcc -shared -o libfa3.so fa3_64.o fa3_128.o fa3_256.o

   bf16, tensors [B,S,H,D] contiguous, no features but the causal mask; template arguments are those that
   their own dispatch chooses. `counter` and `semaphores` are zeroed ints. */
#include "flash_bwd_launch_template.h"
#include "flash_fwd_launch_template.h"

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
typedef cutlass::bfloat16_t element;
enum { D = HEAD_DIM };

static void describe(Flash_fwd_params *p, void *q, void *k, void *v, void *o, void *lse, int B, int S, int H,
                     int causal, int *counter) {
    const int64_t row = (int64_t)H * D, batch = row * S;
    p->is_bf16 = true;
    p->q_ptr = q, p->k_ptr = k, p->v_ptr = v, p->o_ptr = o, p->softmax_lse_ptr = lse;
    p->q_row_stride = p->k_row_stride = p->v_row_stride = p->o_row_stride = row;
    p->q_head_stride = p->k_head_stride = p->v_head_stride = p->o_head_stride = D;
    p->q_batch_stride = p->k_batch_stride = p->v_batch_stride = p->o_batch_stride = batch;
    p->v_dim_stride = 1;
    p->b = p->b_k = B, p->h = p->h_k = H, p->seqlen_q = p->seqlen_k = S;
    p->seqlen_q_rounded = p->seqlen_k_rounded = (S + 127) / 128 * 128;
    p->d = p->dv = p->d_rounded = p->dv_rounded = D, p->total_q = p->total_k = B * S;
    p->scale_softmax = 1.0f / sqrtf((float)D);
    p->p_dropout = p->rp_dropout = 1.0f, p->p_dropout_in_uint8_t = 255;
    p->is_causal = causal, p->window_size_left = S - 1, p->window_size_right = causal ? 0 : S - 1;
    p->num_splits = 1, p->tile_count_semaphore = counter, p->arch = 90;
    cudaDeviceGetAttribute(&p->num_sm, cudaDevAttrMultiProcessorCount, 0);
}

extern "C" int PASTE(fa3_fwd_, HEAD_DIM)(void *q, void *k, void *v, void *o, void *lse, int B, int S, int H, int causal,
                                         int *counter, cudaStream_t stream) {
    Flash_fwd_params p = {};
    describe(&p, q, k, v, o, lse, B, S, H, causal, counter);
    if (causal) {
        cudaMemsetAsync(counter, 0, sizeof *counter, stream);
        run_flash_fwd<90, D, D, 1, element, element, true, false, false, false, false, false, false, false, false,
                      false>(p, stream);
    } else {
        run_flash_fwd<90, D, D, D >= 128 ? 2 : 1, element, element, false, false, false, false, false, false, false,
                      false, false, false>(p, stream);
    }
    return (int)cudaGetLastError();
}

/* sums: float [B,H,S + 256,D]; lse2, delta: float [B,H,S + 256]. */
extern "C" int PASTE(fa3_bwd_, HEAD_DIM)(void *q, void *k, void *v, void *o, void *lse, void *d_o, void *dq, void *dk,
                                         void *dv, float *sums, float *lse2, float *delta, int *semaphores, int B,
                                         int S, int H, int causal, cudaStream_t stream) {
    const int64_t row = (int64_t)H * D, batch = row * S;
    const int BM = D == 64 ? 128 : D == 128 && !causal ? 80 : 64, BN = D == 256 ? 80 : 128;
    Flash_bwd_params p = {};
    describe(&p, q, k, v, o, lse, B, S, H, causal, semaphores);
    p.do_ptr = d_o, p.dq_ptr = dq, p.dk_ptr = dk, p.dv_ptr = dv;
    p.dq_accum_ptr = sums, p.softmax_lse_log2_ptr = lse2, p.dsoftmax_sum = delta, p.dq_semaphore = semaphores;
    p.do_row_stride = p.dq_row_stride = p.dk_row_stride = p.dv_row_stride = row;
    p.do_head_stride = p.dq_head_stride = p.dk_head_stride = p.dv_head_stride = D;
    p.do_batch_stride = p.dq_batch_stride = p.dk_batch_stride = p.dv_batch_stride = batch;
    p.seqlen_q_rounded = (S + BM - 1) / BM * BM, p.seqlen_k_rounded = (S + BN - 1) / BN * BN;
    /* <arch, D, BM, BN, element, causal, local, softcap, varlen, deterministic, GQA, stages and layouts> */
#define RUN(M, N, CAUSAL, ...)                                                                                         \
    run_flash_bwd<90, D, M, N, element, CAUSAL, false, false, false, false, false, __VA_ARGS__>(p, stream)
#if HEAD_DIM == 64
    if (causal)
        RUN(128, 128, true, 2, 2, true, false, false, 2, 1, 2, 2, false);
    else
        RUN(128, 128, false, 2, 2, true, false, false, 2, 1, 2, 2, false);
#elif HEAD_DIM == 128
    if (causal)
        RUN(64, 128, true, 2, 2, true, false, false, 2, 1, 2, 1, false);
    else
        RUN(80, 128, false, 2, 2, true, false, true, 2, 1, 2, 1, false);
#else
    if (causal)
        RUN(64, 80, true, 1, 1, false, true, true, 2, 1, 1, 1, false);
    else
        RUN(64, 80, false, 1, 1, false, true, true, 2, 1, 1, 1, false);
#endif
    return (int)cudaGetLastError();
}
