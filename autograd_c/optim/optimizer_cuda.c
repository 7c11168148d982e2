/* AdamW and SGD on the device: a launch for the norm and one for the update of many parameters each, and where ranks
   exchange norms one between, all enqueued. */
#include "autograd_c/optim/optimizer.h"
#include "autograd_c/optim/optimizer_cuda.h"
#include "core/cuda/launch.h"

extern void fattn_optimizer_norm(fattni_optimizer_args);
extern void fattn_optimizer_begin(fattni_optimizer_args);
extern void fattn_optimizer_set(fattni_optimizer_set_args);
extern void fattn_adamw_update_f32(fattni_optimizer_args);
extern void fattn_adamw_update_f64(fattni_optimizer_args);
extern void fattn_sgd_update_f32(fattni_optimizer_args);
extern void fattn_sgd_update_f64(fattni_optimizer_args);

_Static_assert(sizeof(fattni_optimizer_args) <= 4096, "the limit of a kernel's argument");

enum { ROW_THREADS = 256 };

static bool is_aligned(const void *p, size_t to) { return (uintptr_t)p % to == 0; }

/* Where element 0 would be: the tensor begins at element `begin`. */
static void *origin_of(const fattn_tensor *t, int64_t begin) {
    const size_t before = (size_t)begin * fattn_dtype_size((fattn_dtype)t->dtype);
    return t->data ? (void *)((uintptr_t)t->data - before) : NULL;
}

static fattni_optimizer_part part_of(const fattni_optimizer *a, const fattni_optimizer_slot *s) {
    const fattn_param *const p = s->param;
    return (fattni_optimizer_part){
        .value = p->value.data,
        .grad = p->grad.data,
        .m = origin_of(&s->m, s->begin),
        .v = origin_of(&s->v, s->begin),
        .master = origin_of(&s->master, s->begin),
        .begin = s->begin,
        .end = s->end,
        .value_dtype = (int8_t)p->value.dtype,
        .grad_dtype = (int8_t)p->grad.dtype,
        .param = (int32_t)(s - a->slots),
        .narrow = s->is_half && !s->has_master,
        .decays = !(p->flags & FATTN_PARAM_NO_DECAY),
        .frozen = fattni_is_frozen(p),
        .keeps = fattni_is_one_pass(p),
        .packs = p->grad.dtype == FATTN_F32 && is_aligned(p->grad.data, 16) &&
                 is_aligned(p->value.data, s->is_half ? 8 : 16),
    };
}

static bool is_wide(const fattni_optimizer_slot *s) { return s->param->value.dtype == FATTN_F64; }

/* Of a slot in a launch: chunks with a norm, or pieces to update here. */
static int64_t blocks_of(const fattni_optimizer_slot *s, bool update) {
    if (!update) return s->frozen ? 0 : fattni_ceil_div(s->count, FATTNI_OPTIMIZER_CHUNK);
    return fattni_is_frozen(s->param) ? 0 : fattni_ceil_div(s->end - s->begin, FATTNI_OPTIMIZER_PIECE);
}

/* The first slot from n on that has blocks; NULL: none. */
static const fattni_optimizer_slot *slot_after(const fattni_optimizer *a, int n, bool update) {
    while (n < a->n && blocks_of(&a->slots[n], update) == 0) ++n;
    return n < a->n ? &a->slots[n] : NULL;
}

/* `first` and those behind it that one launch can take; *first becomes the one after them, or NULL. Returns the
   launch's blocks. */
static int64_t gather(const fattni_optimizer *a, const fattni_optimizer_slot **first, bool update,
                      fattni_optimizer_args *out) {
    const fattni_optimizer_slot *s = *first;
    const bool wide = is_wide(s);
    int64_t blocks = 0;
    out->first_chunk = s->first_chunk;
    for (out->parts = 0; s && out->parts < FATTNI_OPTIMIZER_PARTS && is_wide(s) == wide; ++out->parts) {
        out->part[out->parts] = part_of(a, s);
        out->first[out->parts] = (int32_t)fattni_min(blocks, INT32_MAX); /* with more, the launch fails */
        blocks += blocks_of(s, update);
        s = slot_after(a, (int)(s - a->slots) + 1, update);
    }
    *first = s;
    return blocks;
}

static fattn_status start_update(const fattni_optimizer *a, bool wide, int64_t blocks, const fattni_optimizer_args *x) {
    if (a->rule.is_sgd && wide) return FATTNI_START(a->ctx, fattn_sgd_update_f64, blocks, ROW_THREADS, x);
    if (a->rule.is_sgd) return FATTNI_START(a->ctx, fattn_sgd_update_f32, blocks, ROW_THREADS, x);
    if (wide) return FATTNI_START(a->ctx, fattn_adamw_update_f64, blocks, ROW_THREADS, x);
    return FATTNI_START(a->ctx, fattn_adamw_update_f32, blocks, ROW_THREADS, x);
}

static fattn_status step(fattni_optimizer *a) {
    fattni_optimizer_args x = {.state = a->device,
                               .partial = a->partial,
                               .chunks = a->chunks,
                               .beta1 = a->rule.beta1,
                               .beta2 = a->rule.beta2,
                               .eps = a->rule.eps,
                               .weight_decay = a->rule.weight_decay,
                               .limit = a->rule.max_grad_norm,
                               .scaling = a->rule.scaling,
                               .nesterov = a->rule.nesterov,
                               .stochastic = (a->rule.flags & FATTN_OPTIM_STOCHASTIC_ROUNDING) != 0,
                               .seed = a->rule.seed};
    for (const fattni_optimizer_slot *next = slot_after(a, 0, false); next;) {
        const int64_t blocks = gather(a, &next, false, &x);
        x.decides = !next && !a->owners;
        FATTNI_TRY(FATTNI_START(a->ctx, fattn_optimizer_norm, blocks, ROW_THREADS, &x));
    }
    FATTNI_TRY(fattni_optimizer_share_norms(a));
    if (!x.decides) FATTNI_TRY(FATTNI_START(a->ctx, fattn_optimizer_begin, 1, ROW_THREADS, &x));
    for (const fattni_optimizer_slot *next = slot_after(a, 0, true); next;) {
        const bool wide = is_wide(next);
        const int64_t blocks = gather(a, &next, true, &x);
        FATTNI_TRY(start_update(a, wide, blocks, &x));
    }
    return FATTN_OK;
}

static fattn_status set(fattni_optimizer *a, const fattni_optimizer_change *c) {
    const fattni_optimizer_set_args x = {.state = a->device, .change = *c};
    return FATTNI_START(a->ctx, fattn_optimizer_set, 1, 1, &x);
}

static fattn_status open_state(fattni_optimizer *a) {
    void *p;
    FATTNI_TRY(fattni_alloc(a->ctx, sizeof *a->device, &p));
    a->device = p;
    FATTNI_TRY(fattni_cuda_zero(a->ctx, a->device, sizeof *a->device));
    const fattni_optimizer_state *const s = &a->own;
    return set(a, &(fattni_optimizer_change){s->lr, s->step, s->finite, s->skipped, s->scale, 0});
}

static void close_state(fattni_optimizer *a) { fattni_free(a->ctx, a->device, sizeof *a->device); }

static fattn_status read_state(const fattni_optimizer *a, fattni_optimizer_state *out) {
    FATTNI_TRY(fattni_cuda_move(a->ctx, out, a->device, sizeof *out));
    return fattni_cuda_sync(a->ctx);
}

const fattni_optimizer_code fattni_optimizer_cuda = {open_state, close_state, step, set, read_state};
