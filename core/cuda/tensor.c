/* Copies between host and device use a row-major staging buffer on each side that is not dense; values are
   converted on the device. */
#include "core/cuda/tensor.h"

#include "core/cuda/device.h"
#include "core/tensor/host.h"

extern void fattn_copy(fattni_copy_args);
extern void fattn_copy_fours(fattni_copy_args);
extern void fattn_copies(fattni_copies_args);
_Static_assert(sizeof(fattni_copies_args) <= 4096, "the limit of a kernel's argument");
extern void fattn_normal(fattni_normal_args);
extern void fattn_mask(fattni_mask_args);

static size_t bytes_of(const fattn_tensor *t) {
    return (size_t)fattn_tensor_numel(t) * fattn_dtype_size((fattn_dtype)t->dtype);
}

/* Whether the driver's 2D copy can do it, which is fastest: long rows, and a pitch within its limit. */
static bool is_rows(const fattni_grid *g) {
    bool fits = g->n == 2 && g->shape[1] >= 1024;
    for (int k = 0; k < 2 && fits; ++k)
        fits = g->stride[1][k] == 1 && g->stride[0][k] >= g->shape[1] && g->stride[0][k] <= INT32_MAX / 8;
    return fits;
}

/* Whether both operands consist of pieces of `each` elements, aligned to their size: then the grid becomes one of
   pieces. */
static bool by_pieces(fattni_grid *g, int64_t each, const void *to, size_t to_size, const void *from,
                      size_t from_size) {
    const uintptr_t places[2] = {(uintptr_t)to % (to_size * (size_t)each),
                                 (uintptr_t)from % (from_size * (size_t)each)};
    const int last = g->n - 1;
    if (last < 0 || places[0] || places[1] || g->shape[last] % each) return false;
    for (int k = 0; k < 2; ++k) {
        if (g->stride[last][k] != 1) return false;
        for (int d = 0; d < last; ++d)
            if (g->stride[d][k] % each) return false;
    }
    for (int d = 0; d < last; ++d) g->stride[d][0] /= each, g->stride[d][1] /= each;
    g->shape[last] /= each;
    g->count /= each;
    return true;
}

static bool is_float_of_32_or_16(int32_t t) { return t == FATTN_F32 || t == FATTN_F16 || t == FATTN_BF16; }

/* A conversion or an addition, which is in F32 then: four elements per thread where that is possible. */
static fattn_status convert_elements(fattn_ctx *ctx, fattni_copy_args *a) {
    const size_t to_size = fattn_dtype_size((fattn_dtype)a->to_dtype);
    const size_t from_size = fattn_dtype_size((fattn_dtype)a->from_dtype);
    const bool floats = is_float_of_32_or_16(a->to_dtype) && is_float_of_32_or_16(a->from_dtype);
    if (floats && (!a->add || a->to_dtype == FATTN_F32) && by_pieces(&a->grid, 4, a->to, to_size, a->from, from_size))
        return FATTNI_START(ctx, fattn_copy_fours, fattni_grid_blocks(&a->grid, 1), FATTNI_GRID_THREADS, a);
    return FATTNI_START(ctx, fattn_copy, fattni_grid_blocks(&a->grid, 1), FATTNI_GRID_THREADS, a);
}

static int64_t blocks_of_pieces(const fattni_grid *g) { return fattni_grid_blocks(g, FATTNI_COPY_PIECES); }

/* Up to here a kernel copies, on the device and from or to page-locked memory: it starts while the one before it ends.
   The driver's copy waits for the kernel before it, and the next kernel waits for the copy: the four copies between two
   training steps take 31 us, by kernels 13. */
enum { FEW_BYTES = 256 << 10 };

/* Both on the device. */
static fattn_status convert(fattn_ctx *ctx, const fattn_tensor *dst, const fattn_tensor *src) {
    const fattn_tensor *const t[] = {dst, src};
    fattni_copy_args a = {.grid = fattni_grid_of(t, 2),
                          .to = dst->data,
                          .from = src->data,
                          .to_dtype = dst->dtype,
                          .from_dtype = src->dtype};
    const fattni_grid *g = &a.grid;
    const bool is_dense = g->n == 0 || (g->n == 1 && g->stride[0][0] == 1 && g->stride[0][1] == 1);
    if (dst->dtype == src->dtype && is_dense && bytes_of(dst) > FEW_BYTES)
        return fattni_cuda_move(ctx, dst->data, src->data, bytes_of(dst));
    const int64_t size = (int64_t)fattn_dtype_size((fattn_dtype)dst->dtype);
    if (dst->dtype == src->dtype && is_rows(g))
        return fattni_cuda_move_rows(ctx, dst->data, g->stride[0][0] * size, src->data, g->stride[0][1] * size,
                                     (size_t)(g->shape[1] * size), g->shape[0]);
    const fattni_copy_pair alone = {*dst, *src};
    return dst->dtype == src->dtype ? fattni_cuda_copy_pairs(ctx, &alone, 1) : convert_elements(ctx, &a);
}

static fattn_status start_copies(fattn_ctx *ctx, fattni_copies_args *a, int64_t most_blocks) {
    if (a->n == 0) return FATTN_OK;
    const int64_t grid = fattni_min(a->blocks, most_blocks);
    const fattn_status s = FATTNI_START(ctx, fattn_copies, grid, FATTNI_GRID_THREADS, a);
    a->n = 0, a->blocks = 0;
    return s;
}

fattn_status fattni_cuda_copy_pairs(fattn_ctx *ctx, const fattni_copy_pair *pairs, int n) {
    return fattni_cuda_copy_pairs_on(ctx, pairs, n, INT32_MAX);
}

fattn_status fattni_cuda_copy_pairs_on(fattn_ctx *ctx, const fattni_copy_pair *pairs, int n, int64_t blocks) {
    fattni_copies_args a = {.n = 0};
    for (int i = 0; i < n; ++i) {
        const fattn_tensor *const to = &pairs[i].to, *const from = &pairs[i].from, *const t[] = {to, from};
        const size_t size = fattn_dtype_size((fattn_dtype)to->dtype);
        fattni_copy_args one = {.grid = fattni_grid_of(t, 2),
                                .to = to->data,
                                .from = from->data,
                                .to_dtype = to->dtype,
                                .from_dtype = from->dtype};
        if (one.grid.count == 0) continue;
        if (!by_pieces(&one.grid, 16 / (int64_t)size, to->data, size, from->data, size)) {
            FATTNI_TRY(FATTNI_START(ctx, fattn_copy, fattni_grid_blocks(&one.grid, 1), FATTNI_GRID_THREADS, &one));
            continue;
        }
        const int64_t more = blocks_of_pieces(&one.grid);
        if (a.n == FATTNI_COPIES) FATTNI_TRY(start_copies(ctx, &a, blocks));
        a.grid[a.n] = one.grid, a.to[a.n] = to->data, a.from[a.n] = from->data, a.first_block[a.n] = a.blocks;
        a.n += 1;
        a.blocks += more;
    }
    return start_copies(ctx, &a, blocks);
}

fattn_status fattni_cuda_add(fattn_ctx *ctx, const fattn_tensor *dst, const fattn_tensor *src) {
    const fattn_tensor *const t[] = {dst, src};
    fattni_copy_args a = {.grid = fattni_grid_of(t, 2),
                          .to = dst->data,
                          .from = src->data,
                          .to_dtype = dst->dtype,
                          .from_dtype = src->dtype,
                          .add = true};
    return convert_elements(ctx, &a);
}

/* t's shape, row-major, on the device of `like`. */
static fattn_tensor dense(const fattn_tensor *t, fattn_dtype dtype, const fattn_tensor *like, void *data) {
    return fattn_tensor_view(data, dtype, (fattn_device)like->device, like->device_id, t->ndim, t->shape);
}

static fattn_status to_device(fattn_ctx *ctx, const fattn_tensor *dst, const fattn_tensor *src) {
    const size_t bytes = bytes_of(src);
    const bool direct = fattni_is_row_major(dst) && dst->dtype == src->dtype;
    void *on_host = NULL, *on_device = NULL;
    fattn_tensor from = *src;
    fattn_status s = FATTN_OK;
    if (!fattni_is_row_major(src)) {
        s = fattni_host_alloc(ctx, bytes, &on_host);
        if (s) goto done;
        from = dense(src, (fattn_dtype)src->dtype, src, on_host);
        s = fattni_host_copy(ctx, &from, src);
    }
    if (!s && !direct) s = fattni_alloc(ctx, bytes, &on_device);
    if (!s) s = fattni_cuda_move(ctx, direct ? dst->data : on_device, from.data, bytes);
    if (!s && !direct) {
        const fattn_tensor arrived = dense(src, (fattn_dtype)src->dtype, dst, on_device);
        s = convert(ctx, dst, &arrived);
    }
    if (!s) s = fattni_cuda_sync(ctx);
done:
    fattni_free(ctx, on_device, bytes);
    fattni_host_free(ctx, on_host, bytes);
    return s;
}

static fattn_status to_host(fattn_ctx *ctx, const fattn_tensor *dst, const fattn_tensor *src) {
    const size_t bytes = bytes_of(dst);
    const bool direct = fattni_is_row_major(src) && dst->dtype == src->dtype;
    void *on_host = NULL, *on_device = NULL;
    fattn_status s = FATTN_OK;
    if (!direct) {
        s = fattni_alloc(ctx, bytes, &on_device);
        if (s) goto done;
        const fattn_tensor leaving = dense(dst, (fattn_dtype)dst->dtype, src, on_device);
        s = convert(ctx, &leaving, src);
    }
    if (!s && !fattni_is_row_major(dst)) s = fattni_host_alloc(ctx, bytes, &on_host);
    if (!s) s = fattni_cuda_move(ctx, on_host ? on_host : dst->data, direct ? src->data : on_device, bytes);
    if (!s) s = fattni_cuda_sync(ctx);
    if (!s && on_host) {
        const fattn_tensor arrived = dense(dst, (fattn_dtype)dst->dtype, dst, on_host);
        s = fattni_host_copy(ctx, dst, &arrived);
    }
done:
    fattni_free(ctx, on_device, bytes);
    fattni_host_free(ctx, on_host, bytes);
    return s;
}

fattn_status fattni_cuda_copy(fattn_ctx *ctx, const fattn_tensor *dst, const fattn_tensor *src) {
    const bool from_host = src->device == FATTN_CPU, into_host = dst->device == FATTN_CPU;
    if (from_host && into_host) return fattni_host_copy(ctx, dst, src);
    if (from_host) return to_device(ctx, dst, src);
    if (into_host) return to_host(ctx, dst, src);
    return convert(ctx, dst, src);
}

fattn_status fattni_cuda_normal(fattn_ctx *ctx, const fattn_tensor *dst, double mean, double std, fattn_rng rng) {
    if (dst->device == FATTN_CPU) return fattni_host_normal(ctx, dst, mean, std, rng);
    const fattni_normal_args a = {
        .grid = fattni_grid_of(&dst, 1), .to = dst->data, .dtype = dst->dtype, .mean = mean, .std = std, .rng = rng};
    return FATTNI_START(ctx, fattn_normal, fattni_grid_blocks(&a.grid, 1), FATTNI_GRID_THREADS, &a);
}

/* Patches that intersect the positions [pos0, pos0 + n). */
static int64_t patches(int64_t pos0, int64_t n) { return fattni_ceil_div(pos0 + n, 16) - pos0 / 16; }

fattn_status fattni_cuda_mask(fattn_ctx *ctx, const fattni_problem *p, uint8_t *keep, const int64_t stride[4],
                              int64_t rows, int64_t columns) {
    const fattni_mask_args a = {
        .keep = keep,
        .stride = {stride[0], stride[1], stride[2], stride[3]},
        .step = p->rng_step.p,
        .seed = p->rng.seed,
        .rows = rows,
        .columns = columns,
        .q_pos0 = p->q_pos0,
        .k_pos0 = p->k_pos0,
        .patches_q = patches(p->q_pos0, rows),
        .patches_k = patches(p->k_pos0, columns),
        .planes = p->B * p->Hq,
        .stream = p->rng.stream,
        .plane0 = fattni_dropout_plane(p, 0, 0),
        .plane_heads = (uint32_t)p->rng_heads,
        .T = p->drop_T,
        .Hq = (int32_t)p->Hq,
    };
    const int64_t warps = a.planes * a.patches_q * a.patches_k;
    return FATTNI_START(ctx, fattn_mask, fattni_ceil_div(warps * 32, FATTNI_GRID_THREADS), FATTNI_GRID_THREADS, &a);
}
