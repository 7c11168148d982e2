/* Sums of columns (autograd_c/ops/elementwise/op_each.cu), of all rows at once and in parts, and of rows by id
   (autograd_c/ops/sequence/op_embedding.cu) on the host, against sums in double. */
#include "real.h"

#include <vector_functions.h>

#undef shared
#define __CUDACC__
static int __ffs(int x) { return __builtin_ffs(x); }
#include "autograd_c/ops/op_cuda.h"
#include "core/device/any_dtype.cuh"
namespace sums { /* op_pack.inc is in both */
#include "autograd_c/ops/elementwise/op_each.cu"
}
namespace embedding {
#include "autograd_c/ops/sequence/op_embedding.cu"
}
#undef __CUDACC__

#include <random>
#include <vector>

static std::mt19937 numbers(1);

static size_t size_of(int32_t dtype) { return dtype == FATTN_F64 ? 8 : dtype == FATTN_F32 ? 4 : 2; }

/* n elements of dtype, normal numbers; `as` is what they are in double. */
static std::vector<uint4> draw(int32_t dtype, int64_t n, std::vector<double> *as) {
    std::normal_distribution<double> normal;
    std::vector<uint4> memory(size_of(dtype) * (size_t)n / 16 + 1);
    as->clear();
    for (int64_t i = 0; i < n; ++i) {
        if (dtype == FATTN_F64)
            ((double *)memory.data())[i] = normal(numbers);
        else
            store_f32(memory.data(), dtype, i, (float)normal(numbers));
        as->push_back(load_f64(memory.data(), dtype, i));
    }
    return memory;
}

/* Each kernel for an operand of F64, and for others. */
typedef void (*kernel_pair[2])(void);
static fattni_sum_args sum_args;
static fattni_parts_args parts_args;
static fattni_embedding_args embedding_args;
static const kernel_pair columns = {[] { sums::fattn_sum_columns_f32(sum_args); },
                                    [] { sums::fattn_sum_columns_f64(sum_args); }},
                         tall = {[] { sums::fattn_sum_tall_columns_f32(sum_args); },
                                 [] { sums::fattn_sum_tall_columns_f64(sum_args); }},
                         adds = {[] { sums::fattn_add_parts_f32(parts_args); },
                                 [] { sums::fattn_add_parts_f64(parts_args); }},
                         scatter = {[] { embedding::fattn_embedding_add_f32(embedding_args); },
                                    [] { embedding::fattn_embedding_add_f64(embedding_args); }},
                         gather = {[] { embedding::fattn_embedding_gather_f32(embedding_args); },
                                   [] { embedding::fattn_embedding_gather_f64(embedding_args); }};
static void scatter_fours(void) { embedding::fattn_embedding_add4(embedding_args); }

static void run(void (*kernel)(void), int64_t blocks, int threads) {
    for (int64_t n = 0; n < blocks; ++n) machine_run((int)(blocks - 1 - n), 1, threads, (unsigned)n, kernel);
}

static const char *name_of(int32_t dtype) {
    return dtype == FATTN_F64 ? "f64" : dtype == FATTN_F32 ? "f32" : dtype == FATTN_BF16 ? "bf16" : "f16";
}

/* Errors: F32 results are rounded once, to a part of the sum of sizes; groups of four terms of 16 bits before that. */
static int judge(const char *what, int32_t dtype, int64_t rows, int64_t kept, const std::vector<double> &want,
                 const std::vector<double> &size, const void *got) {
    const int32_t result = dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
    const double most = dtype == FATTN_F64 ? 1e-14 : 0x1p-22;
    double worst = 0;
    for (size_t e = 0; e < want.size(); ++e) {
        const double x = load_f64(got, result, (int64_t)e);
        worst = fmax(worst, x == x ? fabs(x - want[e]) / (1 + size[e]) : INFINITY);
    }
    printf("%s, %s, %d x %d: %.1e of %.1e: %s\n", what, name_of(dtype), (int)rows, (int)kept, worst, most,
           worst <= most ? "ok" : "WRONG");
    return worst > most;
}

static int check_sums(int32_t dtype, int64_t rows, int64_t kept, int64_t parts, bool is_tall, bool with_y, bool fresh) {
    const int64_t pitch = kept + FATTNI_PACK;
    const bool wide = dtype == FATTN_F64;
    std::vector<double> x, y, want, size;
    const std::vector<uint4> xs = draw(dtype, rows * pitch, &x), ys = draw(dtype, rows * pitch, &y);
    std::vector<uint4> d = draw(wide ? FATTN_F64 : FATTN_F32, kept, &want);
    std::vector<double> partial((size_t)(parts * kept), NAN);
    const double divisor = 3;
    for (int64_t e = 0; e < kept; ++e) {
        double sum = 0, all = 0;
        for (int64_t r = 0; r < rows; ++r) {
            const double term = x[(size_t)(r * pitch + e)] * (with_y ? y[(size_t)(r * pitch + e)] : 1);
            sum += term, all += fabs(term);
        }
        want[(size_t)e] = sum / divisor + (fresh ? 0 : want[(size_t)e]);
        size.push_back(all);
    }
    memset(&sum_args, 0, sizeof sum_args);
    fattni_grid *const k = &sum_args.kept, *const r = &sum_args.reduced;
    k->n = r->n = 1, k->count = k->shape[0] = kept, r->count = r->shape[0] = rows;
    for (int n = 0; n < 3; ++n) k->stride[0][n] = 1, r->stride[0][n] = n ? pitch : 0;
    sum_args.d = {d.data(), wide ? FATTN_F64 : FATTN_F32, 0}, sum_args.x = {(void *)xs.data(), dtype, 0};
    if (with_y) sum_args.y = {(void *)ys.data(), dtype, 0};
    sum_args.partial = partial.data(), sum_args.divisor = divisor, sum_args.parts = parts, sum_args.fresh = fresh;
    sum_args.dtype = dtype;
    const int64_t width = is_tall ? FATTNI_TALL_COLUMNS : FATTNI_BLOCK_COLUMNS;
    run((is_tall ? tall : columns)[wide], (kept + width - 1) / width * parts,
        is_tall ? FATTNI_TALL_THREADS : ROW_THREADS);
    if (parts > 1) {
        memset(&parts_args, 0, sizeof parts_args);
        auto *const of = &parts_args.of[0];
        of->grid = *k, of->d = sum_args.d, of->partial = partial.data(), of->fresh = fresh;
        of->blocks = (int32_t)((kept + 31) / 32);
        parts_args.parts = parts, parts_args.stride = kept, parts_args.divisor = divisor;
        run(adds[wide], of->blocks, FATTNI_PARTS_THREADS);
    }
    return judge(is_tall ? "all rows" : parts > 1 ? "parts" : "one part", dtype, rows, kept, want, size, d.data());
}

/* Parts of n sums in one launch, a column each of the partial results' rows. */
static int check_parts(int32_t dtype, int n, int64_t parts) {
    static const int64_t kept[FATTNI_PART_SUMS] = {40, 8, 264};
    const bool wide = dtype == FATTN_F64;
    const int64_t stride = 320;
    std::vector<double> partial, want[FATTNI_PART_SUMS], size;
    draw(FATTN_F64, parts * stride, &partial);
    std::vector<uint4> d[FATTNI_PART_SUMS];
    memset(&parts_args, 0, sizeof parts_args);
    parts_args.parts = parts, parts_args.stride = stride, parts_args.divisor = 1;
    int64_t first = 0, blocks = 0;
    for (int k = 0; k < n; first += kept[k++]) {
        d[k] = draw(wide ? FATTN_F64 : FATTN_F32, kept[k], &want[k]);
        auto *const of = &parts_args.of[k];
        of->grid.n = 1, of->grid.count = of->grid.shape[0] = kept[k], of->grid.stride[0][0] = 1;
        of->d = {d[k].data(), wide ? FATTN_F64 : FATTN_F32, 0};
        of->partial = partial.data() + first, of->fresh = k % 2;
        of->blocks = (int32_t)((kept[k] + 31) / 32), blocks += of->blocks;
        for (int64_t e = 0; e < kept[k]; ++e) {
            if (of->fresh) want[k][(size_t)e] = 0;
            for (int64_t part = 0; part < parts; ++part)
                want[k][(size_t)e] += partial[(size_t)(part * stride + first + e)];
        }
    }
    run(adds[wide], blocks, FATTNI_PARTS_THREADS);
    int wrong = 0;
    for (int k = 0; k < n; ++k) {
        size.assign((size_t)kept[k], (double)parts);
        wrong += judge("sums side by side", dtype, parts, kept[k], want[k], size, d[k].data());
    }
    return wrong;
}

/* how: 0 an element for each thread, 1 four, 2 in one order. */
static int check_rows_by_id(int32_t dtype, int64_t rows, int64_t C, int how) {
    const int64_t V = 5;
    const bool wide = dtype == FATTN_F64;
    std::vector<double> dy, want, size;
    const std::vector<uint4> dys = draw(dtype, rows * C, &dy);
    std::vector<uint4> table = draw(wide ? FATTN_F64 : FATTN_F32, V * C, &want);
    std::vector<int32_t> id;
    for (int64_t r = 0; r < rows; ++r) id.push_back((int32_t)(7 * r % (V + 2)) - 1); /* two of them outside */
    for (const double x : want) size.push_back(fabs(x));
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < C && id[(size_t)r] >= 0 && id[(size_t)r] < V; ++i) {
            want[(size_t)(id[(size_t)r] * C + i)] += dy[(size_t)(r * C + i)];
            size[(size_t)(id[(size_t)r] * C + i)] += rows * fabs(dy[(size_t)(r * C + i)]); /* each sum is rounded */
        }
    memset(&embedding_args, 0, sizeof embedding_args);
    fattni_walk *const walks[] = {&embedding_args.table, &embedding_args.ids, &embedding_args.out};
    for (fattni_walk *w : walks) w->n = 1, w->shape[0] = w == walks[0] ? V : rows, w->stride[0] = C;
    embedding_args.ids.shape[0] = 1, embedding_args.id_columns = rows, embedding_args.id_step = 1;
    embedding_args.rows = {(void *)dys.data(), dtype, 0};
    embedding_args.entries = {table.data(), wide ? FATTN_F64 : FATTN_F32, 0};
    embedding_args.id = id.data(), embedding_args.R = rows, embedding_args.V = V, embedding_args.C = C;
    embedding_args.pack = 1;
    const int64_t each = ROW_THREADS * (how == 1 ? 4 : 1), blocks = how == 2 ? rows : (rows * C + each - 1) / each;
    run(how == 0 ? scatter[wide] : how == 1 ? scatter_fours : gather[wide], blocks, ROW_THREADS);
    const char *const names[] = {"rows by id", "rows by id, fours", "rows by id, in order"};
    return judge(names[how], dtype, rows, C, want, size, table.data());
}

int main(void) {
    int wrong = 0;
    for (const int32_t dtype : {FATTN_F32, FATTN_BF16, FATTN_F16, FATTN_F64}) {
        for (const bool with_y : {false, true})
            for (const int64_t kept : {8, 40, 264}) {
                wrong += check_sums(dtype, 131, kept, 1, true, with_y, kept == 8);
                wrong += check_sums(dtype, 2048, kept, 1, true, with_y, kept != 8);
                wrong += check_sums(dtype, 19, kept, 1, false, with_y, kept == 8);
                wrong += check_sums(dtype, 331, kept, 5, false, with_y, kept != 8);
            }
        for (int n = 1; n <= FATTNI_PART_SUMS; ++n) wrong += check_parts(dtype, n, 67);
        for (const int64_t C : {3, 8, 136})
            for (int how = 0; how < 3; ++how)
                if (how != 1 || (C % 8 == 0 && dtype != FATTN_F64)) wrong += check_rows_by_id(dtype, 37, C, how);
    }
    return wrong != 0;
}
