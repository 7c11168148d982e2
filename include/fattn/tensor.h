/* fattn/tensor.h - a strided view: a plain value that owns nothing and can be copied. */
#ifndef FATTN_TENSOR_H
#define FATTN_TENSOR_H

#include <fattn/context.h>

enum { FATTN_MAX_DIMS = 5 };
typedef enum fattn_dtype {
    FATTN_F64 = 1,
    FATTN_F32,
    FATTN_F16,
    FATTN_BF16,
    FATTN_I32,
    FATTN_U8,
    FATTN_F8E4M3, /* 4 exponent, 3 fraction bits, largest 448, no infinity: in copies and fattn/fp8.h */
    FATTN_I8      /* in copies and fattn/fp8.h */
} fattn_dtype;

typedef struct fattn_tensor {
    void *data;                     /* first element; NULL only when the tensor has no element */
    int64_t shape[FATTN_MAX_DIMS];  /* elements, each >= 0 */
    int64_t stride[FATTN_MAX_DIMS]; /* in elements, as in DLPack; 0 broadcasts; not read when the
                                       tensor has no element */
    int32_t ndim, dtype, device, device_id;
} fattn_tensor;

/* A position in the Philox4x32 sequence (Salmon et al. 2011): same seed and stream, same numbers, on every backend. Ten
   rounds, but seven for dropout masks. */
typedef struct fattn_rng {
    uint64_t seed;
    uint32_t stream;
    uint32_t reserved; /* 0 */
} fattn_rng;

FATTN_API size_t fattn_dtype_size(fattn_dtype t);            /* bytes; 0 for an unknown code */
FATTN_API const char *fattn_dtype_name(fattn_dtype t);       /* "bf16"; "?" for an unknown code */
FATTN_API int64_t fattn_tensor_numel(const fattn_tensor *t); /* product of the shape; 1 for ndim 0;
                                                                 saturates at INT64_MAX */
/* Row-major over the caller's memory. Pure; arguments are not checked. */
FATTN_API fattn_tensor fattn_tensor_view(void *data, fattn_dtype t, fattn_device dev, int32_t id, int ndim,
                                         const int64_t *shape);
/* Dimension d of the result is dimension order[d] of t. */
FATTN_API fattn_tensor fattn_tensor_permute(const fattn_tensor *t, const int *order);
/* Elements begin..end-1 along dim; the bounds are clamped to the shape. */
FATTN_API fattn_tensor fattn_tensor_slice(const fattn_tensor *t, int dim, int64_t begin, int64_t end);

/* Row-major, 256-byte aligned, contents undefined; a tensor without elements has data NULL.
   Errors: ARG (ndim, negative shape), DTYPE, NOMEM (also when the byte count overflows). */
FATTN_API FATTN_CHECKED fattn_status fattn_tensor_alloc(fattn_ctx *ctx, fattn_dtype t, int ndim, const int64_t *shape,
                                                        fattn_tensor *out);
/* Frees a tensor of fattn_tensor_alloc, which must be unchanged. Sets data to NULL; data NULL is
   allowed. */
FATTN_API void fattn_tensor_free(fattn_ctx *ctx, fattn_tensor *t);
/* dst[...] = src[...], any dtypes and strides, round to nearest even, F8E4M3 saturates; stride 0 in dst is an error.
   The two must not overlap unless they are the same view. With a context on a GPU either may be in host
   memory (device FATTN_CPU): then the call waits until the copy is done. */
FATTN_API FATTN_CHECKED fattn_status fattn_tensor_copy(fattn_ctx *ctx, const fattn_tensor *dst,
                                                       const fattn_tensor *src);
/* dst[...] += src[...], floating dtypes of 16 bits or more, any strides, both on the context's device. A
   user-defined op needs it when d_in_fresh is 0. */
FATTN_API FATTN_CHECKED fattn_status fattn_tensor_add(fattn_ctx *ctx, const fattn_tensor *dst, const fattn_tensor *src);
/* Independent normal numbers (Box-Muller over Philox), element e in row-major order from counter
   e/2: the same values for every dtype, up to rounding, and every stride. Errors: DTYPE for integers and F8E4M3. */
FATTN_API FATTN_CHECKED fattn_status fattn_tensor_normal(fattn_ctx *ctx, const fattn_tensor *dst, double mean,
                                                         double std, fattn_rng rng);

#endif
