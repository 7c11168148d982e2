/* The rows of linear_cross_entropy (autograd_c/ops/loss/op_loss.cu) on the host, against the formulas in double: losses
   and gradients over the first V of `width` columns, one by one and in packs; the other columns' gradients are 0
   whatever their logits. */
#include "real.h"

#undef shared
#define __CUDACC__
static index1 blockDim;
#include "autograd_c/ops/loss/op_loss.cu"
#undef __CUDACC__

#include <random>
#include <vector>

enum { ROWS = 3, MOST_WIDTH = 1100 };
__thread uint4 loss_row[4 * MOST_WIDTH / FATTNI_PACK];

static fattni_loss_args args;
static void rows_f32(void) { fattn_loss_rows_f32(args); }
static void rows_f64(void) { fattn_loss_rows_f64(args); }

static double get(const void *p, int32_t dtype, int64_t i) { return load_f64(p, dtype, i); }
static void put(void *p, int32_t dtype, int64_t i, double x) {
    if (dtype == FATTN_F64)
        ((double *)p)[i] = x;
    else
        store_f32(p, dtype, i, (float)x);
}

static int check(int32_t dtype, int64_t V, int64_t width, int pack, bool keeps) {
    static std::mt19937 random(1);
    static std::normal_distribution<double> normal;
    alignas(16) static double x[ROWS * MOST_WIDTH];
    const int32_t target[ROWS] = {(int32_t)V - 1, -1, 0}; /* the second is ignored */
    double kept = 2, loss[ROWS] = {NAN, NAN, NAN}, state[2 * ROWS], want[ROWS * MOST_WIDTH], want_loss[ROWS] = {0};
    for (int64_t i = 0; i < ROWS * width; ++i)
        put(x, dtype, i, i % width < V ? normal(random) : i % width == V ? INFINITY : 50);
    for (int row = 0; row < ROWS; ++row) {
        double sum = 0;
        for (int64_t i = 0; i < V; ++i) sum += exp(get(x, dtype, row * width + i));
        for (int64_t i = 0; i < width; ++i)
            want[row * width + i] =
                target[row] < 0 || i >= V ? 0 : (exp(get(x, dtype, row * width + i)) / sum - (i == target[row])) / kept;
        if (target[row] >= 0) want_loss[row] = log(sum) - get(x, dtype, row * width + target[row]);
    }
    memset(&args, 0, sizeof args);
    args.x.n = args.dx.n = 2, args.target.n = 1;
    args.x.shape[0] = args.dx.shape[0] = 1, args.x.shape[1] = args.dx.shape[1] = ROWS;
    args.x.stride[1] = args.dx.stride[1] = width;
    args.target.shape[0] = 1, args.target_columns = ROWS, args.target_step = 1;
    args.logits.p = args.d.p = x, args.logits.dtype = args.d.dtype = dtype;
    args.id = target, args.kept = &kept, args.loss = loss, args.state = state;
    args.rows = args.all = ROWS, args.V = V, args.width = width, args.ignore = -1, args.fresh = args.gradients = 1;
    args.pack = pack, args.dtype = dtype, args.keeps = keeps;
    const int64_t packs = (width + pack - 1) / pack;
    const int threads = packs > 64 ? 128 : packs > 32 ? 64 : 32;
    const int rows = threads == 32 ? FATTNI_LOSS_ROWS : 1; /* of a block; more than there are */
    args.row_threads = threads, blockDim.x = (unsigned)(rows * threads);
    for (int row = 0; row < ROWS; row += rows)
        machine_run(row / rows, 1, rows * threads, (unsigned)row, dtype == FATTN_F64 ? rows_f64 : rows_f32);
    /* Rounding of the stored gradient, at most 1/2; of sums of V terms. */
    const double most = dtype == FATTN_F64 ? 1e-13 : dtype == FATTN_F32 ? 0x1p-24 * 16 : 0x1p-10;
    double worst = 0, padding = 0;
    for (int64_t i = 0; i < ROWS * width; ++i) {
        const double got = get(x, dtype, i);
        worst = fmax(worst, got == got ? fabs(got - want[i]) : INFINITY);
        if (i % width >= V) padding = fmax(padding, got == got ? fabs(got) : INFINITY);
    }
    for (int row = 0; row < ROWS; ++row)
        worst = fmax(worst, loss[row] == loss[row] ? fabs(loss[row] - want_loss[row]) / 8 : INFINITY);
    const bool good = worst <= most && padding == 0;
    const char *const name = dtype == FATTN_F64    ? "f64"
                             : dtype == FATTN_F32  ? "f32"
                             : dtype == FATTN_BF16 ? "bf16"
                                                   : "f16";
    printf("%s, %d of %d columns, %d at once%s: %.1e of %.1e, padding %g: %s\n", name, (int)V, (int)width, pack,
           keeps ? ", kept" : "", worst, most, padding, good ? "ok" : "WRONG");
    return !good;
}

int main(void) {
    static const int64_t sizes[][2] = {{19, 24},   {24, 24},     {1, 128},    {257, 384},
                                       {130, 256}, {1024, 1024}, {1001, 1024}};
    int wrong = 0;
    for (const int32_t dtype : {FATTN_F32, FATTN_BF16, FATTN_F16, FATTN_F64})
        for (size_t n = 0; n < sizeof sizes / sizeof *sizes; ++n)
            for (const int pack : {1, (int)FATTNI_PACK})
                for (int keeps = 0; keeps <= (dtype == FATTN_BF16 && pack > 1); ++keeps)
                    wrong += check(dtype, sizes[n][0], sizes[n][1], pack, keeps);
    return wrong != 0;
}
