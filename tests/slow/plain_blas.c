/* Plain implementations of the BLAS functions that the library calls, for machines without a BLAS. */
#include <cblas.h>

#define GEMM(name, real)                                                                                               \
    void name(const enum CBLAS_ORDER order, const enum CBLAS_TRANSPOSE ta, const enum CBLAS_TRANSPOSE tb,              \
              const blasint M, const blasint N, const blasint K, const real alpha, const real *a, const blasint lda,   \
              const real *b, const blasint ldb, const real beta, real *c, const blasint ldc) {                         \
        (void)order; /* row-major */                                                                                   \
        for (blasint i = 0; i < M; ++i)                                                                                \
            for (blasint j = 0; j < N; ++j) {                                                                          \
                real sum = 0;                                                                                          \
                for (blasint k = 0; k < K; ++k)                                                                        \
                    sum += a[ta == CblasNoTrans ? i * lda + k : k * lda + i] *                                         \
                           b[tb == CblasNoTrans ? k * ldb + j : j * ldb + k];                                          \
                c[i * ldc + j] = alpha * sum + (beta == 0 ? 0 : beta * c[i * ldc + j]);                                \
            }                                                                                                          \
    }
GEMM(cblas_sgemm, float)
GEMM(cblas_dgemm, double)

#define VECTOR(scal, axpy, real)                                                                                       \
    void scal(const blasint n, const real alpha, real *x, const blasint step) {                                        \
        for (blasint i = 0; i < n; ++i) x[i * step] *= alpha;                                                          \
    }                                                                                                                  \
    void axpy(const blasint n, const real alpha, const real *x, const blasint x_step, real *y, const blasint y_step) { \
        for (blasint i = 0; i < n; ++i) y[i * y_step] += alpha * x[i * x_step];                                        \
    }
VECTOR(cblas_sscal, cblas_saxpy, float)
VECTOR(cblas_dscal, cblas_daxpy, double)

char *openblas_get_corename(void) {
    static char name[] = "plain";
    return name;
}
