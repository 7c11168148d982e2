/* Attention calls for rows and keys of the whole sequences. */
#include "core/attention/kernel.h"
#include "core/context_parallel/cp.h"

const fattn_tensor *fattni_cp_slice(const fattn_tensor *t, int dim, int64_t begin, int64_t end, fattn_tensor *out) {
    if (!t) return NULL;
    *out = fattn_tensor_slice(t, dim, begin, end);
    return out;
}

fattn_attention_io fattni_cp_take_rows(const fattn_attention_io *given, int64_t q0, int64_t q1, int64_t k0, int64_t k1,
                                       fattn_tensor t[FATTNI_CP_ROWS]) {
    fattn_attention_io io = *given;
    const fattn_tensor **const of_rows[] = {&io.q, &io.o, &io.lse, &io.d_o, &io.d_lse, &io.dq};
    const fattn_tensor **const of_keys[] = {&io.k, &io.v, &io.dk, &io.dv};
    for (int i = 0; i < 6; ++i) *of_rows[i] = fattni_cp_slice(*of_rows[i], 2, q0, q1, t++);
    for (int i = 0; i < 4; ++i) *of_keys[i] = fattni_cp_slice(*of_keys[i], 2, k0, k1, t++);
    return io;
}

fattn_status fattni_cp_call_attention(const fattni_cp_call *c, bool backward, const fattn_attention_params *p,
                                      const fattn_attention_io *io) {
    fattn_ctx *const ctx = c->cp->ctx;
    fattni_call call;
    FATTNI_TRY(fattni_prepare(ctx, p, io, backward ? FATTNI_BWD : FATTNI_FWD,
                              backward ? fattni_bwd_table : fattni_fwd_table, &call));
    if (call.plan.saved)
        return fattn_ctx_fail(ctx, FATTN_E_UNSUPPORTED,
                              "cp: %s stores N x N, which no rank has; this device has no fused kernel for the call",
                              call.plan.name);
    call.p.workspace_bytes = call.plan.workspace;
    FATTNI_TRY(fattni_cp_room(c->cp, FATTNI_CP_WORKSPACE + c->cp->on_stream, call.plan.workspace, &call.p.workspace));
    return fattni_run(ctx, &call);
}

int64_t fattni_cp_full_parts(const fattni_cp_call *c, int64_t heads, int64_t rows) {
    return c->B * heads * (rows / 128) / (7 * fattni_max(1, c->cp->sms));
}

/* Some row of the q rows from position i on may see some key of the k rows from j on. */
static bool reaches(const fattni_cp_call *c, int64_t i, int64_t rows, int64_t j, int64_t keys) {
    const fattn_attention_params *const p = &c->p;
    const int64_t last_i = i + rows - 1, last_j = j + keys - 1;
    if (c->causal && j > last_i) return false;
    if (!(p->flags & FATTN_WINDOW)) return true;
    if (p->window_left >= 0 && last_j < i - p->window_left) return false;
    return p->window_right < 0 || j <= last_i + p->window_right;
}

fattn_status fattni_cp_attend(const fattni_cp_call *c, bool backward, const fattn_attention_io *given,
                              const fattni_cp_span *q, const fattni_cp_span *k, uint32_t flags) {
    const fattn_cp *const cp = c->cp;
    for (int s = 0; s < cp->n_sequences; ++s) {
        const int64_t start = cp->starts[s], end = cp->starts[s + 1];
        const int64_t q0 = fattni_max(q->begin, start), q1 = fattni_min(q->end, end);
        const int64_t k0 = fattni_max(k->begin, start), k1 = fattni_min(k->end, end);
        if (q0 >= q1 || k0 >= k1 || !reaches(c, q0 - start, q1 - q0, k0 - start, k1 - k0)) continue;
        const int64_t qa = q->at + q0 - q->begin, qb = qa + q1 - q0, ka = k->at + k0 - k->begin, kb = ka + k1 - k0;
        fattn_tensor t[FATTNI_CP_ROWS];
        const fattn_attention_io io = fattni_cp_take_rows(given, qa, qb, ka, kb, t);
        fattn_attention_params p = c->p;
        p.flags &= ~(uint32_t)(FATTN_CAUSAL | FATTN_CAUSAL_TOP_LEFT);
        p.flags |= flags | (c->causal ? FATTN_CAUSAL_TOP_LEFT : FATTN_TOP_LEFT);
        p.q_pos0 = q0 - start, p.k_pos0 = k0 - start;
        if (cp->packed) p.rng_batch0 += s;
        FATTNI_TRY(fattni_cp_call_attention(c, backward, &p, &io));
    }
    return FATTN_OK;
}

fattn_status fattni_cp_attend_plain(const fattni_cp_call *c, bool backward, const fattn_attention_io *given,
                                    uint32_t flags, bool causal) {
    fattn_attention_params p = c->p;
    fattn_attention_io io = *given;
    p.flags &= ~(uint32_t)(FATTN_CAUSAL | FATTN_CAUSAL_TOP_LEFT);
    p.flags |= flags | (causal ? FATTN_CAUSAL : 0u);
    return fattni_cp_call_attention(c, backward, &p, &io);
}
