/* fattn/dlpack.h is inline; this makes it callable for test_dlpack.py. */
#include <dlpack/dlpack.h>
#include <fattn/dlpack.h>
#include <fattn/fattn.h>

#define BRIDGE __attribute__((visibility("default")))

BRIDGE int bridge_import(const DLTensor *x, fattn_tensor *out);
BRIDGE int bridge_import_versioned(const DLManagedTensorVersioned *m, int write, fattn_tensor *out);
BRIDGE int bridge_export(const fattn_tensor *t, int64_t *shape, int64_t *strides, DLTensor *out);

int bridge_import(const DLTensor *x, fattn_tensor *out) { return fattn_tensor_from_dlpack(x, out); }

int bridge_import_versioned(const DLManagedTensorVersioned *m, int write, fattn_tensor *out) {
    return fattn_tensor_from_dlpack_versioned(m, write, out);
}

int bridge_export(const fattn_tensor *t, int64_t *shape, int64_t *strides, DLTensor *out) {
    return fattn_tensor_to_dlpack(t, shape, strides, out);
}
