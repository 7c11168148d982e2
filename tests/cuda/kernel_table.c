/* Prints name, threads and dynamic shared memory of each attention kernel of this build. */
#include "core/cuda/kernels.h"

#include <stdio.h>

int main(void) {
    const fattni_cuda_kernel *const *const lists[] = {fattni_fwd_cuda_kernels, fattni_bwd_cuda_kernels};
    for (int n = 0; n < 2; ++n)
        for (const fattni_cuda_kernel *const *k = lists[n]; *k; ++k)
            printf("%s %d %zu\n", (*k)->name, (*k)->threads, (*k)->shared);
    return 0;
}
