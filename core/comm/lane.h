/* How ranks that are threads of one process copy from each other, for one kind of device: a table each in lane_cpu.c
   and lane_cuda.c. A lane has FATTNI_LANE_SLOTS slots, one for each exchange that is open. */
#ifndef FATTNI_CORE_COMM_LANE_H
#define FATTNI_CORE_COMM_LANE_H

#include "core/base/device.h"

enum { FATTNI_LANE_SLOTS = 8 };

typedef struct fattni_lane {
    fattn_ctx *ctx;
    void *state; /* the device's; NULL on the CPU */
} fattni_lane;

typedef struct fattni_lane_ops {
    fattn_status (*open)(fattni_lane *l);
    void (*close)(fattni_lane *l);
    bool (*linked)(const fattni_lane *l); /* its device to all others of this process by links of their own */
    /* What is enqueued on the context's stream so far comes before the slot's copies and before the peers'. Copies of
       slots that have begun before do not wait for it. */
    fattn_status (*begin)(fattni_lane *l, int slot);
    /* The copies from now on are the slot's, of a peer, which has begun its exchange in its slot. */
    fattn_status (*await)(fattni_lane *l, int slot, const fattni_lane *from, int from_slot);
    /* dst[i] here = src[i] there, i < n: of equal shapes, at most 4 dimensions, and dtypes, not empty. */
    fattn_status (*copy)(fattni_lane *l, const fattn_tensor *dst, const fattni_lane *from, const fattn_tensor *src,
                         int n, bool exposed);
    /* After the slot's copies. */
    fattn_status (*end)(fattni_lane *l, int slot);
    /* What is enqueued from now on runs after the copies of a lane, perhaps this one, which has ended that slot's, and
       after its copies before. */
    fattn_status (*follow)(fattni_lane *l, const fattni_lane *reader, int reader_slot);
} fattni_lane_ops;

const fattni_lane_ops *fattni_lane_ops_of(fattn_device device);

#endif
