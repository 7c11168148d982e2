/* Which block of rows or keys, of which plane (b, h), is number n of a call. */
#ifndef FATTNI_CORE_DEVICE_PLANE_BLOCK_H
#define FATTNI_CORE_DEVICE_PLANE_BLOCK_H

#include "core/device/helpers.cuh"

/* Each plane has `blocks`. Planes follow each other, or at_once of them are taken together: first block 0 of each, then
   block 1 of each, ... Callers make block 0 the longest below a diagonal. The last planes may be fewer. */
typedef struct plane_block {
    int plane, block;
} plane_block;
DEVICE plane_block plane_block_of(unsigned number, unsigned blocks, unsigned planes, unsigned at_once) {
    unsigned plane = number / blocks, block = number - plane * blocks;
    if (at_once > 1) {
        const unsigned first = number / (at_once * blocks) * at_once, rest = number - first * blocks,
                       count = min(at_once, planes - first);
        block = rest / count, plane = first + (rest - block * count);
    }
    const plane_block at = {(int)plane, (int)block};
    return at;
}

#endif
