/* Calls examples/llm.c and examples/llmq by the declarations of the two programs: it links only where the names in the
   examples are those that a C++ compiler gives. The tensors have no rows. */
#include <cstddef>

struct __nv_bfloat16 {
    unsigned short bits;
};
struct __half {
    unsigned short bits;
};
typedef struct CUstream_st *cudaStream_t;
typedef struct cudnnContext *cudnnHandle_t;

/* llm.c, whose floatX is one of two types */
void create_cudnn();
void destroy_cudnn();
#define LLM_C(floatX)                                                                                                  \
    void attention_forward_cudnn(floatX *out, float *stats, floatX *inp, int B, int T, int NH, int C,                  \
                                 cudaStream_t stream);                                                                 \
    void attention_backward_cudnn(floatX *dqkvr, floatX *dout, floatX *qkvr, floatX *o, float *stats, int B, int T,    \
                                  int NH, int C, cudaStream_t stream);
LLM_C(__nv_bfloat16)
LLM_C(__half)

/* LLM.Q */
cudnnHandle_t create_cudnn_handle();
std::size_t cudnn_get_workspace_size(int B, int T, int Hq, int Hkv, int HS, cudnnHandle_t handle);
void attention_forward_cudnn(__nv_bfloat16 *out, float *stats, const __nv_bfloat16 *inp, std::byte *workspace,
                             cudnnHandle_t handle, int B, int T, int Hq, int Hkv, int HS, cudaStream_t stream);
void attention_backward_cudnn(__nv_bfloat16 *dqkv, const float *stats, const __nv_bfloat16 *dout,
                              const __nv_bfloat16 *qkv, const __nv_bfloat16 *out, std::byte *workspace,
                              cudnnHandle_t handle, int B, int T, int Hq, int Hkv, int HS, cudaStream_t stream);

template <class floatX> static void llmc() {
    floatX x[1];
    float stats[1];
    attention_forward_cudnn(x, stats, x, 1, 0, 2, 16, nullptr);
    attention_backward_cudnn(x, x, x, x, stats, 1, 0, 2, 16, nullptr);
}

alignas(256) static std::byte workspace[32 << 20]; /* what LLM.Q lends forward */

int main() {
    create_cudnn();
    llmc<__nv_bfloat16>();
    llmc<__half>();
    destroy_cudnn();

    const cudnnHandle_t handle = create_cudnn_handle();
    const __nv_bfloat16 in[1] = {};
    __nv_bfloat16 out[1];
    float stats[1];
    if (cudnn_get_workspace_size(1, 0, 4, 2, 16, handle) > sizeof workspace) return 1;
    attention_forward_cudnn(out, stats, in, workspace, handle, 1, 0, 4, 2, 16, nullptr);
    attention_backward_cudnn(out, stats, in, in, in, workspace, handle, 1, 0, 4, 2, 16, nullptr);
    return 0;
}
