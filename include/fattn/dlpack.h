/* fattn/dlpack.h - DLTensor <-> fattn_tensor. Opt-in: include <dlpack/dlpack.h> (DLPack 0.6 or later)
   yourself before this header; no other header of fattn uses it.

   Both are views. An imported tensor borrows its memory: call the producer's deleter after the last
   use of the view. There is no context here, so a failure has a status but no error message: ARG
   (NULL), DTYPE (complex, bool, lanes, sizes that fattn lacks), DEVICE (neither CPU, CUDA nor pinned
   host memory), SHAPE (more than FATTN_MAX_DIMS dimensions, or a negative one). *out is written on
   success only. */
#ifndef FATTN_DLPACK_H
#define FATTN_DLPACK_H

#include <fattn/tensor.h>

/* Headers from DLPack 1.1 on know 8-bit floats; with an older one they are DTYPE errors. */
#if defined(DLPACK_MAJOR_VERSION) && (DLPACK_MAJOR_VERSION > 1 || DLPACK_MINOR_VERSION >= 1)
#define FATTN_DLPACK_F8E4M3 kDLFloat8_e4m3fn
#endif

/* 0 for a type that fattn lacks. */
static inline fattn_dtype fattn_dtype_from_dlpack(DLDataType t) {
    if (t.lanes != 1) return (fattn_dtype)0;
    if (t.code == kDLFloat && t.bits == 64) return FATTN_F64;
    if (t.code == kDLFloat && t.bits == 32) return FATTN_F32;
    if (t.code == kDLFloat && t.bits == 16) return FATTN_F16;
    if (t.code == kDLBfloat && t.bits == 16) return FATTN_BF16;
    if (t.code == kDLInt && t.bits == 32) return FATTN_I32;
    if (t.code == kDLUInt && t.bits == 8) return FATTN_U8;
    if (t.code == kDLInt && t.bits == 8) return FATTN_I8;
#ifdef FATTN_DLPACK_F8E4M3
    if (t.code == FATTN_DLPACK_F8E4M3 && t.bits == 8) return FATTN_F8E4M3;
#endif
    return (fattn_dtype)0;
}

/* A DLTensor does not say whether it may be written: an array that its producer calls read-only must
   not become an output. Producers of DLPack 1.0 do say so: see _versioned below. */
FATTN_CHECKED static inline fattn_status fattn_tensor_from_dlpack(const DLTensor *x, fattn_tensor *out) {
    if (!x || !out || (x->ndim > 0 && !x->shape)) return FATTN_E_ARG;
    const fattn_dtype dtype = fattn_dtype_from_dlpack(x->dtype);
    if (!dtype) return FATTN_E_DTYPE;
    const int on_gpu = x->device.device_type == kDLCUDA;
    const int on_cpu = x->device.device_type == kDLCPU || x->device.device_type == kDLCUDAHost;
    if (!on_cpu && !on_gpu) return FATTN_E_DEVICE;
    if (x->ndim < 0 || x->ndim > FATTN_MAX_DIMS) return FATTN_E_SHAPE;
    int64_t none[1] = {0};
    fattn_tensor t = fattn_tensor_view(0, dtype, on_gpu ? FATTN_CUDA : FATTN_CPU, on_gpu ? x->device.device_id : 0,
                                       x->ndim, x->ndim ? x->shape : none);
    const int empty = fattn_tensor_numel(&t) == 0; /* NumPy's strides are all 0 then */
    for (int d = 0; d < x->ndim; ++d) {
        if (x->shape[d] < 0) return FATTN_E_SHAPE;
        if (x->strides && !empty) t.stride[d] = x->strides[d]; /* NULL: row-major */
    }
    if (x->data) t.data = (char *)x->data + x->byte_offset;
    *out = t;
    return FATTN_OK;
}

/* out points into shape and strides, which must live as long as it does; so must t's memory. */
FATTN_CHECKED static inline fattn_status fattn_tensor_to_dlpack(const fattn_tensor *t, int64_t shape[FATTN_MAX_DIMS],
                                                                int64_t strides[FATTN_MAX_DIMS], DLTensor *out) {
    if (!t || !shape || !strides || !out) return FATTN_E_ARG;
    if (t->ndim < 0 || t->ndim > FATTN_MAX_DIMS) return FATTN_E_SHAPE;
    const size_t size = fattn_dtype_size((fattn_dtype)t->dtype);
    if (!size) return FATTN_E_DTYPE;
#ifndef FATTN_DLPACK_F8E4M3
    if (t->dtype == FATTN_F8E4M3) return FATTN_E_DTYPE;
#endif
    if (t->device != FATTN_CPU && t->device != FATTN_CUDA) return FATTN_E_DEVICE;
    for (int d = 0; d < t->ndim; ++d) {
        shape[d] = t->shape[d];
        strides[d] = t->stride[d];
    }
    out->data = t->data;
    out->device.device_type = t->device == FATTN_CUDA ? kDLCUDA : kDLCPU;
    out->device.device_id = t->device_id;
    out->ndim = t->ndim;
    out->dtype.code = (uint8_t)(t->dtype == FATTN_BF16                          ? kDLBfloat
                                : t->dtype == FATTN_I32 || t->dtype == FATTN_I8 ? kDLInt
                                : t->dtype == FATTN_U8                          ? kDLUInt
                                                                                : kDLFloat);
#ifdef FATTN_DLPACK_F8E4M3
    if (t->dtype == FATTN_F8E4M3) out->dtype.code = FATTN_DLPACK_F8E4M3;
#endif
    out->dtype.bits = (uint8_t)(8 * size);
    out->dtype.lanes = 1;
    out->shape = shape;
    out->strides = strides;
    out->byte_offset = 0;
    return FATTN_OK;
}

#ifdef DLPACK_MAJOR_VERSION
/* `write`: the tensor will be an output. ARG for an output that is read-only, ABI for a producer of
   a later major version. */
FATTN_CHECKED static inline fattn_status fattn_tensor_from_dlpack_versioned(const DLManagedTensorVersioned *m,
                                                                            int write, fattn_tensor *out) {
    if (!m) return FATTN_E_ARG;
    if (m->version.major != DLPACK_MAJOR_VERSION) return FATTN_E_ABI;
    if (write && (m->flags & DLPACK_FLAG_BITMASK_READ_ONLY)) return FATTN_E_ARG;
    return fattn_tensor_from_dlpack(&m->dl_tensor, out);
}
#endif

#endif
