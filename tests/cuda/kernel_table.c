/* Prints name, threads and dynamic shared memory of each attention kernel of this build. */
#include "core/cuda/kernels.h"

#include <stdio.h>

int main(void) {
    for (const fattni_cuda_kernel *k = fattni_cuda_kernels; k->name; ++k)
        printf("%s %d %zu\n", k->name, k->threads, k->shared);
    return 0;
}
