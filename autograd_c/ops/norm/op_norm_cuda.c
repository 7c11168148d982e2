/* Rows of layernorm and rmsnorm on the device: in the registers of a warp or a block where they fit, else read again
   for each sum; sums over rows in parts, in the same pass as dx where a warp has the row in float. */
#include "autograd_c/ops/op_cuda.h"
#include "autograd_c/ops/norm/op_norm.h"
#include "core/tensor/rows.h"

FATTNI_KERNEL(norm, fattni_norm_args);
FATTNI_KERNEL(norm_back, fattni_norm_args);
extern void fattn_norm_warp_f64(fattni_norm_args);
FATTNI_KERNEL(norm_warp_back, fattni_norm_args);
FATTNI_KERNEL(norm_block1, fattni_norm_args);
FATTNI_KERNEL(norm_block2, fattni_norm_args);
FATTNI_KERNEL(norm_block4, fattni_norm_args);
FATTNI_KERNEL(norm_block1_back, fattni_norm_args);
FATTNI_KERNEL(norm_block2_back, fattni_norm_args);
FATTNI_KERNEL(norm_block4_back, fattni_norm_args);
FATTNI_KERNEL(norm_sums, fattni_norm_args);
FATTNI_KERNEL(norm_pack_sums, fattni_norm_args);
/* Of rows of at most so many columns, in float. */
#define ROWS_KERNELS(X)                                                                                                \
    X(128)                                                                                                             \
    X(256)                                                                                                             \
    X(384)                                                                                                             \
    X(512)                                                                                                             \
    X(768)                                                                                                             \
    X(1024)
#define OF_TYPES(name) name##_bf16(fattni_norm_args), name##_f16(fattni_norm_args), name##_f32(fattni_norm_args)
#define X(columns)                                                                                                     \
    extern void fattn_norm_rows##columns(fattni_norm_args), OF_TYPES(fattn_rmsnorm_back##columns),                     \
        OF_TYPES(fattn_layernorm_back##columns), OF_TYPES(fattn_layernorm_sum##columns);
ROWS_KERNELS(X)
#undef X
#undef OF_TYPES
extern void fattn_norm_few768(fattni_norm_args), fattn_norm_few1024(fattni_norm_args);

enum { X = FATTNI_NORM_X, GAIN = FATTNI_NORM_GAIN, BIAS = FATTNI_NORM_BIAS };
enum { ROW_THREADS = 256, WARPS = ROW_THREADS / 32, ROWS_OF_A_PART = 16, FEW_ROWS = 1024 };
/* Rows of a warp, in float, by their columns. */
typedef struct warp_rows {
    int64_t columns; /* at most */
    void (*forward)(fattni_norm_args), (*few)(fattni_norm_args), (*rms_back[3])(fattni_norm_args),
        (*layer_back[3])(fattni_norm_args), (*layer_sum[3])(fattni_norm_args); /* few: NULL: as others */
    int32_t loops;        /* blocks of an SM whose warps have several BF16 rows; 0: one row each */
    int32_t back_threads; /* of a block of back and sum; each has BF16, F16, F32 */
    int64_t parts;        /* blocks of back, at most: as many as a large GPU's SMs hold at a time */
} warp_rows;
#define OF_TYPES(name)                                                                                                 \
    { name##_bf16, name##_f16, name##_f32 }
#define BACK(columns)                                                                                                  \
    OF_TYPES(fattn_rmsnorm_back##columns), OF_TYPES(fattn_layernorm_back##columns),                                    \
        OF_TYPES(fattn_layernorm_sum##columns)
static const warp_rows all_warp_rows[] = {
    {128, fattn_norm_rows128, NULL, BACK(128), 3, 384, 264},
    {256, fattn_norm_rows256, NULL, BACK(256), 3, 256, 264},
    {384, fattn_norm_rows384, NULL, BACK(384), 3, 256, 264},
    {512, fattn_norm_rows512, NULL, BACK(512), 2, 384, 132},
    {768, fattn_norm_rows768, fattn_norm_few768, BACK(768), 0, 256, 132},
    {1024, fattn_norm_rows1024, fattn_norm_few1024, BACK(1024), 0, 256, 132},
};
#undef BACK
#undef OF_TYPES
enum { WARP_ROWS = sizeof all_warp_rows / sizeof *all_warp_rows };
static const warp_rows *warp_rows_of(int64_t columns) {
    int n = 0;
    while (n < WARP_ROWS - 1 && columns > all_warp_rows[n].columns) ++n;
    return &all_warp_rows[n];
}

static int64_t parts_of(int64_t rows, int64_t columns) {
    return fattni_max(1, fattni_min(warp_rows_of(columns)->parts, rows / ROWS_OF_A_PART));
}

static void plan(fattn_op_call *c) {
    const fattni_norm *const n = c->attr;
    const fattni_rows x = fattni_rows_of(&c->in[X]);
    const size_t real = c->in[X].dtype == FATTN_F64 ? sizeof(double) : sizeof(float);
    const bool sums = c->wanted[GAIN] || (c->n_in > BIAS && c->wanted[BIAS]);
    c->saved_bytes = (size_t)x.count * real * (n->centred ? 2 : 1);
    if (sums) c->bwd_workspace = (size_t)(parts_of(x.count, x.columns) * (n->sum ? 3 : 2) * x.columns) * sizeof(double);
}

static fattni_norm_args args_of(const fattn_op_call *c) {
    const fattni_norm *const n = c->attr;
    const fattni_rows x = fattni_rows_of(&c->in[X]);
    return (fattni_norm_args){.x = fattni_walk_of(&c->in[X]),
                              .y = fattni_walk_of(&c->out[0]),
                              .in = fattni_operand_of(&c->in[X]),
                              .out = fattni_operand_of(&c->out[0]),
                              .gain = fattni_operand_of(&c->in[GAIN]),
                              .bias = c->n_in > BIAS ? fattni_operand_of(&c->in[BIAS]) : (fattni_operand){0},
                              .statistics = c->saved,
                              .eps = (double)n->eps,
                              .rows = x.count,
                              .C = x.columns,
                              .parts = parts_of(x.count, x.columns),
                              .centred = n->centred};
}

/* Who holds a row of x, y or dy, and dx: a warp, or a block in as many packs per thread; or it is read again. */
enum holder { WARP, BLOCK1, BLOCK2, BLOCK4, NOBODY };
static enum holder holder_of(const fattn_op_call *c, const fattn_tensor *y, const fattn_tensor *dx) {
    const fattn_tensor *const bias = c->n_in > BIAS ? &c->in[BIAS] : NULL;
    const bool packs = fattni_rows_in_packs(&c->in[X]) && fattni_rows_in_packs(y) &&
                       fattni_rows_in_packs(&c->in[GAIN]) && (!bias || !bias->data || fattni_rows_in_packs(bias)) &&
                       (!dx || fattni_rows_in_packs(dx));
    const int64_t C = c->in[GAIN].shape[0], block = ROW_THREADS * FATTNI_PACK;
    if (!packs || C > 4 * block) return NOBODY;
    if (C <= 32 * FATTNI_PACK * FATTNI_NORM_PACKS) return WARP;
    return C <= block ? BLOCK1 : C <= 2 * block ? BLOCK2 : BLOCK4;
}

static int32_t dtype_of(const fattni_norm_args *a) {
    return fattni_common_dtype((const fattni_operand *[]){&a->in, &a->out, &a->gain, &a->bias, &a->d_in}, 5);
}

/* y of rows that a warp holds in float. A warp takes several, where they are many and BF16. */
static fattn_status start_warp_rows(fattn_ctx *ctx, const fattni_norm_args *a) {
    const warp_rows *const w = warp_rows_of(a->C);
    const bool few = w->few && a->rows <= FEW_ROWS;
    int64_t blocks = fattni_ceil_div(a->rows, WARPS);
    if (w->loops && a->dtype == FATTN_BF16) blocks = fattni_min(blocks, (int64_t)w->loops * ctx->gpu.sms);
    return fattni_cuda_start(ctx, "norm", (fattni_cuda_any)(few ? w->few : w->forward), blocks, ROW_THREADS, 0, a);
}

/* y, or with `back` dx alone. */
static fattn_status start_rows(fattn_ctx *ctx, enum holder holder, bool back, const fattni_norm_args *a) {
#define BOTH(name)                                                                                                     \
    { fattn_##name##_f32, fattn_##name##_f64 }
    static void (*const kernels[][2][2])(fattni_norm_args) = {
        [WARP] = {{NULL, fattn_norm_warp_f64}, BOTH(norm_warp_back)},
        [BLOCK1] = {BOTH(norm_block1), BOTH(norm_block1_back)},
        [BLOCK2] = {BOTH(norm_block2), BOTH(norm_block2_back)},
        [BLOCK4] = {BOTH(norm_block4), BOTH(norm_block4_back)},
        [NOBODY] = {BOTH(norm), BOTH(norm_back)},
    };
#undef BOTH
    if (holder == WARP && !back && a->in.dtype != FATTN_F64) return start_warp_rows(ctx, a);
    const fattni_cuda_any kernel = (fattni_cuda_any)kernels[holder][back][a->in.dtype == FATTN_F64];
    const int64_t blocks = holder == WARP ? fattni_ceil_div(a->rows, WARPS) : a->rows;
    return fattni_cuda_start(ctx, back ? "norm_back" : "norm", kernel, blocks, ROW_THREADS, 0, a);
}

static fattn_status forward(fattn_op_call *c) {
    fattni_norm_args a = args_of(c);
    a.dtype = dtype_of(&a);
    return start_rows(c->ctx, holder_of(c, &c->out[0], NULL), false, &a);
}

/* The sums over rows alone. */
static fattn_status sums_back(fattn_op_call *c, const fattni_norm_args *a) {
    const bool packs = fattni_rows_in_packs(&c->in[X]) && fattni_rows_in_packs(&c->d_out[0]);
    const int64_t columns = packs ? 32 * FATTNI_PACK : ROW_THREADS; /* of a block */
    const int64_t blocks = fattni_ceil_div(a->C, columns) * a->parts;
    if (packs) return FATTNI_START_REAL(c->ctx, a->in.dtype, norm_pack_sums, blocks, ROW_THREADS, a);
    return FATTNI_START_REAL(c->ctx, a->in.dtype, norm_sums, blocks, ROW_THREADS, a);
}

/* dx and the sums over rows in one pass, where all tensors have one type; with `third` also that of dx. */
static fattn_status both_back(fattn_op_call *c, const fattni_norm_args *a, bool third) {
    const warp_rows *const w = warp_rows_of(a->C);
    void (*const *const kernels)(fattni_norm_args) = third ? w->layer_sum : a->centred ? w->layer_back : w->rms_back;
    const int type = a->dtype == FATTN_BF16 ? 0 : a->dtype == FATTN_F16 ? 1 : 2;
    return fattni_cuda_start(c->ctx, "norm_back", (fattni_cuda_any)kernels[type], a->parts, w->back_threads, 0, a);
}

static fattn_status backward(fattn_op_call *c) {
    fattni_norm_args a = args_of(c);
    fattni_norm_sum *const sum = ((const fattni_norm *)c->attr)->sum;
    const fattn_tensor *const d[] = {&c->d_in[GAIN], c->n_in > BIAS ? &c->d_in[BIAS] : NULL};
    const bool rows = c->d_in[X].data, sums = d[0]->data || (d[1] && d[1]->data);
    a.out = fattni_operand_of(&c->d_out[0]);
    if (rows) {
        a.dx = fattni_walk_of(&c->d_in[X]);
        a.d_in = fattni_operand_of(&c->d_in[X]);
        a.fresh = c->d_in_fresh[X];
    }
    if (sums) a.partial = c->workspace;
    a.dtype = dtype_of(&a);
    const enum holder holder = rows ? holder_of(c, &c->d_out[0], &c->d_in[X]) : NOBODY;
    const bool both = rows && sums && a.dtype && a.dtype != FATTN_F64 && holder == WARP, third = both && sum;
    if (both) {
        FATTNI_TRY(both_back(c, &a, third));
    } else {
        if (rows) FATTNI_TRY(start_rows(c->ctx, holder, true, &a));
        if (sums) FATTNI_TRY(sums_back(c, &a));
    }
    fattni_part_sum of[3];
    int n = 0;
    for (int which = 0; which < 2; ++which)
        if (d[which] && d[which]->data)
            of[n++] = (fattni_part_sum){d[which], a.partial + which * a.C, c->d_in_fresh[GAIN + which]};
    if (third) {
        of[n++] = (fattni_part_sum){sum->d, a.partial + 2 * a.C, sum->fresh};
        sum->done = true;
    }
    return n ? fattni_cuda_add_parts(c->ctx, of, n, a.parts, (third ? 3 : 2) * a.C, 1) : FATTN_OK;
}

const fattni_code fattni_norm_cuda = {plan, forward, backward};
