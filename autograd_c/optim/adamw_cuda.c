/* AdamW on the device: a launch for the norm and one for the update of many parameters each, and one
   between, all enqueued. */
#include "autograd_c/optim/adamw.h"
#include "autograd_c/optim/adamw_cuda.h"
#include "core/cuda/launch.h"

extern void fattn_adamw_norm(fattni_adamw_args);
extern void fattn_adamw_begin(fattni_adamw_args);
extern void fattn_adamw_set(fattni_adamw_args);
extern void fattn_adamw_update_f32(fattni_adamw_args);
extern void fattn_adamw_update_f64(fattni_adamw_args);

enum { ROW_THREADS = 256 };

static bool is_aligned(const void *p, size_t to) { return (uintptr_t)p % to == 0; }

static fattni_adamw_part part_of(const fattni_adamw_slot *s) {
    const fattn_param *const p = s->param;
    const bool is_half = p->value.dtype == FATTN_F16 || p->value.dtype == FATTN_BF16;
    return (fattni_adamw_part){
        .value = p->value.data,
        .grad = p->grad.data,
        .m = s->m.data,
        .v = s->v.data,
        .master = s->master.data,
        .count = s->count,
        .first_chunk = s->first_chunk,
        .value_dtype = p->value.dtype,
        .grad_dtype = p->grad.dtype,
        .decays = !(p->flags & FATTN_PARAM_NO_DECAY),
        .frozen = fattni_is_frozen(p),
        .packs =
            p->grad.dtype == FATTN_F32 && is_aligned(p->grad.data, 16) && is_aligned(p->value.data, is_half ? 8 : 16),
    };
}

static bool is_wide(const fattni_adamw_slot *s) { return s->param->value.dtype == FATTN_F64; }

/* The slots from *next on that one launch can take; *next becomes the one after them. */
static void gather(const fattn_adamw *a, int *next, fattni_adamw_args *out) {
    const bool wide = is_wide(&a->slots[*next]);
    out->parts = 0;
    out->first_chunk = a->slots[*next].first_chunk;
    out->chunks = 0;
    for (; *next < a->n && out->parts < FATTNI_ADAMW_PARTS; ++*next) {
        const fattni_adamw_slot *const s = &a->slots[*next];
        if (s->frozen || s->count == 0) continue;
        if (is_wide(s) != wide) return;
        out->part[out->parts++] = part_of(s);
        out->chunks += fattni_ceil_div(s->count, FATTNI_ADAMW_CHUNK);
    }
}

static fattn_status step(fattn_adamw *a) {
    fattni_adamw_args x = {.state = a->device,
                           .partial = a->partial,
                           .beta1 = (double)a->opt.beta1,
                           .beta2 = (double)a->opt.beta2,
                           .eps = (double)a->opt.eps,
                           .weight_decay = (double)a->opt.weight_decay,
                           .limit = (double)a->opt.max_grad_norm};
    for (int next = 0; next < a->n;) {
        gather(a, &next, &x);
        FATTNI_TRY(FATTNI_START(a->ctx, fattn_adamw_norm, x.chunks, ROW_THREADS, &x));
    }
    x.chunks = a->chunks;
    FATTNI_TRY(FATTNI_START(a->ctx, fattn_adamw_begin, 1, ROW_THREADS, &x));
    for (int next = 0; next < a->n;) {
        const bool wide = is_wide(&a->slots[next]);
        gather(a, &next, &x);
        if (wide)
            FATTNI_TRY(FATTNI_START(a->ctx, fattn_adamw_update_f64, x.chunks, ROW_THREADS, &x));
        else
            FATTNI_TRY(FATTNI_START(a->ctx, fattn_adamw_update_f32, x.chunks, ROW_THREADS, &x));
    }
    return FATTN_OK;
}

static fattn_status set(fattn_adamw *a, double lr, int64_t steps) {
    const fattni_adamw_args x = {.state = a->device, .lr = lr, .step = steps};
    return FATTNI_START(a->ctx, fattn_adamw_set, 1, 1, &x);
}

static fattn_status open_state(fattn_adamw *a) {
    void *p;
    FATTNI_TRY(fattni_alloc(a->ctx, sizeof *a->device, &p));
    a->device = p;
    return set(a, a->own.lr, a->own.step);
}

static void close_state(fattn_adamw *a) { fattni_free(a->ctx, a->device, sizeof *a->device); }

static fattn_status read_state(const fattn_adamw *a, fattni_adamw_state *out) {
    FATTNI_TRY(fattni_cuda_move(a->ctx, out, a->device, sizeof *out));
    return fattni_cuda_sync(a->ctx);
}

const fattni_adamw_code fattni_adamw_cuda = {open_state, close_state, step, set, read_state};
