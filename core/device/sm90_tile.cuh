/* 16-bit tiles in shared memory in the layout of wgmma and TMA: panels of 64 columns, [rows][64] each, with the
   128-byte swizzle: chunk c of 16 bytes of row r lies at chunk c ^ (r%8) (swizzled_chunk). Tiles start at multiples of
   1024. Include after defining K_BF16. */
#ifndef FATTNI_CORE_DEVICE_SM90_TILE_H
#define FATTNI_CORE_DEVICE_SM90_TILE_H

#include "core/device/sequence.cuh"
#include "core/device/half_types.cuh"
#include "core/ptx/ldmatrix.h"
#include "core/ptx/mbarrier.h"
#include "core/ptx/shared.h"
#include "core/ptx/stmatrix.h"
#include "core/ptx/tma.h"
#include "core/ptx/wgmma.h"
#include "core/device/quad.cuh"
#include "core/cuda/sm90_args.h"

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)

/* The matrix descriptor of an operand (PTX ISA, "wgmma matrix descriptor"): 128-byte swizzle, 1024 bytes from eight
   rows to the next eight (stride byte offset). `panel`: bytes from one panel to the next (leading byte offset), for
   MN-major operands that are wider than a panel. Adding n to the descriptor moves the operand by 16 n bytes. */
DEVICE uint64_t operand_descriptor(uint32_t address, uint32_t panel) {
    const uint32_t low = ((address & 0x3FFFF) >> 4) | (panel >> 4) << 16;
    return (uint64_t)(1024 >> 4 | 1u << 30) << 32 | low;
}
/* The same of a K-major operand whose rows have 128, 64 or 32 bytes, with the swizzle of that size. */
DEVICE uint64_t row_descriptor(uint32_t address, int row) {
    const uint32_t mode = row == 128 ? 1 : row == 64 ? 2 : 3;
    return (uint64_t)(8u * (uint32_t)row >> 4 | mode << 30) << 32 | (address & 0x3FFFF) >> 4;
}
/* 16 `step` columns, or rows, further in an operand, in the descriptor's units. `rows` of its tile. */
DEVICE uint32_t advance_columns(int step, int rows) { return (uint32_t)((step / 4) * (rows * 8) + (step % 4) * 2); }
DEVICE uint32_t advance_rows(int step) { return (uint32_t)step * 128; }

/* Tile `number` of the persistent schedule: its plane (b, h) and its block in that. Causal: by rising block, so callers
   make block 0 the longest; planes in groups of head_group, varying fastest within a group. */
typedef struct position {
    int plane, block;
} position;
DEVICE position position_of(const fattni_sm90_schedule *p, int number, int causal) {
    if (!causal) {
        const position at = {number / p->blocks, number % p->blocks};
        return at;
    }
    const int tiles_of_group = p->head_group * p->blocks, group = number / tiles_of_group,
              rest = number % tiles_of_group;
    const int planes = min(p->head_group, p->planes - group * p->head_group); /* fewer in the last group */
    const position at = {group * p->head_group + rest % planes, rest / planes};
    return at;
}

/* In producer warps all lanes compute a copy's operands, so that the compiler knows they are the same in the whole
   warp, and lane 0 issues it. Few instructions: they take issue slots of the consumer warps of the same scheduler. */
DEVICE int is_leader(void) { return threadIdx.x % 32 == 0; }
DEVICE int from_leader(int x) { return __shfl_sync(ALL_LANES, x, 0); }

/* One arrival per warp. Without a branch: behind one, FATTN_DELAYS would delay lane 0 alone, and the warp would reach
   its next product divergent. */
DEVICE void arrive_once_per_warp(uint32_t bar) { mbarrier_arrive_if(bar, is_leader()); }

/* Rows [row, row + rows) of one (head, batch), all panels; their bytes count on mbarrier `bar`. */
DEVICE void load_panels(uint32_t to, const CUtensorMap *map, uint32_t bar, int panels, int rows, int row, int head,
                        int batch) {
    for (int x = 0; x < panels; ++x) tma_load(to + x * rows * 128, map, bar, 64 * x, row, head, batch);
}

/* Zeros into rows [from, rows) of a tile that has been loaded, 16 bytes at a time by each of `threads` threads: beyond
   a sequence's end its buffer may hold anything, and 0 times that need not be 0. These threads must meet at a barrier
   before wgmma reads the tile. */
DEVICE void clear_rows(uint32_t tile, int panels, int rows, int from, int thread, int threads) {
    const float zero[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int x = 0; x < panels; ++x)
        for (int at = from * 128 + thread * 16; at < rows * 128; at += threads * 16)
            store_same_4(tile + x * rows * 128 + at, zero); /* each consumer for itself */
    async_proxy_fence();
}

#endif
