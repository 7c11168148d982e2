/* Copies, normal numbers and dropout masks on the device against the CPU: the same bits, except the last bits of
   log, sin and cos. */
#include "device.h"

#include "core/tensor/numeric.h"

#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CELLS = 1 << 16, LAYOUTS = 5, DTYPES = 8 };

/* Two contexts, and a buffer on either side with one tensor in it. */
typedef struct pair {
    fattn_tensor host, device;
    size_t bytes;
    unsigned char *memory;
} pair;

static fattn_ctx *device_or_skip(void) {
    fattn_ctx *ctx = device_context(0);
    if (!ctx) cr_skip_test("no CUDA device");
    return ctx;
}

static void must(cudaError_t e) { cr_assert_eq(e, cudaSuccess, "%s", cudaGetErrorString(e)); }

/* Layouts of [3,5,37]: dense, dimensions in reverse order, rows with gaps, rows backwards, one row repeated. And of
   [3,5,48], whose rows are pieces of 16 bytes: the same, but for the second, whose rows change places. */
static fattn_tensor lay_out(int layout, bool wide, fattn_dtype dtype, void *memory) {
    static const int64_t strides[2][LAYOUTS][3] = {
        {{185, 37, 1}, {1, 3, 15}, {300, 41, 1}, {185, -37, 1}, {37, 0, 1}},
        {{240, 48, 1}, {48, 144, 1}, {320, 64, 1}, {240, -48, 1}, {48, 0, 1}}};
    const int64_t shape[3] = {3, 5, wide ? 48 : 37};
    char *const start = (char *)memory + (layout == 3 ? 4 * (size_t)shape[2] * fattn_dtype_size(dtype) : 0);
    fattn_tensor t = fattn_tensor_view(start, dtype, FATTN_CPU, 0, 3, shape);
    memcpy(t.stride, strides[wide][layout], sizeof strides[wide][layout]);
    return t;
}

static pair pair_new(int layout, bool wide, fattn_dtype dtype, bool filled) {
    static const double values[] = {0,     -0.0,  1,     -2.5, 3.5,          0.1,    1e-7,     65519,     65520,
                                    -3e38, 7e-40, 255.5, -1,   2147483648.0, 1e-310, INFINITY, -INFINITY, NAN};
    pair p = {.bytes = 1024 * fattn_dtype_size(dtype)};
    p.memory = malloc(p.bytes);
    memset(p.memory, 0xa5, p.bytes);
    for (int n = 0; n < 1024 && filled; ++n)
        fattni_store(p.memory, dtype, n, values[n % 18] * (n % 18 < 10 ? 1 + n / 18 : 1));
    void *d;
    must(cudaMalloc(&d, p.bytes));
    must(cudaMemcpy(d, p.memory, p.bytes, cudaMemcpyHostToDevice));
    p.host = lay_out(layout, wide, dtype, p.memory);
    p.device = lay_out(layout, wide, dtype, d);
    p.device.device = FATTN_CUDA;
    return p;
}

static void *of_device(const pair *p) {
    return (unsigned char *)p->device.data - ((unsigned char *)p->host.data - p->memory);
}

static void pair_free(pair *p) {
    must(cudaFree(of_device(p)));
    free(p->memory);
}

Test(cuda_tensor, copy, .timeout = 200) {
    fattn_ctx *const gpu = device_or_skip(), *const cpu = attention_context(0);
    static const fattn_dtype types[DTYPES] = {FATTN_F64, FATTN_F32, FATTN_F16,    FATTN_BF16,
                                              FATTN_I32, FATTN_U8,  FATTN_F8E4M3, FATTN_I8};
    for (int n = 0; n < 2 * DTYPES * DTYPES * LAYOUTS * (LAYOUTS - 1) * 3; ++n) {
        const int way = n % 3, to = n / 3 % (LAYOUTS - 1), from = n / 12 % LAYOUTS;
        const fattn_dtype a = types[n / 60 % DTYPES], b = types[n / 60 / DTYPES % DTYPES];
        const bool wide = n / 60 / DTYPES / DTYPES;
        pair src = pair_new(from, wide, a, true), dst = pair_new(to, wide, b, false);
        unsigned char *const untouched = malloc(dst.bytes), *const got = malloc(dst.bytes);
        memcpy(untouched, dst.memory, dst.bytes);
        cr_assert_eq(fattn_tensor_copy(cpu, &dst.host, &src.host), FATTN_OK);
        if (way == 2) { /* to the host: another buffer there */
            fattn_tensor other = dst.host;
            other.data = untouched + ((unsigned char *)dst.host.data - dst.memory);
            cr_assert_eq(fattn_tensor_copy(gpu, &other, &src.device), FATTN_OK);
            memcpy(got, untouched, dst.bytes);
        } else {
            cr_assert_eq(fattn_tensor_copy(gpu, &dst.device, way ? &src.host : &src.device), FATTN_OK);
            cr_assert_eq(fattn_ctx_sync(gpu), FATTN_OK);
            must(cudaMemcpy(got, of_device(&dst), dst.bytes, cudaMemcpyDeviceToHost));
        }
        cr_assert_eq(memcmp(got, dst.memory, dst.bytes), 0, "%s to %s, layout %d to %d%s, way %d", fattn_dtype_name(a),
                     fattn_dtype_name(b), from, to, wide ? " of pieces" : "", way);
        free(untouched);
        free(got);
        pair_free(&src);
        pair_free(&dst);
    }
    cr_assert_eq(fattn_ctx_mem(gpu).live, 0u);
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(gpu);
}

/* Elements of two equal tensors on the host that differ by more than `tolerance` of their size. */
static int64_t differing(const pair *p, const void *got, double tolerance) {
    int64_t count = 0;
    for (int64_t n = 0; n < 1024; ++n) {
        const double x = fattni_load(p->memory, p->host.dtype, n);
        const double y = fattni_load(got, p->host.dtype, n);
        count += !(fabs(x - y) <= tolerance * fmax(fabs(x), 1));
    }
    return count;
}

Test(cuda_tensor, normal) {
    fattn_ctx *const gpu = device_or_skip(), *const cpu = attention_context(0);
    static const fattn_dtype types[] = {FATTN_F64, FATTN_F32, FATTN_F16, FATTN_BF16};
    static const double ulp[] = {0x1p-50, 0x1p-23, 0x1p-10, 0x1p-7};
    for (int n = 0; n < 16; ++n) {
        pair p = pair_new(n / 4, false, types[n % 4], true);
        void *const got = malloc(p.bytes);
        memset(p.memory, 0, p.bytes);
        must(cudaMemset(of_device(&p), 0, p.bytes));
        const fattn_rng rng = {.seed = 0x123456789abcdefu + (unsigned)n, .stream = 7};
        cr_assert_eq(fattn_tensor_normal(cpu, &p.host, 0.25, 2, rng), FATTN_OK);
        cr_assert_eq(fattn_tensor_normal(gpu, &p.device, 0.25, 2, rng), FATTN_OK);
        cr_assert_eq(fattn_ctx_sync(gpu), FATTN_OK);
        must(cudaMemcpy(got, of_device(&p), p.bytes, cudaMemcpyDeviceToHost));
        cr_assert_eq(differing(&p, got, 4 * ulp[n % 4]), 0);
        /* Rounding hides the last bit of a double, except in rare ties. */
        if (n % 4) cr_assert_leq(differing(&p, got, 0), 1);
        free(got);
        pair_free(&p);
    }
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(gpu);
}

static void check_mask(fattn_ctx *cpu, fattn_ctx *gpu, const attention_case *c) {
    attention *const a = attention_new(cpu, c);
    const int64_t shape[4] = {a->c.B, a->c.Hq, a->c.Sq, a->c.Sk};
    const size_t bytes = (size_t)(shape[0] * shape[1] * shape[2] * shape[3]);
    enum { GUARD = 1 << 16 };
    uint8_t *const want = malloc(bytes + 1), *const got = malloc(bytes + GUARD);
    void *data;
    must(cudaMalloc(&data, bytes + GUARD));
    must(cudaMemset(data, 0xee, bytes + GUARD));
    const fattn_tensor host = fattn_tensor_view(want, FATTN_U8, FATTN_CPU, 0, 4, shape);
    const fattn_tensor device = fattn_tensor_view(data, FATTN_U8, FATTN_CUDA, 0, 4, shape);
    cr_assert_eq(fattn_dropout_mask(cpu, &a->params, &a->io, &host), FATTN_OK);
    fattn_tensor t[T_COUNT]; /* a mask looks at sizes, and at rng_step */
    fattn_attention_io io = {.struct_size = sizeof io};
    const fattn_tensor **const slots[] = {&io.q, &io.k, &io.v, &io.o, &io.lse};
    for (int id = T_Q; id <= T_LSE; ++id) {
        t[id] = a->t[id];
        t[id].device = FATTN_CUDA;
        *slots[id] = &t[id];
    }
    int32_t *step;
    must(cudaMalloc((void **)&step, sizeof *step));
    if (a->io.rng_step) {
        must(cudaMemcpy(step, a->io.rng_step->data, sizeof *step, cudaMemcpyHostToDevice));
        t[T_RNG_STEP] = *a->io.rng_step;
        t[T_RNG_STEP].device = FATTN_CUDA;
        t[T_RNG_STEP].data = step;
        io.rng_step = &t[T_RNG_STEP];
    }
    cr_assert_eq(fattn_dropout_mask(gpu, &a->params, &io, &device), FATTN_OK, "%s", fattn_ctx_error(gpu));
    cr_assert_eq(fattn_ctx_sync(gpu), FATTN_OK);
    must(cudaMemcpy(got, data, bytes + GUARD, cudaMemcpyDeviceToHost));
    for (int n = 0; n < GUARD; ++n) cr_assert_eq(got[bytes + (size_t)n], 0xee, "%s", c->name);
    cr_assert_eq(memcmp(got, want, bytes), 0, "%s", c->name);
    must(cudaFree(step));
    must(cudaFree(data));
    free(want);
    free(got);
    attention_free(a);
}

Test(cuda_tensor, mask) {
    fattn_ctx *const gpu = device_or_skip(), *const cpu = attention_context(0);
    attention_case c = {.name = "mask", .B = 2, .Hq = 3, .Sq = 37, .Sk = 53, .D = 4, .dropout_p = 0.3f};
    check_mask(cpu, gpu, &c);
    c.name = "rng_step", c.rng_step = true;
    check_mask(cpu, gpu, &c);
    c.name = "positions", c.q_pos0 = 13, c.k_pos0 = 9;
    check_mask(cpu, gpu, &c);
    c.name = "one row", c.Sq = 1, c.q_pos0 = 1000003;
    check_mask(cpu, gpu, &c);
    fattn_ctx_destroy(cpu);
    fattn_ctx_destroy(gpu);
}
