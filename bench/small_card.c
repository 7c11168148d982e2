/* Makes a process believe that its GPU has the shared memory of an A100: 163 KiB a block, 164 KiB an SM. Libraries that
   choose their tiles by that, as FlashAttention-2 does for head_dim 256, then choose as on an A100.

   cc -shared -fPIC -O1 -D_GNU_SOURCE -I/usr/local/cuda/include bench/small_card.c -o small_card.so -ldl
   LD_PRELOAD=./small_card.so python3 bench/peers.py --arch-cap 80 --peers fa2 --dims 256

   At its end the process says how many answers were changed: 0 means that it has a CUDA runtime of its own. */
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>

#define TEXT(x) #x
#define RUNTIME(major) "libcudart.so." TEXT(major)

enum { PER_BLOCK = 163 << 10, PER_SM = 164 << 10 };

static int changed;

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    static cudaError_t (*own)(int *, enum cudaDeviceAttr, int);
    if (!own) *(void **)&own = dlsym(dlopen(RUNTIME(13), RTLD_NOLOAD | RTLD_LAZY), "cudaDeviceGetAttribute");
    const cudaError_t error = own(value, attribute, device);
    const int most = attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin       ? PER_BLOCK
                     : attribute == cudaDevAttrMaxSharedMemoryPerMultiprocessor ? PER_SM
                                                                                : 0;
    if (!error && most && *value > most) *value = most, changed += 1;
    return error;
}

__attribute__((destructor)) static void say(void) { fprintf(stderr, "small_card: %d answers changed\n", changed); }
