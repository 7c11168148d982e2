/* Stand-ins for core/ptx/ on the host, with the same names and meanings. Most take effect at once; copies
   between CTAs, TMA stores and products of two operands in shared memory take effect as late as they may. So this finds
   wrong layouts, wrong counts of barriers and everything between the wrappers; missing fences and waits with races.h.
   Include before the kernel: it defines the include guards of the real wrappers. */
#ifndef EMULATED_PTX_H
#define EMULATED_PTX_H

#include "machine.h"

#include <cuda.h>

#include <deque>
#include <vector>

#ifndef EMULATED_F16
#define EMULATED_F16 0
#endif

#define FATTNI_CORE_PTX_ACQUIRE_H
#define FATTNI_CORE_PTX_AFTER_LOADS_H
#define FATTNI_CORE_PTX_CLOCK_H
#define FATTNI_CORE_PTX_CLUSTER_BARRIER_H
#define FATTNI_CORE_PTX_CLUSTER_H
#define FATTNI_CORE_PTX_COMPARE_H
#define FATTNI_CORE_PTX_F8_H
#define FATTNI_CORE_PTX_GLOBAL_H
#define FATTNI_CORE_PTX_GRID_H
#define FATTNI_CORE_PTX_LDMATRIX_H
#define FATTNI_CORE_PTX_LOAD_ONCE_H
#define FATTNI_CORE_PTX_MBARRIER_H
#define FATTNI_CORE_PTX_MMA_H
#define FATTNI_CORE_PTX_PERMUTE_H
#define FATTNI_CORE_PTX_RELAXED_H
#ifdef EMULATED_SM75
#define FATTNI_SM80 0
#else
#define FATTNI_SM80 1
#endif
#define FATTNI_CORE_PTX_SHARED_H
#define FATTNI_CORE_PTX_SM_COUNT_H
#define FATTNI_CORE_PTX_STMATRIX_H
#define FATTNI_CORE_PTX_STORE_ASYNC_H
#define FATTNI_CORE_PTX_THREAD_H
#define FATTNI_CORE_PTX_TMA_H
#define FATTNI_CORE_PTX_WGMMA_H

#if EMULATED_F16
/* A table: a conversion takes longer than the product that it is for. */
static const struct float_of_f16 {
    std::vector<float> of;
    float_of_f16() {
        for (uint32_t n = 0; n < 65536; ++n) {
            const uint16_t bits = (uint16_t)n;
            __half x;
            memcpy(&x, &bits, 2);
            of.push_back(__half2float(x));
        }
    }
} float_of_f16;
#endif
/* The 16-bit type of the kernel: BF16, or F16 with EMULATED_F16. */
static inline UNSEEN float value_of(uint16_t bits) {
#if EMULATED_F16
    return float_of_f16.of[bits];
#else
    const uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, 4);
    return x;
#endif
}
typedef struct words {
    uint32_t x[4];
} words;
/* ---- compare, permute ---- */

static inline uint32_t not_below_2(uint32_t x, uint32_t y) {
    uint32_t mask = 0;
    for (int n = 0; n < 32; n += 16) { /* bits of F16's |x| in their order; NaN are the largest */
        const uint32_t size = x >> n & 0x7fff, than = y >> n & 0xffff;
        if (than > 0x7c00) machine_fail("a bound that is NaN or negative");
        if (size >= than) mask |= 0xffffu << n;
    }
    return mask;
}

static inline uint32_t permute(uint32_t x, uint32_t y, uint32_t selector) {
    const uint64_t both = (uint64_t)y << 32 | x;
    uint32_t z = 0;
    for (int n = 0; n < 4; ++n) {
        const uint32_t nibble = selector >> 4 * n & 15, byte = (uint32_t)(both >> 8 * (nibble & 7) & 0xff);
        z |= (nibble < 8 ? byte : byte >> 7 ? 0xffu : 0u) << 8 * n;
    }
    return z;
}

typedef uint16_t __attribute__((may_alias)) half_bits;
static inline UNSEEN uint16_t half_at(uint32_t at) { return *(const half_bits *)(memory + at); } /* of shared memory */
static inline uint16_t half_of(uint32_t pair, int high) { return (uint16_t)(high ? pair >> 16 : pair); }

/* ---- acquire, global, ldmatrix, mma ---- */

static inline void grid_dependency_wait(void) {}
static inline void grid_dependents_start(void) {}
static inline void begin_grid(void) {}
static inline void store_global_2_if(void *to, uint2 x, int condition) {
    if ((uintptr_t)to % 8 && condition) machine_fail("a store is not aligned to 8 bytes");
    if (condition) memcpy(to, &x, 8);
}
static inline void store_global_4_if(void *to, const uint32_t x[4], int condition) {
    if (condition) memcpy(to, x, 16);
}
static inline void load_once_4(uint32_t x[4], const void *from) {
    if ((uintptr_t)from % 16) machine_fail("a load is not aligned to 16 bytes");
    memcpy(x, from, 16);
}
static inline void prefetch_line(const void *) {}
static inline void grid_dependency_wait_after(uint64_t) {}
static inline int load_relaxed_integer(const int32_t *p) { return load_atomic(p); }
static inline float load_relaxed(const float *p) { return load_atomic(p); }
static inline float2 load_relaxed_2(const float *p) { return make_float2(load_atomic(p), load_atomic(p + 1)); }
static inline int load_acquire(const int32_t *p) {
    machine_yield();
    const int x = load_atomic(p);
    machine_acquire((machine_event *)p);
    return x;
}
static inline void add_release(int32_t *p, int x) {
    machine_release((machine_event *)p);
    add_atomic(p, x);
}

static inline uint32_t shared_address(const void *p) { return (uint32_t)((const unsigned char *)p - memory); }
static inline void *shared_pointer(uint32_t address) { return memory + address; }

static inline uint32_t pack_bf16(float low, float high) {
    const __nv_bfloat16 x[2] = {__float2bfloat16_rn(low), __float2bfloat16_rn(high)};
    uint32_t pair;
    memcpy(&pair, x, 4);
    return pair;
}
static inline uint32_t pack_f16(float low, float high) {
    const __half x[2] = {__float2half_rn(low), __float2half_rn(high)};
    uint32_t pair;
    memcpy(&pair, x, 4);
    return pair;
}
static inline uint32_t pack_e4m3(float x0, float x1, float x2, float x3) {
    const float x[4] = {x0, x1, x2, x3};
    uint32_t codes = 0;
    for (int n = 0; n < 4; ++n) codes |= (uint32_t)__nv_cvt_float_to_fp8(x[n], __NV_SATFINITE, __NV_E4M3) << 8 * n;
    return codes;
}
static inline void unpack_e4m3(float x[4], uint32_t codes) {
    for (int n = 0; n < 4; ++n) x[n] = __half2float(__nv_cvt_fp8_to_halfraw((uint8_t)(codes >> 8 * n), __NV_E4M3));
}
static inline uint32_t pack_half(float low, float high) {
    return EMULATED_F16 ? pack_f16(low, high) : pack_bf16(low, high);
}
static inline void mma_half(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
    const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
    float(*const left)[16] = (float(*)[16])machine_warp_buffer(), (*const right)[16] = left + 16; /* [row], [column] */
    for (int k = 0; k < 2; ++k) {
        for (int high = 0; high < 2; ++high) {
            left[g][8 * high + 2 * t + k] = value_of(half_of(a[2 * high], k));
            left[g + 8][8 * high + 2 * t + k] = value_of(half_of(a[2 * high + 1], k));
            right[g][8 * high + 2 * t + k] = value_of(half_of(high ? b1 : b0, k));
        }
    }
    machine_meet_warp();
    for (int k = 0; k < 16; ++k)
        for (int e = 0; e < 4; ++e) d[e] += left[g + e / 2 * 8][k] * right[2 * t + e % 2][k];
}
static inline void mma_bf16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) { mma_half(d, a, b0, b1); }
static inline void mma_f16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) { mma_half(d, a, b0, b1); }
static inline void keep_rounded(float *) {}
static inline float exp2_approx(float x) { return exp2f(x); }
static inline float reciprocal_approx(float x) { return 1 / x; }
static inline float log2_approx(float x) { return log2f(x); }
static inline void reduce_add(float *p, float x) { add_atomic(p, x); }
static inline void reduce_add_4(float *p, const float x[4]) {
    for (int e = 0; e < 4; ++e) add_atomic(p + e, x[e]);
}

static inline uint32_t sm_count(void) { return 1; }
static inline int reload_thread_index(void) { return (int)threadIdx.x; }

static inline UNSEEN uint32_t clock_now(void) {
    static uint32_t cycles;
    return cycles += 1000;
}

/* ---- mbarrier: {count, pending arrivals, phase, words of 4 bytes} in the barrier's eight bytes ---- */

typedef struct mbarrier {
    uint16_t count, pending;
    int8_t phase, reserved;
    int16_t words;
} mbarrier;

static inline mbarrier *mbarrier_at(uint32_t bar) { return (mbarrier *)(memory + bar); }
/* The end of a phase with this parity; that of a counter is at its address, too (add_release). */
static_assert(2 * sizeof(machine_event) <= sizeof(mbarrier) && sizeof(machine_event) <= sizeof(int32_t), "they fit");
static inline machine_event *end_of_phase(mbarrier *b, uint32_t parity) { return (machine_event *)b + (parity & 1); }
static inline UNSEEN void mbarrier_settle(mbarrier *b) {
    if (b->pending || b->words) return;
    b->pending = b->count;
    b->phase ^= 1;
}
static inline UNSEEN void mbarrier_init(uint32_t bar, int arrivals) {
    const mbarrier fresh = {(uint16_t)arrivals, (uint16_t)arrivals, 0, 0, 0};
    *mbarrier_at(bar) = fresh;
}
static inline void mbarrier_init_fence(void) {}
static inline UNSEEN void mbarrier_add(mbarrier *b, int bytes) {
    const int words = b->words + bytes / 4;
    if (bytes % 4 || words != (int16_t)words) machine_fail("an mbarrier here does not count so many bytes");
    b->words = (int16_t)words;
}
static inline UNSEEN void mbarrier_arrive_at(mbarrier *b, int bytes) {
    if (b->pending == 0) machine_fail("more arrivals than an mbarrier expects");
    machine_release(end_of_phase(b, b->phase));
    --b->pending;
    mbarrier_add(b, bytes);
    mbarrier_settle(b);
}
static inline void mbarrier_expect(uint32_t bar, int bytes) {
    if (bytes < 0) machine_fail("an mbarrier does not count such bytes");
    mbarrier_arrive_at(mbarrier_at(bar), bytes);
}
static inline void mbarrier_arrive(uint32_t bar) { mbarrier_expect(bar, 0); }
static inline void mbarrier_arrive_if(uint32_t bar, int condition) {
    if (condition) mbarrier_arrive(bar);
}
static inline UNSEEN int mbarrier_test(uint32_t bar, uint32_t parity) {
    const int complete = mbarrier_at(bar)->phase != (int)parity;
    if (complete) machine_acquire(end_of_phase(mbarrier_at(bar), parity));
    if (!complete) machine_yield(); /* who asks again lets others run */
    return complete;
}
static inline void cp_async_arrive(uint32_t bar) { /* at once: the copies are complete, too */
    finish_copies();
    mbarrier_arrive(bar);
}
static inline void mbarrier_wait(uint32_t bar, uint32_t parity) {
    machine_wait(&mbarrier_at(bar)->phase, (int8_t)parity);
    machine_acquire(end_of_phase(mbarrier_at(bar), parity));
}
static inline UNSEEN void mbarrier_complete(void *bar, int bytes) {
    machine_release(end_of_phase((mbarrier *)bar, (uint32_t)((mbarrier *)bar)->phase));
    mbarrier_add((mbarrier *)bar, -bytes);
    mbarrier_settle((mbarrier *)bar);
}
static inline void named_barrier_sync(int id, int threads) { machine_meet(id, threads); }
static inline void named_barrier_arrive(int id, int threads) { machine_arrive(id, threads); }

/* ---- clusters: the high byte of a cluster address is the CTA's rank ---- */

static inline void cluster_sync(void) { machine_meet_cluster(); }
static inline void cluster_arrive_started(void) {} /* threads that do not wait have ended */
static inline void cluster_wait_started(void) { machine_meet_cluster(); }
static inline uint32_t cluster_address(uint32_t address, uint32_t rank) { return address | rank << 24; }
static inline const void *cluster_pointer(const void *p, uint32_t rank) {
    return machine_memory((int)rank) + ((const unsigned char *)p - memory);
}
static inline unsigned char *cluster_at(uint32_t address) {
    return machine_memory((int)(address >> 24)) + (address & 0xffffff);
}
static inline void cluster_arrive(uint32_t bar) { mbarrier_arrive_at((mbarrier *)cluster_at(bar), 0); }
static inline void cluster_copy(uint32_t to, uint32_t from, int bytes, uint32_t bar) {
    if ((to | from | (uint32_t)bytes) % 16) machine_fail("a copy between CTAs is not aligned to 16 bytes");
    unsigned char *const target = cluster_at(to), *const source = memory + from, *const full = cluster_at(bar);
    machine_proxy_reads(OF_SHARED, source, (size_t)bytes);
    machine_later([=] {
        memcpy(target, source, (size_t)bytes);
        mbarrier_complete(full, bytes);
    });
}

static inline void store_async_bytes(uint32_t to, const void *from, size_t bytes, uint32_t bar) {
    unsigned char *const target = cluster_at(to), *const full = cluster_at(bar);
    std::vector<unsigned char> copy((const unsigned char *)from, (const unsigned char *)from + bytes);
    machine_later([=] {
        memcpy(target, copy.data(), bytes);
        mbarrier_complete(full, (int)bytes);
    });
}
static inline void store_async(uint32_t to, float x, uint32_t bar) { store_async_bytes(to, &x, sizeof x, bar); }
static inline void store_async_4(uint32_t to, float4 x, uint32_t bar) {
    if (to % 16) machine_fail("a store to another CTA is not aligned to 16 bytes");
    store_async_bytes(to, &x, sizeof x, bar);
}

static inline uint32_t after_load(uint32_t address, uint32_t) { return address; }

/* ---- TMA: a tensor map here is its description ---- */

typedef struct plain_map {
    const char *base;
    int64_t columns, rows, heads, batches, row_bytes, head_bytes, batch_bytes, box;
    int64_t codes; /* columns of a box of bytes: 32, 64 or 128; 0: 64 columns of 16 bits */
} plain_map;
static_assert(sizeof(plain_map) <= sizeof(CUtensorMap), "a description fits");

/* The address of byte `at` of a tile whose rows have that many bytes under the swizzle of that size. */
static inline uint32_t swizzled_rows(uint32_t at, uint32_t row) { return at ^ (at >> 7 & (row / 16 - 1)) << 4; }
static inline uint32_t swizzled(uint32_t at) { return swizzled_rows(at, 128); }

/* 16 bytes of a row, of which `left` are there, or more, or none: zeros for the others. */
static inline UNSEEN void load_chunk(unsigned char *to, const char *from, int64_t left) {
    for (int n = 0; n < 16; ++n) to[n] = n < left ? (unsigned char)from[n] : 0;
    races_write(to);
    if (left >= 16) races_read(from);
}
static inline void tma_load(uint32_t to, const CUtensorMap *map, uint32_t bar, int column, int row, int head,
                            int batch) {
    plain_map m;
    memcpy(&m, map, sizeof m);
    const int bytes = m.codes ? (int)m.codes : 128, element = m.codes ? 1 : 2;
    if (to % (8 * (uint32_t)bytes)) machine_fail("a swizzled box does not start at a multiple of eight of its rows");
    unsigned char *const tiles = memory;
    machine_proxy_reads(OF_SHARED, tiles + to,
                        (size_t)m.box * (size_t)bytes); /* for who has written there without a fence */
    machine_later([=] {
        for (int r = 0; r < m.box; ++r) {
            const int inside = row + r < m.rows && head < m.heads && batch < m.batches;
            const char *const from = m.base + (row + r) * m.row_bytes + head * m.head_bytes + batch * m.batch_bytes;
            for (int at = 0; at < bytes; at += 16)
                load_chunk(tiles + swizzled_rows(to + (uint32_t)(r * bytes + at), (uint32_t)bytes),
                           from + column * element + at, inside ? (m.columns - column) * element - at : 0);
        }
        mbarrier_complete(tiles + bar, (int)m.box * bytes);
    });
}
static inline void must_be_aligned(const void *global, uint32_t shared, int bytes) {
    if (((uintptr_t)global | shared | (uint32_t)bytes) % 16) machine_fail("a bulk copy is not aligned to 16 bytes");
}
static inline void bulk_load(uint32_t to, const void *from, int bytes, uint32_t bar) {
    must_be_aligned(from, to, bytes);
    machine_proxy_reads(OF_GLOBAL, from, (size_t)bytes);
    machine_proxy_reads(OF_SHARED, memory + to, (size_t)bytes);
    unsigned char *const target = memory + to, *const full = memory + bar;
    machine_later([=] {
        memcpy(target, from, (size_t)bytes);
        mbarrier_complete(full, bytes);
    });
}
static inline void tma_prefetch_map(const CUtensorMap *) {}
static inline void tma_prefetch(const CUtensorMap *, int, int, int, int) {}
static inline void tma_load_once(uint32_t to, const CUtensorMap *map, uint32_t bar, int column, int row, int head,
                                 int batch) {
    tma_load(to, map, bar, column, row, head, batch);
}
/* Shared memory that the copies of a thread read until it waits for them. */
typedef struct copied_bytes {
    uint32_t from;
    size_t bytes;
} copied_bytes;
static thread_local std::vector<copied_bytes> copied_by_thread[MOST_THREADS];
static inline void bulk_reads(uint32_t from, size_t bytes) {
    machine_proxy_reads(OF_SHARED, memory + from, bytes);
    copied_by_thread[threadIdx.x].push_back({from, bytes});
}
static inline UNSEEN void bulk_store(void *to, uint32_t from, int bytes) {
    must_be_aligned(to, from, bytes);
    bulk_reads(from, (size_t)bytes);
    machine_proxy_writes(OF_GLOBAL, to, (size_t)bytes);
    for (int n = 0; n < bytes; ++n) ((unsigned char *)to)[n] = memory[from + (uint32_t)n];
}
static inline UNSEEN void bulk_reduce_add(float *to, uint32_t from, int bytes) {
    must_be_aligned(to, from, bytes);
    bulk_reads(from, (size_t)bytes);
    machine_enter_proxy(OF_GLOBAL);
    for (int n = 0; n < bytes / 4; ++n) add_atomic(to + n, ((const float *)(memory + from))[n]);
    machine_leave_proxy();
}
/* A store takes place when its thread waits for it. */
typedef struct stored_box {
    plain_map map;
    uint32_t from;
    int column, row, head, batch;
} stored_box;
static thread_local std::vector<stored_box> stores_of_thread[MOST_THREADS]; /* of a CTA */
static inline void tma_store(const CUtensorMap *map, uint32_t from, int column, int row, int head, int batch) {
    stored_box box = {{}, from, column, row, head, batch};
    memcpy(&box.map, map, sizeof box.map);
    if (from % 1024) machine_fail("a swizzled box does not start at a multiple of 1024");
    bulk_reads(from, (size_t)box.map.box * 128);
    stores_of_thread[threadIdx.x].push_back(box);
}
static inline void tma_store_once(const CUtensorMap *map, uint32_t from, int column, int row, int head, int batch) {
    tma_store(map, from, column, row, head, batch);
}
static inline void bulk_commit(void) {}
static inline void bulk_wait_read(void) {
    for (const stored_box &s : stores_of_thread[threadIdx.x])
        for (int r = 0; r < s.map.box; ++r)
            for (int c = 0; c < 64; ++c)
                if (s.column + c < s.map.columns && s.row + r < s.map.rows && s.head < s.map.heads &&
                    s.batch < s.map.batches) {
                    const uint16_t x = half_at(swizzled(s.from + (uint32_t)(r * 128 + c * 2)));
                    memcpy((char *)s.map.base + (s.column + c) * 2 + (s.row + r) * s.map.row_bytes +
                               s.head * s.map.head_bytes + s.batch * s.map.batch_bytes,
                           &x, 2);
                }
    stores_of_thread[threadIdx.x].clear();
    for (const copied_bytes &x : copied_by_thread[threadIdx.x])
        machine_proxy_reads(OF_SHARED, memory + x.from, x.bytes);
    copied_by_thread[threadIdx.x].clear();
    machine_wait_for_proxies();
}
static inline void bulk_wait(void) { bulk_wait_read(); }
static inline void async_proxy_fence(void) { machine_fence_proxy(OF_SHARED); }
static inline void async_proxy_fence_global(void) { machine_fence_proxy(OF_GLOBAL); }

/* ---- shared, stmatrix ---- */

/* Element (i, j) of matrix m: lane 4 i + j/2, register m, half j%2; this lane stores row l%8 of
   matrix l/8. */
static inline void store_matrices(uint32_t address, const uint32_t r[4], int transposed) {
    const int lane = (int)threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
    const words *const all = machine_gather((const words *)r);
    uint16_t out[8];
    for (int c = 0; c < 8; ++c) {
        const int i = transposed ? c : row, j = transposed ? row : c;
        out[c] = half_of(all[4 * i + j / 2].x[matrix], j % 2);
    }
    memcpy(memory + address, out, 16);
    machine_meet_warp();
}
static inline void stmatrix_x4(uint32_t address, const uint32_t r[4]) { store_matrices(address, r, 0); }
static inline void stmatrix_x4_trans(uint32_t address, const uint32_t r[4]) { store_matrices(address, r, 1); }
/* The inverse of stmatrix_x4. */
static inline void ldmatrix_x4(uint32_t r[4], uint32_t address) {
    const int lane = (int)threadIdx.x % 32;
    const uint32_t *const all = machine_gather(&address);
    for (int m = 0; m < 4; ++m) memcpy(&r[m], memory + all[8 * m + lane / 4] + lane % 4 * 4, 4);
    machine_meet_warp();
}
static inline void ldmatrix_x4_trans(uint32_t r[4], uint32_t address) {
    const int lane = (int)threadIdx.x % 32;
    const uint32_t *const all = machine_gather(&address);
    for (int m = 0; m < 4; ++m) {
        uint16_t x[2];
        for (int e = 0; e < 2; ++e) memcpy(&x[e], memory + all[8 * m + lane % 4 * 2 + e] + lane / 4 * 2, 2);
        memcpy(&r[m], x, 4);
    }
    machine_meet_warp();
}
static inline void store_shared_4(uint32_t address, const float x[4]) { memcpy(memory + address, x, 16); }
static inline void store_shared_words(uint32_t address, const uint32_t x[4]) { memcpy(memory + address, x, 16); }
static inline uint32_t pack_s8(int low, int high, uint32_t above) {
    const int x = min(max(low, -128), 127), y = min(max(high, -128), 127);
    return above << 16 | (uint32_t)(y & 0xff) << 8 | (uint32_t)(x & 0xff);
}
static inline void store_shared_half(uint32_t address, uint16_t x) { memcpy(memory + address, &x, 2); }
static inline void store_shared_word(uint32_t address, uint32_t x) { memcpy(memory + address, &x, 4); }
/* Where another thread has stored the same it is as if this one had: what that one did comes before. */
static inline UNSEEN int is_same(const volatile void *at, const void *x, int words) {
    int same = 1;
    for (int n = 0; n < words; ++n) same &= ((const volatile uint32_t *)at)[n] == ((const uint32_t *)x)[n];
    if (same) races_acquire((void *)at);
    return same;
}
static inline void store_same(float *to, float x) {
    if (is_same(to, &x, 1)) return;
    *to = x;
    races_release(to);
}
static inline void store_same_integer(volatile int *to, int x) {
    if (is_same(to, &x, 1)) return;
    *to = x;
    races_release((void *)to);
}
static inline void store_same_4(uint32_t address, const float x[4]) {
    if (is_same(memory + address, x, 4)) return;
    store_shared_4(address, x);
    races_release(memory + address);
}
static inline uint32_t load_shared_word(uint32_t address) {
    uint32_t x;
    memcpy(&x, memory + address, 4);
    return x;
}
static inline void load_shared_4(uint32_t x[4], uint32_t address) { memcpy(x, memory + address, 16); }

/* ---- wgmma ---- */

/* Where a matrix descriptor's operand starts, and how far from there element (x, k) is before the swizzle, x along M or
   N: a sum of what x and what k add. */
static inline uint32_t operand_start(uint64_t descriptor) { return (uint32_t)(descriptor & 0x3fff) << 4; }
static inline uint32_t operand_offset(uint64_t descriptor, int x, int k, int mn_major) {
    const uint32_t panel = (uint32_t)(descriptor >> 16 & 0x3fff) << 4, rows8 = (uint32_t)(descriptor >> 32 & 0x3fff)
                                                                               << 4;
    const uint32_t row = (uint32_t)(mn_major ? k : x), column = (uint32_t)(mn_major ? x : k);
    return column / 64 * panel + row / 8 * rows8 + row % 8 * 128 + column % 64 * 2;
}
static inline UNSEEN float operand_element(uint32_t at) { return value_of(half_at(swizzled(at))); }
/* D (+)= A B, N columns; A from `registers` unless NULL. */
static inline UNSEEN void product(int N, float *d, uint64_t a, const uint32_t *registers, uint64_t b, int accumulate,
                                  int a_mn_major, int b_mn_major) {
    const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = (int)threadIdx.x / 32 % 4;
    float left[2][16];
    uint32_t right_of[16];
    for (int k = 0; k < 16; ++k) {
        right_of[k] = operand_start(b) + operand_offset(b, 0, k, b_mn_major);
        for (int half = 0; half < 2 && !registers; ++half)
            left[half][k] =
                operand_element(operand_start(a) + operand_offset(a, 16 * warp + g + 8 * half, k, a_mn_major));
    }
    if (registers) { /* register m: row g + 8 (m%2), columns 8 (m/2) + 2t, + 1 */
        const words *const all = machine_gather((const words *)registers);
        for (int m = 0; m < 4; ++m)
            for (int c = 0; c < 8; ++c)
                left[m % 2][8 * (m / 2) + c] = value_of(half_of(all[4 * g + c / 2].x[m], c % 2));
        machine_meet_warp();
    }
    for (int i = 0; i < N / 8; ++i)
        for (int e = 0; e < 2; ++e) {
            const uint32_t column = operand_offset(b, 8 * i + 2 * t + e, 0, b_mn_major);
            float x[2] = {accumulate ? d[4 * i + e] : 0.0f, accumulate ? d[4 * i + 2 + e] : 0.0f};
            for (int k = 0; k < 16; ++k) {
                const float right = operand_element(right_of[k] + column);
                x[0] += left[0][k] * right;
                x[1] += left[1][k] * right;
            }
            d[4 * i + e] = x[0];
            d[4 * i + 2 + e] = x[1];
        }
}
/* The same of codes, D (+)= A[64,32] B[32,N], both K-major, in rows of 32, 64 or 128 bytes. */
static const struct float_of_e4m3 {
    float of[256];
    float_of_e4m3() {
        for (int n = 0; n < 256; ++n)
            of[n] = __half2float(__half(__nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)n, __NV_E4M3)));
    }
} float_of_e4m3;
static inline uint32_t row_bytes_of(uint64_t descriptor) { return 256u >> (descriptor >> 62); }
/* The address of byte k of row x. */
static inline uint32_t address_of_byte(uint64_t descriptor, int x, int k) {
    const uint32_t row = row_bytes_of(descriptor), rows8 = (uint32_t)(descriptor >> 32 & 0x3fff) << 4;
    const uint32_t at = operand_start(descriptor) + (uint32_t)x / 8 * rows8 + (uint32_t)x % 8 * row;
    return swizzled_rows(at + (uint32_t)k, row);
}
static inline UNSEEN uint8_t operand_byte(uint64_t descriptor, int x, int k) {
    return memory[address_of_byte(descriptor, x, k)];
}
static inline UNSEEN void operand_codes(float *to, uint64_t descriptor, int x) {
    for (int k = 0; k < 32; ++k) to[k] = float_of_e4m3.of[operand_byte(descriptor, x, k)];
}
static inline UNSEEN void product_of_codes(int N, float *d, uint64_t a, const uint32_t *registers, uint64_t b,
                                           int accumulate) {
    const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = (int)threadIdx.x / 32 % 4;
    float left[2][32], right[32];
    for (int half = 0; half < 2 && !registers; ++half) operand_codes(left[half], a, 16 * warp + g + 8 * half);
    if (registers) { /* register m: row g + 8 (m%2), columns 16 (m/2) + 4t to + 3 */
        const words *const all = machine_gather((const words *)registers);
        for (int m = 0; m < 4; ++m)
            for (int c = 0; c < 16; ++c)
                left[m % 2][16 * (m / 2) + c] = float_of_e4m3.of[all[4 * g + c / 4].x[m] >> c % 4 * 8 & 0xff];
        machine_meet_warp();
    }
    for (int i = 0; i < N / 8; ++i)
        for (int e = 0; e < 2; ++e) {
            operand_codes(right, b, 8 * i + 2 * t + e);
            for (int half = 0; half < 2; ++half) {
                float x = accumulate ? d[4 * i + 2 * half + e] : 0.0f;
                for (int k = 0; k < 32; ++k) x += left[half][k] * right[k];
                d[4 * i + 2 * half + e] = x;
            }
        }
}
/* The same of signed bytes; d holds 32-bit integers. */
static inline UNSEEN void product_of_integers(int N, float *d, uint64_t a, uint64_t b, int accumulate) {
    const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = (int)threadIdx.x / 32 % 4;
    for (int i = 0; i < N / 8; ++i)
        for (int e = 0; e < 4; ++e) {
            int32_t x = accumulate ? __float_as_int(d[4 * i + e]) : 0;
            for (int k = 0; k < 32; ++k)
                x += (int8_t)operand_byte(a, 16 * warp + g + e / 2 * 8, k) *
                     (int8_t)operand_byte(b, 8 * i + 2 * t + e % 2, k);
            d[4 * i + e] = __int_as_float(x);
        }
}
/* A product of two operands in shared memory takes place when its thread waits for it, the latest time at which the
   tensor cores may read them; one with A in registers at once. */
typedef enum elements { OF_HALVES, OF_CODES, OF_INTEGERS } elements;
typedef struct queued_product {
    int N, accumulate, a_mn_major, b_mn_major, end_of_group;
    int unread; /* nothing reads its result: its operands may change meanwhile */
    elements of;
    const uint32_t *registers;
    float *d;
    uint64_t a, b;
} queued_product;
static thread_local std::deque<queued_product> products[MOST_THREADS];
static thread_local int groups[MOST_THREADS], results_unread[MOST_THREADS];
static inline void operands_may_change(int unread) { results_unread[threadIdx.x] = unread; }
static const int products_prepared =
    machine_prepare([] { products[0].clear(), stores_of_thread[0].clear(), copied_by_thread[0].clear(); });

/* That the lanes of a warp read `rows` rows of an operand, along M or N. */
static inline void operand_is_read(elements of, uint64_t descriptor, int rows, int mn_major) {
    for (int n = (int)threadIdx.x % 32; n < 2 * rows && EMULATED_RACES; n += 32) {
        const int along = mn_major ? n % (rows / 8) * 8 : n / 2, k = mn_major ? n / (rows / 8) : n % 2 * 8;
        const uint32_t at = of == OF_HALVES
                                ? swizzled(operand_start(descriptor) + operand_offset(descriptor, along, k, mn_major))
                                : address_of_byte(descriptor, along, 2 * k);
        machine_proxy_reads(OF_SHARED, memory + at, 16);
    }
}
/* Both when a product begins, after the fence that it needs, and when it has ended, before others may write. */
static inline void operands_are_read(const queued_product *p) {
    if (p->unread) return;
    if (!p->registers) operand_is_read(p->of, p->a, 64, p->a_mn_major); /* any warp may read any row */
    operand_is_read(p->of, p->b, p->N, p->b_mn_major);
}
static inline void take_place(const queued_product *p) {
    if (p->of == OF_HALVES)
        product(p->N, p->d, p->a, p->registers, p->b, p->accumulate, p->a_mn_major, p->b_mn_major);
    else if (p->of == OF_CODES)
        product_of_codes(p->N, p->d, p->a, p->registers, p->b, p->accumulate);
    else
        product_of_integers(p->N, p->d, p->a, p->b, p->accumulate);
}
static inline void begin_product(queued_product p) {
    p.unread = results_unread[threadIdx.x];
    operands_are_read(&p);
    if (p.registers) take_place(&p);
    products[threadIdx.x].push_back(p);
}
#define WGMMA_SHARED(KIND, A, B, N)                                                                                    \
    static inline void wgmma_##KIND##_n##N(float *d, uint64_t a, uint64_t b, int accumulate) {                         \
        begin_product({N, accumulate, A, B, 0, 0, OF_HALVES, NULL, d, a, b});                                          \
    }                                                                                                                  \
    static inline void wgmma_##KIND##_new_n##N(float *d, uint64_t a, uint64_t b) { wgmma_##KIND##_n##N(d, a, b, 0); }
#define WGMMA(N)                                                                                                       \
    WGMMA_SHARED(ss, 0, 0, N)                                                                                          \
    WGMMA_SHARED(st, 0, 1, N)                                                                                          \
    WGMMA_SHARED(tt, 1, 1, N)                                                                                          \
    static inline void wgmma_rs_n##N(float *d, const uint32_t *a, uint64_t b, int accumulate) {                        \
        begin_product({N, accumulate, 0, 1, 0, 0, OF_HALVES, a, d, 0, b});                                             \
    }
WGMMA(32)
WGMMA(48)
WGMMA(64)
WGMMA(80)
WGMMA(96)
WGMMA(112)
WGMMA(128)
WGMMA(192)
WGMMA(256)
#define WGMMA_F8(N)                                                                                                    \
    static inline void wgmma_f8_ss_n##N(float *d, uint64_t a, uint64_t b, int accumulate) {                            \
        begin_product({N, accumulate, 0, 0, 0, 0, OF_CODES, NULL, d, a, b});                                           \
    }                                                                                                                  \
    static inline void wgmma_f8_rs_n##N(float *d, const uint32_t *a, uint64_t b, int accumulate) {                     \
        begin_product({N, accumulate, 0, 0, 0, 0, OF_CODES, a, d, 0, b});                                              \
    }
#define WGMMA_S8(N)                                                                                                    \
    static inline void wgmma_s8_ss_n##N(float *d, uint64_t a, uint64_t b, int accumulate) {                            \
        begin_product({N, accumulate, 0, 0, 0, 0, OF_INTEGERS, NULL, d, a, b});                                        \
    }
WGMMA_F8(64)
WGMMA_F8(96)
WGMMA_F8(128)
WGMMA_F8(256)
WGMMA_S8(64)
WGMMA_S8(96)
WGMMA_S8(128)
static inline void wgmma_fence(void) {}
static inline void wgmma_commit(void) {
    std::deque<queued_product> *const queue = &products[threadIdx.x];
    if (queue->empty() || queue->back().end_of_group) { /* a group of nothing */
        const queued_product nothing = {0};
        queue->push_back(nothing);
    }
    queue->back().end_of_group = 1;
    ++groups[threadIdx.x];
}
/* The lanes of a warp continue together, as on the device: one of them releases the operands for all. */
static inline void wgmma_wait(int left) {
    std::deque<queued_product> *const queue = &products[threadIdx.x];
    while (groups[threadIdx.x] > left) {
        const queued_product p = queue->front();
        queue->pop_front();
        if (p.N > 0) operands_are_read(&p);
        if (p.N > 0 && !p.registers) take_place(&p);
        groups[threadIdx.x] -= p.end_of_group;
    }
    machine_wait_for_proxies();
    machine_meet_warp();
}
#define PIN(x, n)
#define PIN_INTEGERS(x, n)
#define FORGET(x, n)
#define registers_raise(n)
#define registers_lower(n)

#endif
