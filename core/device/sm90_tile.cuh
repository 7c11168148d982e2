/* 16-bit tiles in shared memory as wgmma and the TMA unit know them: panels of 64 columns, [rows][64]
   each, 128-byte swizzle: the chunk of 16 bytes at column c of row r lies at chunk (c/8) ^ (r%8).
   Tiles start at multiples of 1024. Include after defining K_BF16. */
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

/* The matrix descriptor of an operand (PTX ISA, "wgmma matrix descriptor"): 128-byte swizzle, eight rows
   every 1024 bytes. `panel` is the stride of panels in bytes, for operands whose N dimension is
   contiguous and crosses panels. Adding bytes/16 to it moves the operand. */
DEVICE uint64_t operand(uint32_t address, uint32_t panel) {
    const uint32_t low = ((address & 0x3FFFF) >> 4) | (panel >> 4) << 16;
    return (uint64_t)(1024 >> 4 | 1u << 30) << 32 | low;
}
/* Steps of 16 along an operand, in the descriptor's units. `rows` of its tile. */
DEVICE uint32_t along_columns(int step, int rows) {
    return (uint32_t)((step / 4) * (rows * 8) + (step % 4) * 2);
}
DEVICE uint32_t along_rows(int step) { return (uint32_t)step * 128; }

/* Tile `number` of the call: its (b, h) and which of that plane's blocks it is. Causal: block 0 is to be the
   heaviest; heads are taken in sections, and within one they vary fastest. */
typedef struct position {
    int plane, block;
} position;
DEVICE position position_of(const fattni_sm90_args *p, int heads, int number, int causal) {
    if (!causal) {
        const position at = {number / p->blocks, number % p->blocks};
        return at;
    }
    const int whole = p->section * p->blocks, section = number / whole, rest = number % whole;
    const int here = min(p->section, p->a.B * heads - section * p->section);
    const position at = {section * p->section + rest % here, rest / here};
    return at;
}

/* Producer warps: all lanes take part, so that the compiler knows a copy's operands to be the same in all of
   them, and lane 0 issues it. Few instructions: the consumers' warps of the same scheduler wait for each. */
DEVICE int is_leader(void) { return threadIdx.x % 32 == 0; }
DEVICE int of_leader(int x) { return __shfl_sync(ALL_LANES, x, 0); }

/* Each warp arrives once; not behind a branch, where FATTN_DELAYS would let lane 0 alone pause, so that the warp
   comes to its next product in parts. */
DEVICE void release(uint32_t bar) { mbarrier_arrive_if(bar, is_leader()); }

/* Rows [row, row + rows) of one (head, batch), all panels, counting on `bar`. */
DEVICE void load_panels(uint32_t to, const CUtensorMap *map, uint32_t bar, int panels, int rows, int row,
                        int head, int batch) {
    for (int x = 0; x < panels; ++x) tma_load(to + x * rows * 128, map, bar, 64 * x, row, head, batch);
}

/* Rows [from, rows) of a tile that has arrived become 0, by 16 bytes of each of `threads` threads: beyond
   a sequence's end its buffer may hold anything, and 0 times that need not be 0. A barrier of these threads
   must follow before wgmma reads the tile. */
DEVICE void clear_rows(uint32_t tile, int panels, int rows, int from, int thread, int threads) {
    const float zero[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int x = 0; x < panels; ++x)
        for (int at = from * 128 + thread * 16; at < rows * 128; at += threads * 16)
            store_shared_4(tile + x * rows * 128 + at, zero);
    async_proxy_fence();
}

#endif
