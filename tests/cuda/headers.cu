/* The public headers under nvcc, and one kernel: the toolkit works, and a cudaStream_t needs no cast. */
#include <fattn/fattn.h>

#include <stdio.h>

enum { SKIPPED = 77, COUNT = 1000 };

__global__ void add_one(int *x, int count) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < count) x[i] += 1;
}

int main(void) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        printf("skipped: no CUDA device\n");
        return SKIPPED;
    }
    cudaStream_t stream;
    int host[COUNT], *device = NULL;
    for (int i = 0; i < COUNT; ++i) host[i] = i;
    if (cudaStreamCreate(&stream) != cudaSuccess) return 1;
    const fattn_stream same = stream;
    if (cudaMalloc((void **)&device, sizeof host) != cudaSuccess) return 1;
    cudaMemcpyAsync(device, host, sizeof host, cudaMemcpyHostToDevice, same);
    add_one<<<(COUNT + 255) / 256, 256, 0, same>>>(device, COUNT);
    cudaMemcpyAsync(host, device, sizeof host, cudaMemcpyDeviceToHost, same);
    if (cudaStreamSynchronize(same) != cudaSuccess) {
        printf("%s\n", cudaGetErrorString(cudaGetLastError()));
        return 1;
    }
    int wrong = 0;
    for (int i = 0; i < COUNT; ++i) wrong += host[i] != i + 1;
    cudaFree(device);
    cudaStreamDestroy(stream);
    printf("%d of %d elements wrong\n", wrong, COUNT);
    return wrong != 0;
}
