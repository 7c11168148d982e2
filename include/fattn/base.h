/* fattn/base.h - version, linkage, status. Includes nothing but <stddef.h> and <stdint.h>. */
#ifndef FATTN_BASE_H
#define FATTN_BASE_H

#include <stddef.h>
#include <stdint.h>

#define FATTN_VERSION_MAJOR 0
#define FATTN_VERSION_MINOR 1
#define FATTN_VERSION_PATCH 0
#define FATTN_VERSION (FATTN_VERSION_MAJOR * 10000 + FATTN_VERSION_MINOR * 100 + FATTN_VERSION_PATCH)

#ifdef __cplusplus
#define FATTN_EXTERN extern "C"
#else
#define FATTN_EXTERN extern
#endif
#if defined(__GNUC__)
#define FATTN_API FATTN_EXTERN __attribute__((visibility("default")))
#define FATTN_CHECKED __attribute__((warn_unused_result))
#define FATTN_PRINTF(text, first) __attribute__((format(printf, text, first)))
#else
#define FATTN_API FATTN_EXTERN
#define FATTN_CHECKED
#define FATTN_PRINTF(text, first)
#endif

/* One list makes the enum, the names and the texts. Values are ABI: append only. */
#define FATTN_STATUS_MAP(X)                                                                                            \
    X(FATTN_OK, 0, "success")                                                                                          \
    X(FATTN_E_ARG, 1, "argument is NULL or out of range")                                                              \
    X(FATTN_E_ABI, 2, "struct_size is zero or too new")                                                                \
    X(FATTN_E_SHAPE, 3, "shapes or strides do not agree")                                                              \
    X(FATTN_E_DTYPE, 4, "dtype is not accepted here")                                                                  \
    X(FATTN_E_DEVICE, 5, "tensor is not on the context's device")                                                      \
    X(FATTN_E_UNSUPPORTED, 6, "no kernel covers this configuration")                                                   \
    X(FATTN_E_WORKSPACE, 7, "workspace is too small or misaligned")                                                    \
    X(FATTN_E_NOMEM, 8, "allocator returned NULL")                                                                     \
    X(FATTN_E_CUDA, 9, "CUDA reported an error")                                                                       \
    X(FATTN_E_STATE, 10, "call is out of order")                                                                       \
    X(FATTN_E_IO, 11, "file could not be read or written")                                                             \
    X(FATTN_E_MISMATCH, 12, "numbers differ by more than allowed")                                                     \
    X(FATTN_E_COMM, 13, "another rank has failed or does not answer")
#define FATTN_X(name, value, text) name = value,
typedef enum fattn_status { FATTN_STATUS_MAP(FATTN_X) FATTN_STATUS_COUNT } fattn_status;
#undef FATTN_X

FATTN_API int fattn_version(void);                       /* FATTN_VERSION of the library that was loaded */
FATTN_API const char *fattn_status_name(fattn_status s); /* "FATTN_E_SHAPE"; never NULL */
FATTN_API const char *fattn_status_text(fattn_status s); /* one line of English; never NULL */

#endif
