/* What each row of dS sums to in 16-bit calls with a softcap, where keys have a mean, as bwd_capped_sums.cuh has
   it, for calls whose main kernel is Hopper's: TMA, wgmma, and tensor maps of that kernel.

   CTAs        one per row block of one (sequence, head); where keys have no mean it reads that and ends.
   Threads     warpgroup 0 loads, by one thread. Two consumer warpgroups own 64 rows each and all keys of a block: the
               exponentials of one overlap the products of the other.
   Shared      struct shared_memory. K and V have STAGES stages each.

   Instances: bwd_kernels.def. Macros in: cmake/instance.cu.in. */
#include "core/device/describe.cuh"
#include "bwd/cuda/bwd_args.h"
#include "core/device/sm90_tile.cuh"
#include "core/ptx/grid.h"

enum {
    D = K_D,
    DV = K_DV,
    BM = K_BM,
    BN = K_BN,
    THREADS = 32 * K_WARPS,
    THREADS_OF_S = THREADS - 128,
    ROW_TILES = 1,
    ROW_BOX = D > 64 ? 64 : 128, /* rows of the maps of Q and dO; those of K and V have BN */
    PANELS = (D + 63) / 64,
    V_PANELS = (DV + 63) / 64,
    KEY_BYTES = BN * PANELS * 128,
    VALUE_BYTES = BN * V_PANELS * 128,
    STAGES = D > 192 ? 1 : 2,
    LOADER_REGISTERS = 24,
    CONSUMER_REGISTERS = 240
};
static_assert(BM == 128 && K_WARPS == 12 && BN == (D > 128 ? 64 : 128), "two consumers of 64 rows; boxes of the maps");

#include "bwd/cuda/rows/bwd_capped_sums16.cuh"

typedef struct shared_memory {
    half_type q[BM * PANELS * 64], d_o[BM * V_PANELS * 64];
    half_type k[STAGES][BN * PANELS * 64], v[STAGES][BN * V_PANELS * 64];
    row_statistics rows; /* L in units of log2 */
    uint64_t q_full, d_o_full, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
} shared_memory;
enum { SHARED_BYTES = sizeof(shared_memory) };
static_assert(SHARED_BYTES <= 227 * 1024, "shared memory");
enum { ROWS_READY = 1 }; /* a named barrier of the consumers */

DEVICE void init_barriers(uint32_t shared) {
    if (threadIdx.x == 0) {
        mbarrier_init(MEMBER_ADDRESS(shared, q_full), 1);
        mbarrier_init(MEMBER_ADDRESS(shared, d_o_full), 1);
        for (int n = 0; n < STAGES; ++n) {
            mbarrier_init(ELEMENT_ADDRESS(shared, k_full, n), 1);
            mbarrier_init(ELEMENT_ADDRESS(shared, v_full, n), 1);
            mbarrier_init(ELEMENT_ADDRESS(shared, k_empty, n), THREADS_OF_S / 32);
            mbarrier_init(ELEMENT_ADDRESS(shared, v_empty, n), THREADS_OF_S / 32);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
}

/* Rows of Q or dO, in boxes of ROW_BOX. */
DEVICE void load_rows(uint32_t to, const CUtensorMap *map, uint32_t bar, int panels, int row, int head, int batch) {
    mbarrier_expect(bar, BM * panels * 128);
    for (int x = 0; x < panels; ++x)
        for (int first = 0; first < BM; first += ROW_BOX)
            tma_load(to + (x * BM + first) * 128, map, bar, 64 * x, row + first, head, batch);
}

/* One thread: all tiles of a row block. */
DEVICE void produce(const fattni_bwd_sm90_args *p, const row_block_of_cta *at, uint32_t shared) {
    const int batch = at->s.batch, row = at->s.q0 + at->i0;
    load_rows(MEMBER_ADDRESS(shared, q), &p->q, MEMBER_ADDRESS(shared, q_full), PANELS, row, at->h * p->q_step.head,
              batch * p->q_step.batch);
    load_rows(MEMBER_ADDRESS(shared, d_o), &p->d_o, MEMBER_ADDRESS(shared, d_o_full), V_PANELS, row,
              at->h * p->d_o_step.head, batch * p->d_o_step.batch);
    int n = 0;
    for (int j0 = at->keys.begin / BN * BN; j0 < at->keys.end; j0 += BN, ++n) {
        const int stage = n % STAGES, key = at->s.k0 + j0;
        const uint32_t empty = (uint32_t)(n / STAGES & 1) ^ 1, k_full = ELEMENT_ADDRESS(shared, k_full, stage),
                       v_full = ELEMENT_ADDRESS(shared, v_full, stage);
        mbarrier_wait(ELEMENT_ADDRESS(shared, k_empty, stage), empty);
        mbarrier_expect(k_full, KEY_BYTES);
        load_panels(ELEMENT_ADDRESS(shared, k, stage), &p->k, k_full, PANELS, BN, key, at->hk * p->k_step.head,
                    batch * p->k_step.batch);
        mbarrier_wait(ELEMENT_ADDRESS(shared, v_empty, stage), empty);
        mbarrier_expect(v_full, VALUE_BYTES);
        load_panels(ELEMENT_ADDRESS(shared, v, stage), &p->v, v_full, V_PANELS, BN, key, at->hk * p->v_step.head,
                    batch * p->v_step.batch);
    }
}

/* x = A B^T: 64 rows x BN keys, over `depth` columns. */
DEVICE void rows_by_keys(float *x, int depth, uint64_t rows, uint64_t keys) {
#pragma unroll
    for (int e = 0; e < depth / 16; ++e)
        if (e == 0)
            PASTE(wgmma_ss_new_n, K_BN)(x, rows, keys);
        else
            PASTE(wgmma_ss_n, K_BN)(x, rows + advance_columns(e, BM), keys + advance_columns(e, BN), 1);
}

DEVICE void consume(const fattni_bwd_args *bwd, const row_block_of_cta *at, uint32_t shared, row_statistics *rows) {
    const fattni_attention_args *const a = &bwd->a;
    const uint32_t half = (uint32_t)warp_row() / 64 * (64 * 128);
    const uint64_t q = operand_descriptor(MEMBER_ADDRESS(shared, q) + half, 0),
                   d_o = operand_descriptor(MEMBER_ADDRESS(shared, d_o) + half, 0);
    find_statistics(bwd, &at->s, rows, at->h, at->i0);
    named_barrier_sync(ROWS_READY, THREADS_OF_S);
    row_sums sums = {};
    int n = 0;
    mbarrier_wait(MEMBER_ADDRESS(shared, q_full), 0);
    mbarrier_wait(MEMBER_ADDRESS(shared, d_o_full), 0);
    for (int j0 = at->keys.begin / BN * BN; j0 < at->keys.end; j0 += BN, ++n) {
        const int stage = n % STAGES;
        const uint32_t full = (uint32_t)(n / STAGES & 1);
        tile_part tanhs, dp;
        mbarrier_wait(ELEMENT_ADDRESS(shared, k_full, stage), full);
        wgmma_fence();
        rows_by_keys(tanhs[0][0], D, q, operand_descriptor(ELEMENT_ADDRESS(shared, k, stage), 0));
        wgmma_commit();
        mbarrier_wait(ELEMENT_ADDRESS(shared, v_full, stage), full);
        rows_by_keys(dp[0][0], DV, d_o, operand_descriptor(ELEMENT_ADDRESS(shared, v, stage), 0));
        wgmma_commit();
        wgmma_wait(1);
        PIN(tanhs[0][0], BN / 2);
        arrive_once_per_warp(ELEMENT_ADDRESS(shared, k_empty, stage));
        apply_cap(tanhs, a);
        wgmma_wait(0);
        PIN(dp[0][0], BN / 2);
        arrive_once_per_warp(ELEMENT_ADDRESS(shared, v_empty, stage));
        add_sums(sums, tanhs, dp, a, &at->s, rows, at->b, at->h, at->i0, j0);
    }
    store_sums(sums, rows);
    named_barrier_sync(ROWS_READY, THREADS_OF_S);
    store_row_block(bwd, &at->s, rows, at->b, at->h, at->i0);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) K_NAME(const __grid_constant__ fattni_bwd_sm90_args p) {
    begin_grid();
    extern __shared__ __align__(1024) unsigned char SHARED_MEMORY[];
    const uint32_t shared = shared_address(SHARED_MEMORY);
    row_block_of_cta at;
    if (!find_row_block(&p.bwd, &at)) return;
    init_barriers(shared);
    if (__shfl_sync(ALL_LANES, (int)threadIdx.x / 128, 0) == 0) {
        registers_lower((int)LOADER_REGISTERS);
        if (threadIdx.x == 0) produce(&p, &at, shared);
    } else {
        registers_raise((int)CONSUMER_REGISTERS);
        consume(&p.bwd, &at, shared, &((shared_memory *)SHARED_MEMORY)->rows);
    }
}

DESCRIBE_KERNEL_THAT_WAITS(fattni_bwd_sm90_args, SHARED_BYTES, 1);
