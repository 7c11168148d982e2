#include "host_driver.h"

#include "core/base/device.h"

#include <criterion/criterion.h>

driver_calls driver_state;

CUcontext other(int n) { return (CUcontext)(uintptr_t)(4096 + n); }
CUcontext top(void) { return driver_state.depth ? driver_state.stack[driver_state.depth - 1] : NULL; }
static CUresult get_current(CUcontext *out) {
    driver_state.looks += 1;
    *out = top();
    return CUDA_SUCCESS;
}
static CUresult push(CUcontext c) {
    cr_assert_lt(driver_state.depth, DRIVER_DEPTH);
    driver_state.stack[driver_state.depth++] = c;
    return CUDA_SUCCESS;
}
static CUresult pop(CUcontext *out) {
    cr_assert_gt(driver_state.depth, 0);
    *out = top();
    driver_state.depth -= 1;
    return CUDA_SUCCESS;
}
static CUresult encode(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                       const cuuint64_t *extent, const cuuint64_t *stride, const cuuint32_t *box,
                       const cuuint32_t *step, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                       CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    (void)map, (void)type, (void)rank, (void)address, (void)extent, (void)stride, (void)box, (void)step;
    (void)interleave, (void)swizzle, (void)promotion, (void)fill;
    driver_state.encoded += 1;
    return top() == other(0) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}
struct fattni_cuda_driver driver = {.get_current = get_current, .push = push, .pop = pop, .encode = encode};

static void *note_alloc(void *user, size_t bytes, size_t align, fattn_stream s) {
    (void)user, (void)bytes, (void)align, (void)s;
    driver_state.stray += top() != other(0);
    return (void *)4096;
}
static void note_free(void *user, void *p, size_t bytes, fattn_stream s) {
    (void)user, (void)p, (void)bytes, (void)s;
    driver_state.stray += top() != other(0);
}

fattn_ctx context_of(int arch) {
    driver.context = other(0);
    return (fattn_ctx){.device = FATTN_CUDA,
                       .ops = fattni_device_ops_of(FATTN_CUDA),
                       .gpu = {.arch = arch,
                               .sms = 132,
                               .all_sms = 132,
                               .l2_bytes = (size_t)50 << 20,
                               .shared_limit = 232448,
                               .driver = &driver},
                       .allocator = {note_alloc, note_free, NULL}};
}
