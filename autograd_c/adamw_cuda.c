/* AdamW on the device: two kernels per parameter and one between, all enqueued. */
#include "adamw.h"
#include "adamw_cuda.h"
#include "cuda_launch.h"

extern void fattn_adamw_norm(fattni_adamw_args);
extern void fattn_adamw_begin(fattni_adamw_args);
extern void fattn_adamw_set(fattni_adamw_args);
extern void fattn_adamw_update_f32(fattni_adamw_args);
extern void fattn_adamw_update_f64(fattni_adamw_args);

enum { ROW_THREADS = 256 };

static fattni_adamw_args args_of(const fattn_adamw *a, const fattni_adamw_slot *s) {
    const fattn_param *const p = s->param;
    const bool decays = !(p->flags & FATTN_PARAM_NO_DECAY);
    return (fattni_adamw_args){.value = p->value.data,
                               .grad = p->grad.data,
                               .m = s->m.data,
                               .v = s->v.data,
                               .master = s->master.data,
                               .state = a->device,
                               .partial = a->partial + s->first_chunk,
                               .count = s->count,
                               .beta1 = (double)a->opt.beta1,
                               .beta2 = (double)a->opt.beta2,
                               .eps = (double)a->opt.eps,
                               .weight_decay = decays ? (double)a->opt.weight_decay : 0,
                               .value_dtype = p->value.dtype,
                               .grad_dtype = p->grad.dtype,
                               .frozen = fattni_is_frozen(p)};
}

static int64_t chunks_of(const fattni_adamw_slot *s) {
    return s->frozen ? 0 : fattni_ceil_div(s->count, FATTNI_ADAMW_CHUNK);
}

fattn_status fattni_cuda_adamw_step(fattn_adamw *a) {
    for (int i = 0; i < a->n; ++i) {
        const fattni_adamw_args x = args_of(a, &a->slots[i]);
        FATTNI_TRY(
            FATTNI_START(a->ctx, fattn_adamw_norm, chunks_of(&a->slots[i]), ROW_THREADS, &x));
    }
    const fattni_adamw_args all = {.state = a->device,
                                   .partial = a->partial,
                                   .chunks = a->chunks,
                                   .beta1 = (double)a->opt.beta1,
                                   .beta2 = (double)a->opt.beta2,
                                   .limit = (double)a->opt.max_grad_norm};
    FATTNI_TRY(FATTNI_START(a->ctx, fattn_adamw_begin, 1, ROW_THREADS, &all));
    for (int i = 0; i < a->n; ++i) {
        const fattni_adamw_args x = args_of(a, &a->slots[i]);
        const int64_t chunks = x.frozen ? 0 : chunks_of(&a->slots[i]);
        if (x.value_dtype == FATTN_F64)
            FATTNI_TRY(FATTNI_START(a->ctx, fattn_adamw_update_f64, chunks, ROW_THREADS, &x));
        else
            FATTNI_TRY(FATTNI_START(a->ctx, fattn_adamw_update_f32, chunks, ROW_THREADS, &x));
    }
    return FATTN_OK;
}

fattn_status fattni_cuda_adamw_set(fattn_adamw *a, double lr, int64_t step) {
    const fattni_adamw_args x = {.state = a->device, .lr = lr, .step = step};
    return FATTNI_START(a->ctx, fattn_adamw_set, 1, 1, &x);
}

fattn_status fattni_cuda_adamw_read(const fattn_adamw *a, fattni_adamw_state *out) {
    FATTNI_TRY(fattni_cuda_move(a->ctx, out, a->device, sizeof *out));
    return fattni_cuda_sync(a->ctx);
}
