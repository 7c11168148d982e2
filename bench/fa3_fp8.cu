/* FlashAttention-3's FP8 forward kernels for Hopper behind C functions, so that fp8.py --fa3 can time them beside
   ours. Built with fa3.sh's flags, one object per head_dim (-DHEAD_DIM=64, 128, 256), linked into libfa3_fp8.so.

   q, k, v: E4M3, [B,S,H,D] contiguous; o: bf16; descales: float [B,H], one value per (batch, head). `counter`: a zeroed
   int. Template arguments are those that their own dispatch chooses for V as it is, which the kernel transposes. */
#include "flash_fwd_launch_template.h"

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
typedef cutlass::float_e4m3_t code;
enum { D = HEAD_DIM };

extern "C" int PASTE(fa3_fp8_fwd_, HEAD_DIM)(void *q, void *k, void *v, void *o, void *lse, float *q_descale,
                                             float *k_descale, float *v_descale, int B, int S, int H, int causal,
                                             int *counter, cudaStream_t stream) {
    const int64_t row = (int64_t)H * D, batch = row * S;
    Flash_fwd_params p = {};
    p.is_e4m3 = true;
    p.q_ptr = q, p.k_ptr = k, p.v_ptr = v, p.o_ptr = o, p.softmax_lse_ptr = lse;
    p.q_row_stride = p.k_row_stride = p.v_row_stride = p.o_row_stride = row;
    p.q_head_stride = p.k_head_stride = p.v_head_stride = p.o_head_stride = D;
    p.q_batch_stride = p.k_batch_stride = p.v_batch_stride = p.o_batch_stride = batch;
    p.v_dim_stride = 1;
    p.q_descale_ptr = q_descale, p.k_descale_ptr = k_descale, p.v_descale_ptr = v_descale;
    p.q_descale_batch_stride = p.k_descale_batch_stride = p.v_descale_batch_stride = H;
    p.q_descale_head_stride = p.k_descale_head_stride = p.v_descale_head_stride = 1;
    p.b = p.b_k = B, p.h = p.h_k = H, p.seqlen_q = p.seqlen_k = S;
    p.seqlen_q_rounded = p.seqlen_k_rounded = (S + 127) / 128 * 128;
    p.d = p.dv = p.d_rounded = p.dv_rounded = D, p.total_q = p.total_k = B * S;
    p.scale_softmax = 1.0f / sqrtf((float)D);
    p.p_dropout = p.rp_dropout = 1.0f, p.p_dropout_in_uint8_t = 255;
    p.is_causal = causal, p.window_size_left = S - 1, p.window_size_right = causal ? 0 : S - 1;
    p.num_splits = 1, p.tile_count_semaphore = counter, p.arch = 90;
    cudaDeviceGetAttribute(&p.num_sm, cudaDevAttrMultiProcessorCount, 0);
    if (causal) cudaMemsetAsync(counter, 0, sizeof *counter, stream);
    if (causal)
        run_flash_fwd<90, D, D, 1, code, cutlass::bfloat16_t, true, false, false, false, false, false, false, false,
                      false, false>(p, stream);
    else
        run_flash_fwd<90, D, D, 1, code, cutlass::bfloat16_t, false, false, false, false, false, false, false, false,
                      false, false>(p, stream);
    return (int)cudaGetLastError();
}
