/* Lanes on the CPU: a copy is done when the call returns, nothing is enqueued. And the list of lanes. */
#include "core/base/with_cuda.h"
#include "core/comm/lane.h"
#include "core/tensor/host.h"

static fattn_status open_lane(fattni_lane *l) {
    (void)l;
    return FATTN_OK;
}

static void close_lane(fattni_lane *l) { (void)l; }

static bool linked(const fattni_lane *l) {
    (void)l;
    return false;
}

static fattn_status at_slot(fattni_lane *l, int slot) {
    (void)l, (void)slot;
    return FATTN_OK;
}

static fattn_status await(fattni_lane *l, int slot, const fattni_lane *from, int from_slot) {
    (void)l, (void)slot, (void)from, (void)from_slot;
    return FATTN_OK;
}

static fattn_status copy(fattni_lane *l, const fattn_tensor *dst, const fattni_lane *from, const fattn_tensor *src,
                         int n, bool exposed) {
    (void)from, (void)exposed;
    for (int i = 0; i < n; ++i)
        if (dst[i].data != src[i].data) /* a message to oneself may stay where it is */
            FATTNI_TRY(fattni_host_copy(l->ctx, &dst[i], &src[i]));
    return FATTN_OK;
}

static fattn_status follow(fattni_lane *l, const fattni_lane *reader, int reader_slot) {
    (void)l, (void)reader, (void)reader_slot;
    return FATTN_OK;
}

static const fattni_lane_ops fattni_cpu_lane = {open_lane, close_lane, linked, at_slot, await, copy, at_slot, follow};
extern const fattni_lane_ops fattni_cuda_lane;

static const fattni_lane_ops *const lanes[] = {[FATTN_CPU] = &fattni_cpu_lane,
                                               FATTNI_WITH_CUDA([FATTN_CUDA] = &fattni_cuda_lane)};

const fattni_lane_ops *fattni_lane_ops_of(fattn_device device) { return lanes[device]; }
