#include "core/cpu/gemm_bf16.h"

#include "core/base/device.h"
#include "core/base/isa.h"
#include "core/cpu/with_onednn.h"
#include "core/tensor/numeric.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

extern const fattni_bf16_library fattni_onednn;
/* The first one is used. */
static const fattni_bf16_library *const libraries[] = {FATTNI_WITH_ONEDNN(&fattni_onednn, ) NULL};

/* Products below this are faster as F32 numbers (bench/results/cpu_linear_bf16.txt). */
static const double LEAST_PRODUCT = 32 * 32 * 32;

static fattn_status open(fattn_ctx *ctx) {
    if (ctx->bf16.opened) return FATTN_OK;
    ctx->bf16.opened = true;
    /* An arch_cap below AMX on a CPU with AMX keeps F32 products: oneDNN would use AMX. */
    if (ctx->isa < FATTNI_ISA_AMX && fattni_cpu_isa() >= FATTNI_ISA_AMX) return FATTN_OK;
    const fattn_status s = libraries[0]->open(ctx, &ctx->bf16);
    ctx->bf16.opened = !s;
    FATTNI_TRY(s);
    if (!ctx->bf16.engine && ctx->log) {
        char text[128];
        snprintf(text, sizeof text,
                 "oneDNN does not use %s in this process: linear and matmul of BF16 tensors multiply F32 numbers",
                 ctx->isa >= FATTNI_ISA_AMX ? "AMX" : "AVX512-BF16");
        ctx->log(ctx->log_user, FATTN_LOG_WARN, text);
    }
    return FATTN_OK;
}

fattn_status fattni_bf16_takes(fattn_ctx *ctx, int64_t M, int64_t N, int64_t K, bool *takes) {
    *takes = false;
    if (!libraries[0] || ctx->isa < FATTNI_ISA_AVX512BF16 || ctx->flags & FATTN_CTX_F32_PRODUCTS) return FATTN_OK;
    if ((double)M * (double)N * (double)K < LEAST_PRODUCT) return FATTN_OK;
    ctx->ops->use(ctx, FATTN_BF16);
    if (ctx->isa < FATTNI_ISA_AVX512BF16) return FATTN_OK; /* the operating system has refused */
    FATTNI_TRY(open(ctx));
    *takes = ctx->bf16.engine != NULL;
    return FATTN_OK;
}

void fattni_bf16_close(fattn_ctx *ctx) {
    if (ctx->bf16.engine) libraries[0]->close(&ctx->bf16);
}

/* Sizes of a block of C, largest first. With few blocks K is split, which costs less than smaller blocks do. */
static const struct { int64_t rows, columns; } block_sizes[] = {{256, 512}, {256, 256}, {128, 256}};
enum { BLOCK_SIZES = 3, ENOUGH_TASKS = 16, LEAST_K = 512 };

typedef struct blocking {
    int64_t rows, columns, across, blocks; /* of one product */
    int64_t parts;                         /* of K */
} blocking;

static blocking blocking_of(const fattni_gemm *g, int64_t count) {
    blocking s = {.parts = 1};
    for (int i = 0; i < BLOCK_SIZES && s.blocks * s.parts * count < ENOUGH_TASKS; ++i) {
        s.rows = fattni_max(1, fattni_min(block_sizes[i].rows, g->M));
        s.columns = fattni_max(1, fattni_min(block_sizes[i].columns, g->N));
        s.across = fattni_ceil_div(g->N, s.columns);
        s.blocks = fattni_ceil_div(g->M, s.rows) * s.across;
        if (count == 1 && s.blocks > 0)
            s.parts = fattni_max(1, fattni_min(fattni_ceil_div(ENOUGH_TASKS, s.blocks), g->K / LEAST_K));
    }
    return s;
}

typedef struct job {
    const fattni_bf16_products *p;
    const fattn_ctx *ctx;
    blocking s;
    float *sums;         /* a block for each thread, or with parts [parts,M,N] */
    char *scratch;       /* the library's, for each thread */
    size_t scratch_room; /* of one thread */
    atomic_bool no_memory;
} job;

static int64_t most_threads(const fattn_ctx *ctx, const blocking *s, int64_t count) {
    return fattni_min(ctx->cpu_threads, s->blocks * s->parts * count);
}

static size_t room(size_t bytes) { return (bytes + FATTNI_ALIGN - 1) / FATTNI_ALIGN * FATTNI_ALIGN; }

static size_t scratch_room(const fattn_ctx *ctx) { return room(ctx->bf16.scratch); }

static size_t sums_room(const blocking *s, const fattni_gemm *g, int64_t threads) {
    const int64_t numbers = s->parts > 1 ? s->parts * g->M * g->N : threads * s->rows * s->columns;
    return room((size_t)numbers * sizeof(float));
}

size_t fattni_bf16_workspace(const fattn_ctx *ctx, const fattni_gemm *first, int64_t count) {
    const blocking s = blocking_of(first, count);
    const int64_t threads = most_threads(ctx, &s, count);
    return sums_room(&s, first, threads) + (size_t)threads * scratch_room(ctx);
}

/* A block of C, or of a part's sums: c is where it begins. */
typedef struct block {
    int64_t m, n, rows, columns;
} block;

static block block_of(const job *j, int64_t index) {
    const fattni_gemm *const g = &j->p->first;
    const int64_t m = index / j->s.across * j->s.rows, n = index % j->s.across * j->s.columns;
    return (block){m, n, fattni_min(j->s.rows, g->M - m), fattni_min(j->s.columns, g->N - n)};
}

/* sums = the block's terms k0 <= k < k1. */
static void multiply(job *j, const block *b, int64_t batch, int64_t k0, int64_t k1, float *sums, int64_t pitch,
                     int thread) {
    const fattni_gemm *const g = &j->p->first;
    if (k0 == k1) {
        for (int64_t m = 0; m < b->rows; ++m) memset(sums + m * pitch, 0, (size_t)b->columns * sizeof *sums);
        return;
    }
    fattni_gemm part = *g;
    part.M = b->rows, part.N = b->columns, part.K = k1 - k0;
    part.a =
        (const uint16_t *)g->a + fattni_row(&j->p->a, batch) + (g->trans_a ? k0 * g->lda + b->m : b->m * g->lda + k0);
    part.b =
        (const uint16_t *)g->b + fattni_row(&j->p->b, batch) + (g->trans_b ? b->n * g->ldb + k0 : k0 * g->ldb + b->n);
    part.c = sums, part.ldc = pitch;
    if (!libraries[0]->multiply(&j->ctx->bf16, &part, j->scratch + (size_t)thread * j->scratch_room))
        j->no_memory = true;
}

enum { PIECE = 256 };

/* Some neighbours of a row of C: c = (c +) row + the parts' sums, which lie `step` numbers apart. */
FATTNI_TARGET_avx512 static void put_piece(const fattni_gemm *g, void *c, const uint16_t *row, const float *sums,
                                           int64_t parts, int64_t step, int64_t n) {
    float x[PIECE];
    uint16_t *const narrow = c;
    float *const wide = c;
    memcpy(x, sums, (size_t)n * sizeof *x);
    for (int64_t p = 1; p < parts; ++p)
        for (int64_t i = 0; i < n; ++i) x[i] += sums[p * step + i];
    if (row)
        for (int64_t i = 0; i < n; ++i) x[i] += fattni_bf16_to_float(row[i]);
    if (g->dtype == FATTN_F32 && g->beta == 0)
        memcpy(wide, x, (size_t)n * sizeof *x);
    else if (g->dtype == FATTN_F32)
        for (int64_t i = 0; i < n; ++i) wide[i] += x[i];
    else if (g->beta == 0)
        for (int64_t i = 0; i < n; ++i) narrow[i] = fattni_float_to_bf16(x[i]);
    else
        for (int64_t i = 0; i < n; ++i) narrow[i] = fattni_float_to_bf16(fattni_bf16_to_float(narrow[i]) + x[i]);
}

static void put(const job *j, const block *b, int64_t batch, const float *sums, int64_t pitch) {
    const fattni_gemm *const g = &j->p->first;
    const int64_t size = (int64_t)fattn_dtype_size(g->dtype), at = fattni_row(&j->p->c, batch);
    for (int64_t m = 0; m < b->rows; ++m)
        for (int64_t n = 0; n < b->columns; n += PIECE) {
            char *const c = (char *)g->c + (at + (b->m + m) * g->ldc + b->n + n) * size;
            const uint16_t *const row = g->row ? (const uint16_t *)g->row + b->n + n : NULL;
            put_piece(g, c, row, sums + m * pitch + n, j->s.parts, g->M * g->N, fattni_min(PIECE, b->columns - n));
        }
}

static void run_block(void *arg, int64_t task, int thread) {
    job *const j = arg;
    const block b = block_of(j, task % j->s.blocks);
    float *const sums = j->sums + thread * j->s.rows * j->s.columns;
    multiply(j, &b, task / j->s.blocks, 0, j->p->first.K, sums, b.columns, thread);
    put(j, &b, task / j->s.blocks, sums, b.columns);
}

static void run_part(void *arg, int64_t task, int thread) {
    job *const j = arg;
    const fattni_gemm *const g = &j->p->first;
    const block b = block_of(j, task % j->s.blocks);
    const int64_t part = task / j->s.blocks;
    float *const sums = j->sums + (part * g->M + b.m) * g->N + b.n;
    multiply(j, &b, 0, g->K * part / j->s.parts, g->K * (part + 1) / j->s.parts, sums, g->N, thread);
}

enum { ROWS_PER_SUM = 32 };

static void put_rows(void *arg, int64_t task, int thread) {
    (void)thread;
    const job *const j = arg;
    const fattni_gemm *const g = &j->p->first;
    const int64_t m = task * ROWS_PER_SUM;
    const block b = {m, 0, fattni_min(ROWS_PER_SUM, g->M - m), g->N};
    put(j, &b, 0, j->sums + m * g->N, g->N);
}

fattn_status fattni_bf16_multiply(fattn_ctx *ctx, const fattni_bf16_products *p, void *workspace) {
    const int64_t count = p->c.count;
    job j = {.p = p, .ctx = ctx, .s = blocking_of(&p->first, count), .scratch_room = scratch_room(ctx)};
    const int64_t threads = most_threads(ctx, &j.s, count);
    if (threads <= 0) return FATTN_OK;
    j.sums = workspace;
    j.scratch = (char *)workspace + sums_room(&j.s, &p->first, threads);
    if (j.s.parts > 1) {
        fattni_parallel(ctx, j.s.parts * j.s.blocks, run_part, &j);
        fattni_parallel(ctx, fattni_ceil_div(p->first.M, ROWS_PER_SUM), put_rows, &j);
    } else {
        fattni_parallel(ctx, count * j.s.blocks, run_block, &j);
    }
    ctx->bf16.products += count;
    if (!j.no_memory) return FATTN_OK;
    return fattn_ctx_fail(ctx, FATTN_E_NOMEM, "oneDNN has no memory for a product of %lld x %lld results",
                          (long long)p->first.M, (long long)p->first.N);
}

/* ---- sums of columns: parts of the rows for tasks, each with all columns ---- */

enum { MOST_PARTS = 64, ROWS_PER_PART = 256, COLUMNS = 512 };

typedef struct sum_job {
    const uint16_t *x;
    int64_t R, N, pitch, parts;
    double *sums; /* [parts,N] */
    void *d;
    fattn_dtype dtype;
    bool fresh;
} sum_job;

static int64_t parts_of(int64_t R) { return fattni_max(1, fattni_min(MOST_PARTS, R / ROWS_PER_PART)); }

FATTNI_TARGET_avx512 static void add_rows(const uint16_t *restrict x, int64_t rows, int64_t pitch, double *restrict sum,
                                          int64_t n) {
    for (int64_t i = 0; i < n; ++i) sum[i] = 0;
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < n; ++i) sum[i] += (double)fattni_bf16_to_float(x[r * pitch + i]);
}

static void sum_part(void *arg, int64_t task, int thread) {
    (void)thread;
    const sum_job *const j = arg;
    const int64_t begin = j->R * task / j->parts, end = j->R * (task + 1) / j->parts;
    for (int64_t n = 0; n < j->N; n += COLUMNS)
        add_rows(j->x + begin * j->pitch + n, end - begin, j->pitch, j->sums + task * j->N + n,
                 fattni_min(COLUMNS, j->N - n));
}

static void put_sums(void *arg, int64_t task, int thread) {
    (void)thread;
    const sum_job *const j = arg;
    for (int64_t n = task * COLUMNS; n < fattni_min(j->N, (task + 1) * COLUMNS); ++n) {
        double sum = j->fresh ? 0 : fattni_load(j->d, (int32_t)j->dtype, n);
        for (int64_t p = 0; p < j->parts; ++p) sum += j->sums[p * j->N + n];
        fattni_store(j->d, (int32_t)j->dtype, n, sum);
    }
}

size_t fattni_bf16_column_sums_workspace(int64_t R, int64_t N) { return (size_t)(parts_of(R) * N) * sizeof(double); }

void fattni_bf16_column_sums(const fattn_ctx *ctx, const uint16_t *x, int64_t R, int64_t N, int64_t pitch, void *d,
                             fattn_dtype dtype, bool fresh, void *workspace) {
    sum_job j = {x, R, N, pitch, parts_of(R), workspace, d, dtype, fresh};
    fattni_parallel(ctx, j.parts, sum_part, &j);
    fattni_parallel(ctx, fattni_ceil_div(N, COLUMNS), put_sums, &j);
}

FATTNI_TARGET_avx512 void fattni_bf16_split(const float *restrict x, uint16_t *restrict high, uint16_t *restrict low,
                                            int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const uint16_t h = fattni_float_to_bf16(x[i]);
        const float rest = x[i] - fattni_bf16_to_float(h);
        high[i] = h;
        low[i] = rest - rest == 0 ? fattni_float_to_bf16(rest) : (uint16_t)0;
    }
}
