/* The sum of the ranks' numbers, 1 + their ranks, over MPI. */
#include <mpi.h>

#include <fattn/fattn.h>
#include <fattn/mpi.h>

#include <stdio.h>

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    fattn_ctx *ctx;
    fattn_comm *c;
    if (fattn_ctx_create(NULL, &ctx) != FATTN_OK) return 2;
    fattn_status s = fattn_comm_mpi(ctx, MPI_COMM_WORLD, NULL, &c);
    const int size = fattn_comm_size(c);
    float x = (float)(1 + fattn_comm_rank(c));
    const int64_t one = 1;
    const fattn_tensor t = fattn_tensor_view(&x, FATTN_F32, FATTN_CPU, 0, 1, &one);
    if (s == FATTN_OK) s = fattn_comm_all_reduce(c, &t);
    if (s != FATTN_OK) fprintf(stderr, "%s: %s\n", fattn_status_name(s), fattn_ctx_error(ctx));
    printf("%d ranks: sum %g\n", size, x);
    fattn_comm_destroy(c);
    fattn_ctx_destroy(ctx);
    MPI_Finalize();
    return s != FATTN_OK || x != (float)(size * (size + 1) / 2);
}
