/* Forward in FlashAttention-1's order (Dao et al. 2022), to be compared: the outer loop runs over
   blocks of keys, the inner one over blocks of rows, so that O, max and sum go to memory and back
   once per block of keys; parallel over sequences and heads only. The tiles are those of fwd_cpu.c.

   O lies in the caller's tensor, not yet divided by the sum, or in the workspace when o is of a
   16-bit dtype; max and sum in the workspace. That is for all rows of the head that a thread works
   on. */
#include "fwd/cpu/fwd_row_block.h"
#include "core/attention/kernel.h"

#include <stdio.h>

typedef struct forward {
    const fattni_problem *p;
    const fattni_cpu_kernels *k;
    fattni_fwd_layout layout;
    size_t max, sum, o; /* of all rows: after layout.bytes */
    bool own_o;
    size_t bytes;
} forward;

static forward plan_forward(const fattn_ctx *ctx, const fattni_problem *p) {
    forward f = {.p = p, .k = fattni_cpu_kernels_of(ctx, p->dtype)};
    f.layout = fattni_fwd_lay_out(p, f.k, 1);
    const size_t rows = (size_t)fattni_ceil_div(p->Sq, f.k->rows) * fattni_row_bytes(f.k);
    f.own_o = p->o.dtype != (int32_t)f.k->dtype;
    f.bytes = f.layout.bytes;
    f.max = fattni_append(&f.bytes, rows);
    f.sum = fattni_append(&f.bytes, rows);
    f.o = fattni_append(&f.bytes, f.own_o ? rows * (size_t)fattni_operand_width(f.k, p->Dv) : 0);
    return f;
}

static fattni_fwd_rows block_of(const forward *f, const fattni_sequence *seq, int64_t b, int64_t h, int64_t i0,
                                char *scratch) {
    fattni_fwd_rows r = fattni_fwd_rows_of(f->p, f->k, &f->layout, seq, b, h, i0, scratch, 0);
    const size_t state = (size_t)(i0 / f->k->rows) * fattni_row_bytes(f->k);
    r.max = scratch + f->max + state;
    r.sum = scratch + f->sum + state;
    if (f->own_o) r.o = scratch + f->o + state * (size_t)fattni_operand_width(f->k, f->p->Dv);
    return r;
}

static void load_o(const forward *f, const fattni_fwd_rows *r) {
    const fattni_array *const o = &f->p->o;
    if (f->own_o) return;
    const void *const rows = fattni_at(o, r->seq->batch, r->h, r->seq->q0 + r->i0);
    f->k->pack(r->rows, f->p->Dv, f->k->dtype, rows, o->s[2], NULL, r->o);
}

static void store_o(const forward *f, const fattni_fwd_rows *r) {
    const fattni_array *const o = &f->p->o;
    if (f->own_o) return;
    void *const rows = fattni_at(o, r->seq->batch, r->h, r->seq->q0 + r->i0);
    f->k->unpack(0, r->rows, f->p->Dv, r->o, NULL, rows, o->s[2]);
}

/* Task: one head. */
static void attend(void *arg, int64_t task, int thread) {
    const forward *const f = arg;
    const fattni_problem *const p = f->p;
    const int64_t b = task / p->Hq, h = task % p->Hq, block = f->k->rows;
    const fattni_sequence seq = fattni_sequence_of(p, b);
    char *const scratch = (char *)p->workspace + (size_t)thread * f->bytes;
    for (int64_t i0 = 0; i0 < seq.band.Sq; i0 += block) {
        const fattni_fwd_rows r = block_of(f, &seq, b, h, i0, scratch);
        fattni_fwd_start(&r);
        store_o(f, &r);
    }
    for (int64_t j = 0; j < seq.band.Sk; j += FATTNI_TILE_KEYS) {
        const fattni_range keys = {j, fattni_min(j + FATTNI_TILE_KEYS, seq.band.Sk)};
        const fattni_range rows = fattni_band_rows(&seq.band, keys.begin, keys.end);
        if (rows.begin >= rows.end) continue;
        const fattni_fwd_rows head = block_of(f, &seq, b, h, 0, scratch);
        const fattni_fwd_keys operands = fattni_fwd_load_keys(p, f->k, &seq, h / p->group, keys, &head.room);
        for (int64_t i0 = rows.begin / block * block; i0 < rows.end; i0 += block) {
            const fattni_fwd_rows r = block_of(f, &seq, b, h, i0, scratch);
            fattni_fwd_load_q(&r);
            load_o(f, &r);
            fattni_fwd_tile(&r, keys, &operands);
            store_o(f, &r);
        }
    }
    for (int64_t i0 = 0; i0 < seq.band.Sq; i0 += block) {
        const fattni_fwd_rows r = block_of(f, &seq, b, h, i0, scratch);
        load_o(f, &r);
        fattni_fwd_finish(&r);
    }
}

static const char *plan(const fattn_ctx *ctx, const fattni_problem *p, fattni_kernel_plan *out) {
    const forward f = plan_forward(ctx, p);
    out->workspace = (size_t)fattni_min(ctx->cpu_threads, p->B * p->Hq) * f.bytes;
    out->deterministic = true;
    snprintf(out->name, sizeof out->name, "fattn_fwd_flash1_%s_%s", f.k->isa, fattn_dtype_name(p->dtype));
    return NULL;
}

static fattn_status run(fattn_ctx *ctx, const fattni_problem *p, const fattni_kernel_plan *plan) {
    (void)plan;
    forward f = plan_forward(ctx, p);
    const fattni_stage stage = {p->B * p->Hq, attend};
    fattni_cpu_stages(ctx, ctx->cpu_threads, f.k, &stage, 1, &f);
    return FATTN_OK;
}

const fattni_kernel fattni_fwd_flash1 = {
    .family = "fattn_fwd_flash1",
    .device = FATTN_CPU,
    .algorithms = 1u << FATTN_ALGO_FLASH1,
    .plan = plan,
    .run = run,
};
