/* layernorm's backward with the sums over rows of dy h, dy and dx (autograd_c/ops/norm/op_norm.cu) on the host: dx and
   the first two have the bits of the kernel without the third, the third is that of dx in double. */
#include "real.h"

#include <vector_functions.h>

#undef shared
#define __CUDACC__
static index1 blockDim;
#include "autograd_c/ops/norm/op_norm.cu"
#undef __CUDACC__
#undef OF_TYPES

#include <random>
#include <vector>

static fattni_norm_args args;
typedef struct width {
    int64_t least, most; /* columns that are tested: few of its warp's, all of them */
    int threads;
    void (*two[3])(void), (*three[3])(void); /* BF16, F16, F32 */
} width;
#define OF_TYPES(name)                                                                                                 \
    {                                                                                                                  \
        [] { name##_bf16(args); }, [] { name##_f16(args); }, [] { name##_f32(args); }                                  \
    }
#define WIDTH(least, columns, threads)                                                                                 \
    { least, columns, threads, OF_TYPES(fattn_layernorm_back##columns), OF_TYPES(fattn_layernorm_sum##columns) }
static const width widths[] = {WIDTH(8, 128, 384),   WIDTH(136, 256, 256), WIDTH(264, 384, 256),
                               WIDTH(392, 512, 384), WIDTH(520, 768, 256), WIDTH(784, 1024, 256)};

static std::mt19937 numbers(1);

/* n elements of dtype, normal numbers; `as` is what they are in double. */
static std::vector<uint4> draw(int32_t dtype, int64_t n, std::vector<double> *as) {
    std::normal_distribution<float> normal;
    std::vector<uint4> memory((dtype == FATTN_F32 ? 4 : 2) * (size_t)n / 16 + 1);
    as->clear();
    for (int64_t i = 0; i < n; ++i) {
        store_f32(memory.data(), dtype, i, normal(numbers));
        as->push_back(load_f64(memory.data(), dtype, i));
    }
    return memory;
}

static void run(void (*kernel)(void), int64_t parts, int threads) {
    gridDim.x = (unsigned)parts, blockDim.x = (unsigned)threads;
    for (int64_t n = 0; n < parts; ++n) machine_run((int)(parts - 1 - n), 1, threads, (unsigned)n, kernel);
}

/* Errors. An element of dx has about 12 roundings of F32 and those of two sums over C elements, of which a lane has 32
   and five follow: 50 of the sum of its terms' sizes at most, and that of its type. The sum over rows adds those of the
   rows that a warp has and of the block's warps: 64 of all. */
static int check(const width *w, int type, int64_t C, int64_t rows, int64_t parts, bool fresh) {
    static const int32_t types[] = {FATTN_BF16, FATTN_F16, FATTN_F32};
    static const char *const names[] = {"bf16", "f16", "f32"};
    const int32_t dtype = types[type];
    const int64_t pitch = C + FATTNI_PACK;
    std::vector<double> x, dy, gain, old, two((size_t)(parts * 2 * C), NAN), three((size_t)(parts * 3 * C), NAN);
    const std::vector<uint4> xs = draw(dtype, rows * pitch, &x), dys = draw(dtype, rows * pitch, &dy);
    const std::vector<uint4> gains = draw(dtype, C, &gain);
    std::vector<uint4> dx = draw(dtype, rows * pitch, &old), dx_of_two = dx;
    std::vector<float> statistics((size_t)(2 * rows));
    std::vector<double> sum((size_t)C), size((size_t)C);
    const double u = dtype == FATTN_BF16 ? 0x1p-8 : dtype == FATTN_F16 ? 0x1p-11 : 0x1p-24;
    for (int64_t row = 0; row < rows; ++row)
        statistics[(size_t)row] = 1 + (float)(row % 7) / 8, statistics[(size_t)(rows + row)] = (float)(row % 5) / 4 - 1;
    memset(&args, 0, sizeof args);
    fattni_walk *const walks[] = {&args.x, &args.y, &args.dx};
    for (fattni_walk *one : walks) one->n = 1, one->shape[0] = rows, one->stride[0] = pitch;
    args.in = {(void *)xs.data(), dtype, 0}, args.out = {(void *)dys.data(), dtype, 0};
    args.gain = {(void *)gains.data(), dtype, 0}, args.statistics = statistics.data();
    args.rows = rows, args.C = C, args.parts = parts, args.centred = 1, args.fresh = fresh, args.dtype = dtype;
    args.d_in = {dx_of_two.data(), dtype, 0}, args.partial = two.data();
    run(w->two[type], parts, w->threads);
    args.d_in.p = dx.data(), args.partial = three.data();
    run(w->three[type], parts, w->threads);

    bool same = memcmp(dx.data(), dx_of_two.data(), dx.size() * sizeof dx[0]) == 0;
    for (int64_t part = 0; part < parts; ++part)
        same = same && memcmp(&three[(size_t)(part * 3 * C)], &two[(size_t)(part * 2 * C)], 2 * C * sizeof two[0]) == 0;
    double worst = 0, worst_sum = 0;
    for (int64_t row = 0; row < rows; ++row) {
        const double r = statistics[(size_t)row], mean = statistics[(size_t)(rows + row)];
        double g_mean = 0, gh_mean = 0, g_size = 0, gh_size = 0;
        for (int64_t i = 0; i < C; ++i) {
            const double g = dy[(size_t)(row * pitch + i)] * gain[(size_t)i];
            const double h = (x[(size_t)(row * pitch + i)] - mean) * r;
            g_mean += g / (double)C, gh_mean += g * h / (double)C;
            g_size += fabs(g) / (double)C, gh_size += fabs(g * h) / (double)C;
        }
        for (int64_t i = 0; i < C; ++i) {
            const size_t e = (size_t)(row * pitch + i);
            const double g = dy[e] * gain[(size_t)i], h = (x[e] - mean) * r, before = fresh ? 0 : old[e];
            const double want = before + r * (g - g_mean - h * gh_mean);
            const double terms = fabs(before) + r * (fabs(g) + g_size + (fabs(h) + r * (fabs(mean) + 1)) * gh_size);
            const double error = fabs(load_f64(dx.data(), dtype, (int64_t)e) - want);
            worst = fmax(worst, error == error ? error / (u * fabs(want) + 50 * 0x1p-24 * terms) : INFINITY);
            sum[(size_t)i] += want, size[(size_t)i] += terms;
        }
    }
    for (int64_t i = 0; i < C; ++i) {
        double got = 0;
        for (int64_t part = 0; part < parts; ++part) got += three[(size_t)(part * 3 * C + 2 * C + i)];
        const double error = fabs(got - sum[(size_t)i]) / (64 * 0x1p-24 * size[(size_t)i]);
        worst_sum = fmax(worst_sum, error == error ? error : INFINITY);
    }
    const bool right = same && worst <= 1 && worst_sum <= 1;
    printf("%s, %d x %d, %s: dx %.2f, sum %.2f of their bounds%s: %s\n", names[type], (int)rows, (int)C,
           fresh ? "fresh" : "added", worst, worst_sum, same ? "" : ", others have other bits", right ? "ok" : "WRONG");
    return !right;
}

int main(void) {
    int wrong = 0;
    for (const width &w : widths)
        for (int type = 0; type < 3; ++type)
            for (int few = 0; few < 2; ++few)
                wrong += check(&w, type, few ? w.least : w.most, few ? 19 : 37, few ? 1 : 2, (few + type) % 2);
    return wrong != 0;
}
