/* The layouts of core/ptx and core/device/sm90_tile.cuh, each against a plain loop on the host: TMA boxes
   and their swizzle, wgmma's operands and accumulators, mma's fragments, stmatrix and ldmatrix, bulk
   copies and reductions. Values are small integers, so that every sum is exact. K_BF16 is set by the build. */
#include "core/device/sm90_tile.cuh"
#include "core/ptx/mma.h"
#include "core/ptx/stmatrix.h"

#include <stdio.h>
#include <stdlib.h>
#include <vector>

enum { SKIPPED = 77, M = 64, DEPTH = 128, WIDEST = 256 };
/* Four operand tiles of one product, as panels: A [M][DEPTH], B [N][DEPTH], and transposed. */
enum { A_BYTES = M * DEPTH * 2, B_BYTES = WIDEST * DEPTH * 2, SHARED_BYTES = 2 * (A_BYTES + B_BYTES) };

static int failures = 0;

static void cuda(cudaError_t status, const char *what) {
    if (status == cudaSuccess) return;
    printf("%s: %s\n", what, cudaGetErrorString(status));
    exit(1);
}

static void expect(const char *what, int n, const std::vector<float> &got, const std::vector<float> &want) {
    for (size_t i = 0; i < want.size(); ++i)
        if (!(got[i] == want[i])) {
            printf("FAILED %s %d: element %zu is %g, not %g\n", what, n, i, got[i], want[i]);
            ++failures;
            return;
        }
}

/* [rows][columns] of integers in -4..4 on the device, with its tensor map. */
struct matrix {
    int rows, columns;
    std::vector<half_type> host;
    half_type *device;
    CUtensorMap map;
    float at(int r, int c) const { return (float)host[(size_t)r * columns + c]; }
};

typedef CUresult (*encode_function)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                    const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                    CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static matrix matrix_new(int rows, int columns, int box, unsigned seed) {
    static encode_function encode;
    if (!encode) {
        enum cudaDriverEntryPointQueryResult found;
        cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void **)&encode, 12000, cudaEnableDefault,
                                              &found),
             "cuTensorMapEncodeTiled");
    }
    matrix m = {rows, columns, std::vector<half_type>((size_t)rows * columns), 0, {}};
    for (half_type &x : m.host) {
        seed = seed * 1664525u + 1013904223u;
        x = (half_type)(float)((int)(seed >> 24) % 9 - 4);
    }
    cuda(cudaMalloc(&m.device, m.host.size() * 2), "cudaMalloc");
    cuda(cudaMemcpy(m.device, m.host.data(), m.host.size() * 2, cudaMemcpyHostToDevice), "cudaMemcpy");
    const cuuint64_t extent[4] = {(cuuint64_t)columns, (cuuint64_t)rows, 1, 1};
    const cuuint64_t stride[3] = {(cuuint64_t)columns * 2, (cuuint64_t)columns * 2, (cuuint64_t)columns * 2};
    const cuuint32_t boxes[4] = {64, (cuuint32_t)box, 1, 1}, unit[4] = {1, 1, 1, 1};
    const CUresult result =
        encode(&m.map, K_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4, m.device, extent,
               stride, boxes, unit, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
        printf("cuTensorMapEncodeTiled: result %d\n", (int)result);
        exit(1);
    }
    return m;
}

/* ---- wgmma ---- */

/* Where the operands are: shared memory (S), transposed (T), registers (R). */
enum { SS, ST, TT, RS, NEW_SS, NEW_ST, NEW_TT, KINDS };
static const char *const kind_names[] = {"wgmma_ss",     "wgmma_st",     "wgmma_tt",    "wgmma_rs",
                                         "wgmma_ss_new", "wgmma_st_new", "wgmma_tt_new"};

typedef struct operands {
    CUtensorMap a, b, a_t, b_t; /* [M][DEPTH], [N][DEPTH], [DEPTH][M], [DEPTH][N] */
} operands;

/* All steps of a product, or all but the first. */
#define STEPS(from, product)                                                                                           \
    _Pragma("unroll") for (int e = 0; e < DEPTH / 16; ++e) {                                                           \
        if (e >= (from)) product;                                                                                      \
    }
#define ALONG_A advance_columns(e, M)
#define ALONG_B(N) advance_columns(e, N)
#define ALONG_ROWS advance_rows(e)

/* out[M][N] = 3 A B: one product from zero, two added, over all of DEPTH each time. */
#define PRODUCTS(N)                                                                                                    \
    __global__ void products_##N(const __grid_constant__ operands p, int kind, float *out) {                           \
        extern __shared__ __align__(1024) unsigned char memory[];                                                      \
        __shared__ __align__(8) uint64_t barrier;                                                                      \
        const uint32_t a = shared_address(memory), b = a + A_BYTES, a_t = b + B_BYTES, b_t = a_t + A_BYTES,            \
                       bar = shared_address(&barrier);                                                                 \
        if (threadIdx.x == 0) {                                                                                        \
            mbarrier_init(bar, 1);                                                                                     \
            mbarrier_init_fence();                                                                                     \
            const int panels = (N + 63) / 64;                                                                          \
            mbarrier_expect(bar, 2 * M * DEPTH * 2 + N * DEPTH * 2 + panels * 64 * DEPTH * 2);                         \
            load_panels(a, &p.a, bar, DEPTH / 64, M, 0, 0, 0);                                                         \
            load_panels(b, &p.b, bar, DEPTH / 64, N, 0, 0, 0);                                                         \
            load_panels(a_t, &p.a_t, bar, 1, DEPTH, 0, 0, 0);                                                          \
            load_panels(b_t, &p.b_t, bar, panels, DEPTH, 0, 0, 0);                                                     \
        }                                                                                                              \
        __syncthreads();                                                                                               \
        mbarrier_wait(bar, 0);                                                                                         \
        float d[N / 2];                                                                                                \
        for (int i = 0; i < N / 2; ++i) d[i] = __int_as_float(0x7fc00000);                                             \
        const int warp = (int)threadIdx.x / 32, g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;               \
        uint32_t fragment[DEPTH / 16][4]; /* A of this warp's 16 rows */                                               \
        for (int e = 0; e < DEPTH / 16; ++e) {                                                                         \
            const int row = 16 * warp + (int)threadIdx.x % 16, chunk = 2 * e + (int)threadIdx.x % 32 / 16;             \
            ldmatrix_x4(fragment[e], a + chunk / 8 * M * 128 + row * 128 + (chunk % 8 ^ row % 8) * 16);                \
        }                                                                                                              \
        PIN(d, N / 2);                                                                                                 \
        for (int n = 0; n < 3; ++n) {                                                                                  \
            wgmma_fence();                                                                                             \
            const uint64_t ka = operand_descriptor(a, 0), kb = operand_descriptor(b, 0);                               \
            const uint64_t ma = operand_descriptor(a_t, DEPTH * 128), mb = operand_descriptor(b_t, DEPTH * 128);       \
            const int add = n > 0, fresh = kind >= NEW_SS && !add;                                                     \
            if (kind == NEW_SS && fresh) wgmma_ss_new_n##N(d, ka, kb);                                                 \
            if (kind == NEW_ST && fresh) wgmma_st_new_n##N(d, ka, mb);                                                 \
            if (kind == NEW_TT && fresh) wgmma_tt_new_n##N(d, ma, mb);                                                 \
            if (kind == SS || kind == NEW_SS)                                                                          \
                STEPS(fresh, wgmma_ss_n##N(d, ka + ALONG_A, kb + ALONG_B(N), add || e > 0))                            \
            if (kind == ST || kind == NEW_ST)                                                                          \
                STEPS(fresh, wgmma_st_n##N(d, ka + ALONG_A, mb + ALONG_ROWS, add || e > 0))                            \
            if (kind == TT || kind == NEW_TT)                                                                          \
                STEPS(fresh, wgmma_tt_n##N(d, ma + ALONG_ROWS, mb + ALONG_ROWS, add || e > 0))                         \
            if (kind == RS) STEPS(0, wgmma_rs_n##N(d, fragment[e], mb + ALONG_ROWS, add || e > 0))                     \
            wgmma_commit();                                                                                            \
            wgmma_wait(0);                                                                                             \
            PIN(d, N / 2);                                                                                             \
        }                                                                                                              \
        for (int i = 0; i < N / 2; ++i) out[(16 * warp + g + i % 4 / 2 * 8) * N + i / 4 * 8 + 2 * t + i % 2] = d[i];   \
    }
PRODUCTS(32)
PRODUCTS(64)
PRODUCTS(80)
PRODUCTS(96)
PRODUCTS(112)
PRODUCTS(128)
PRODUCTS(192)
PRODUCTS(256)

static void test_products(int N, void (*kernel)(operands, int, float *)) {
    const matrix a = matrix_new(M, DEPTH, M, 1), b = matrix_new(N, DEPTH, N, 2);
    const matrix a_t = matrix_new(DEPTH, M, DEPTH, 3), b_t = matrix_new(DEPTH, N, DEPTH, 4);
    const operands p = {a.map, b.map, a_t.map, b_t.map};
    float *out;
    cuda(cudaMalloc(&out, M * N * sizeof *out), "cudaMalloc");
    cuda(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES),
         "cudaFuncSetAttribute");
    for (int kind = 0; kind < KINDS; ++kind) {
        std::vector<float> got(M * N), want(M * N);
        const bool columns_a = kind == TT || kind == NEW_TT, rows_b = kind != SS && kind != NEW_SS;
        for (int i = 0; i < M; ++i)
            for (int j = 0; j < N; ++j) {
                float sum = 0;
                for (int k = 0; k < DEPTH; ++k)
                    sum += (columns_a ? a_t.at(k, i) : a.at(i, k)) * (rows_b ? b_t.at(k, j) : b.at(j, k));
                want[i * N + j] = 3 * sum;
            }
        cuda(cudaMemset(out, 0xff, M * N * sizeof *out), "cudaMemset");
        kernel<<<1, 128, SHARED_BYTES>>>(p, kind, out);
        cuda(cudaDeviceSynchronize(), kind_names[kind]);
        cuda(cudaMemcpy(got.data(), out, M * N * sizeof *out, cudaMemcpyDeviceToHost), "cudaMemcpy");
        expect(kind_names[kind], N, got, want);
    }
    cudaFree(out);
    for (half_type *x : {a.device, b.device, a_t.device, b_t.device}) cudaFree(x);
}

/* ---- TMA boxes ---- */

enum { BOX = 32 };

/* The box of 64 columns and BOX rows at (column, row), as it lies in shared memory; rows from `clear` on
   become 0 afterwards. */
__global__ void box(const __grid_constant__ CUtensorMap map, int column, int row, int clear, half_type *out) {
    __shared__ __align__(1024) half_type tile[BOX * 64];
    __shared__ __align__(8) uint64_t barrier;
    const uint32_t to = shared_address(tile), bar = shared_address(&barrier);
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        mbarrier_init_fence();
        mbarrier_expect(bar, (int)sizeof tile);
        tma_load(to, &map, bar, column, row, 0, 0);
    }
    __syncthreads();
    mbarrier_wait(bar, 0);
    clear_rows(to, 1, BOX, clear, (int)threadIdx.x, (int)blockDim.x);
    __syncthreads();
    for (int i = (int)threadIdx.x; i < BOX * 64; i += (int)blockDim.x) out[i] = tile[i];
}

static void test_boxes(void) {
    const matrix m = matrix_new(45, 104, BOX, 5);
    half_type *out;
    cuda(cudaMalloc(&out, BOX * 64 * 2), "cudaMalloc");
    static const int corners[][3] = {{0, 0, BOX}, {64, 0, BOX}, {0, 20, BOX}, {64, 37, 5}, {0, 13, 0}};
    for (int n = 0; n < 5; ++n) {
        const int *const c = corners[n];
        std::vector<half_type> raw(BOX * 64);
        std::vector<float> got(BOX * 64), want(BOX * 64);
        box<<<1, 128>>>(m.map, c[0], c[1], c[2], out);
        cuda(cudaMemcpy(raw.data(), out, raw.size() * 2, cudaMemcpyDeviceToHost), "box");
        for (int i = 0; i < BOX * 64; ++i) {
            const int row = i / 64, column = (i % 64 / 8 ^ row % 8) * 8 + i % 8; /* the swizzle */
            const bool inside = c[1] + row < m.rows && c[0] + column < m.columns && row < c[2];
            got[i] = (float)raw[i];
            want[i] = inside ? m.at(c[1] + row, c[0] + column) : 0.0f;
        }
        expect("tma_load, clear_rows", n, got, want);
    }
    cudaFree(out);
    cudaFree(m.device);
}

/* A tile whose element i is i % 61 - 30 to the box at (column, row). */
__global__ void store_box(const __grid_constant__ CUtensorMap map, int column, int row) {
    __shared__ __align__(1024) half_type tile[BOX * 64];
    for (int i = (int)threadIdx.x; i < BOX * 64; i += (int)blockDim.x) tile[i] = to_half((float)(i % 61 - 30));
    async_proxy_fence();
    __syncthreads();
    if (threadIdx.x) return;
    tma_store(&map, shared_address(tile), column, row, 0, 0);
    bulk_commit();
    bulk_wait_read();
}

static void test_stored_boxes(void) {
    static const int corners[][2] = {{0, 0}, {64, 0}, {0, 20}, {64, 37}};
    for (int n = 0; n < 4; ++n) {
        const matrix m = matrix_new(45, 104, BOX, 6);
        const int column = corners[n][0], row = corners[n][1];
        std::vector<half_type> raw(m.host.size());
        std::vector<float> got, want;
        store_box<<<1, 128>>>(m.map, column, row);
        cuda(cudaMemcpy(raw.data(), m.device, raw.size() * 2, cudaMemcpyDeviceToHost), "store_box");
        for (int r = 0; r < m.rows; ++r)
            for (int c = 0; c < m.columns; ++c) {
                const int y = r - row, x = c - column, inside = y >= 0 && y < BOX && x >= 0 && x < 64;
                const int i = y * 64 + (x / 8 ^ y % 8) * 8 + x % 8; /* the swizzle */
                got.push_back((float)raw[(size_t)r * m.columns + c]);
                want.push_back(inside ? (float)(i % 61 - 30) : m.at(r, c));
            }
        expect("tma_store", n, got, want);
        cudaFree(m.device);
    }
}

/* ---- functions ---- */

enum { POINTS = 4096 };
__global__ void functions(float *out) {
    for (int n = (int)threadIdx.x; n < POINTS; n += (int)blockDim.x) {
        const float x = ldexpf(1.0f + (float)n / POINTS, n % 97 - 40), near_1 = 0.5f + 1.5f * (float)n / POINTS;
        out[n] = fabsf(reciprocal_approx(x) * x - 1.0f);
        out[POINTS + n] = fabsf(log2_approx(near_1) - (float)log2((double)near_1));
        const int elsewhere = x <= 0.5f || x >= 2.0f;
        out[2 * POINTS + n] = elsewhere ? fabsf(log2_approx(x) / (float)log2((double)x) - 1.0f) : 0.0f;
    }
}
static void test_functions(void) {
    static const char *const names[] = {"reciprocal_approx", "log2_approx near 1", "log2_approx elsewhere"};
    static const float bounds[] = {0x1p-22f, 0x1.2p-22f, 0x1p-21f}; /* and what the check itself rounds */
    float *out, error[3 * POINTS];
    cuda(cudaMalloc(&out, sizeof error), "cudaMalloc");
    functions<<<1, 128>>>(out);
    cuda(cudaMemcpy(error, out, sizeof error, cudaMemcpyDeviceToHost), "functions");
    for (int f = 0; f < 3; ++f)
        for (int n = 0; n < POINTS; ++n)
            if (!(error[f * POINTS + n] <= bounds[f])) {
                printf("FAILED %s: point %d is off by %g\n", names[f], n, error[f * POINTS + n]);
                ++failures;
                break;
            }
    cudaFree(out);
}

/* ---- mma, stmatrix, ldmatrix ---- */

/* d[16][8] = A[16][16] B[16][8] by mma, fragments as mma.h says; then stmatrix and ldmatrix, plain and
   transposed, of the fragment of A: back[2][16][16]. */
__global__ void fragments(const half_type *a, const half_type *b, float *d, half_type *back) {
    __shared__ __align__(16) half_type tile[16 * 16];
    const int lane = (int)threadIdx.x, g = lane / 4, t = lane % 4;
    uint32_t x[4], y[2];
    for (int e = 0; e < 4; ++e) x[e] = *(const uint32_t *)(a + (g + e % 2 * 8) * 16 + e / 2 * 8 + 2 * t);
    for (int e = 0; e < 2; ++e)
        y[e] = pack(to_float(b[(8 * e + 2 * t) * 8 + g]), to_float(b[(8 * e + 2 * t + 1) * 8 + g]));
    float z[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    mma(z, x, y[0], y[1]);
    for (int e = 0; e < 4; ++e) d[(g + e / 2 * 8) * 8 + 2 * t + e % 2] = z[e];

    /* Matrix n of the four: rows 8 (n%2).., columns 8 (n/2).. of A. */
    const uint32_t row = shared_address(tile + (lane % 8 + lane / 8 % 2 * 8) * 16 + lane / 16 * 8);
    const uint32_t row_t = shared_address(tile + (lane % 8 + lane / 16 * 8) * 16 + lane / 8 % 2 * 8);
    uint32_t r[4];
    stmatrix_x4(row, x);
    __syncwarp();
    ldmatrix_x4(r, row);
    for (int e = 0; e < 4; ++e) *(uint32_t *)(back + (g + e % 2 * 8) * 16 + e / 2 * 8 + 2 * t) = r[e];
    __syncwarp();
    stmatrix_x4_trans(row_t, x); /* the tile is A transposed */
    __syncwarp();
    for (int i = lane; i < 256; i += 32) back[256 + i] = tile[i % 16 * 16 + i / 16];
    ldmatrix_x4_trans(r, row_t);
    for (int e = 0; e < 4; ++e) /* and back again */
        if (r[e] != x[e]) back[0] = to_half(99.0f);
}

static void test_fragments(void) {
    const matrix a = matrix_new(16, 64, 16, 6), b = matrix_new(16, 64, 16, 7);
    std::vector<half_type> small_a(256), small_b(128), raw(512);
    for (int i = 0; i < 256; ++i) small_a[i] = a.host[i / 16 * 64 + i % 16];
    for (int i = 0; i < 128; ++i) small_b[i] = b.host[i / 8 * 64 + i % 8];
    float *d;
    half_type *back;
    cuda(cudaMalloc(&d, 128 * sizeof *d), "cudaMalloc");
    cuda(cudaMalloc(&back, 1024), "cudaMalloc");
    cuda(cudaMemcpy(a.device, small_a.data(), 512, cudaMemcpyHostToDevice), "cudaMemcpy");
    cuda(cudaMemcpy(b.device, small_b.data(), 256, cudaMemcpyHostToDevice), "cudaMemcpy");
    fragments<<<1, 32>>>(a.device, b.device, d, back);
    std::vector<float> got(128), want(128);
    cuda(cudaMemcpy(got.data(), d, 512, cudaMemcpyDeviceToHost), "fragments");
    cuda(cudaMemcpy(raw.data(), back, 1024, cudaMemcpyDeviceToHost), "fragments");
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 8; ++j)
            for (int k = 0; k < 16; ++k) want[i * 8 + j] += (float)small_a[i * 16 + k] * (float)small_b[k * 8 + j];
    expect("mma", 16, got, want);
    got.resize(512), want.resize(512);
    for (int i = 0; i < 512; ++i) got[i] = (float)raw[i], want[i] = (float)small_a[i % 256];
    expect("stmatrix, ldmatrix", 4, got, want);
    cudaFree(d);
    cudaFree(back);
    cudaFree(a.device);
    cudaFree(b.device);
}

/* ---- bulk copies ---- */

enum { COUNT = 512 };

/* to += 2 from, by a bulk load, an addition in shared memory, and two CTAs' reductions. */
__global__ void bulk(const float *from, float *to) {
    __shared__ __align__(128) float x[COUNT];
    __shared__ __align__(8) uint64_t barrier;
    const uint32_t bar = shared_address(&barrier);
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        mbarrier_init_fence();
        mbarrier_expect(bar, (int)sizeof x);
        bulk_load(shared_address(x), from, (int)sizeof x, bar);
    }
    __syncthreads();
    mbarrier_wait(bar, 0);
    for (int i = (int)threadIdx.x; i < COUNT; i += (int)blockDim.x) x[i] += from[i];
    async_proxy_fence();
    __syncthreads();
    if (threadIdx.x == 0) {
        bulk_reduce_add(to, shared_address(x), (int)sizeof x);
        bulk_commit();
        bulk_wait_read();
        bulk_wait();
    }
}
/* to[4n..] += {1, 2, 3, 4} and to[n] += 5, by red. */
__global__ void reductions(float *to) {
    const float x[4] = {1.0f, 2.0f, 3.0f, 4.0f};
    reduce_add_4(to + 4 * threadIdx.x, x);
    reduce_add(to + threadIdx.x, 5.0f);
}

static void test_bulk(void) {
    std::vector<float> from(COUNT), got(COUNT), want(COUNT);
    for (int i = 0; i < COUNT; ++i) from[i] = (float)(i % 37 - 18);
    float *x, *y;
    cuda(cudaMalloc(&x, COUNT * sizeof *x), "cudaMalloc");
    cuda(cudaMalloc(&y, COUNT * sizeof *y), "cudaMalloc");
    cuda(cudaMemcpy(x, from.data(), COUNT * sizeof *x, cudaMemcpyHostToDevice), "cudaMemcpy");
    cuda(cudaMemset(y, 0, COUNT * sizeof *y), "cudaMemset");
    bulk<<<2, 128>>>(x, y);
    cuda(cudaMemcpy(got.data(), y, COUNT * sizeof *y, cudaMemcpyDeviceToHost), "bulk");
    for (int i = 0; i < COUNT; ++i) want[i] = 4 * from[i];
    expect("bulk_load, bulk_reduce_add", COUNT, got, want);
    reductions<<<3, COUNT / 4>>>(y);
    cuda(cudaMemcpy(got.data(), y, COUNT * sizeof *y, cudaMemcpyDeviceToHost), "reductions");
    for (int i = 0; i < COUNT; ++i) want[i] += 3.0f * (float)(1 + i % 4) + (i < COUNT / 4 ? 15.0f : 0.0f);
    expect("reduce_add, reduce_add_4", COUNT, got, want);
    cudaFree(x);
    cudaFree(y);
}

int main(void) {
    cudaDeviceProp device;
    if (cudaGetDeviceProperties(&device, 0) != cudaSuccess || device.major != 9) {
        printf("skipped: no device of compute capability 9.x\n");
        return SKIPPED;
    }
    test_products(32, products_32);
    test_products(64, products_64);
    test_products(80, products_80);
    test_products(96, products_96);
    test_products(112, products_112);
    test_products(128, products_128);
    test_products(192, products_192);
    test_products(256, products_256);
    test_boxes();
    test_stored_boxes();
    test_functions();
    test_fragments();
    test_bulk();
    printf("%s: %d failures\n", K_BF16 ? "bf16" : "f16", failures);
    return failures != 0;
}
