#include "call.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int call_arch(void) {
    const char *const arch = getenv("FATTN_TEST_ARCH");
    return arch ? atoi(arch) : 0;
}
bool call_has_bf16(void) {
    int major = 0;
    if (call_arch()) return call_arch() >= 80;
    return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) != cudaSuccess || major >= 8;
}

void call_must(fattn_ctx *ctx, fattn_status s, const char *what) {
    if (s == FATTN_OK) return;
    fprintf(stderr, "%s: %s: %s\n", what, fattn_status_name(s), fattn_ctx_error(ctx));
    exit(1);
}

static void *room(size_t bytes) {
    void *const p = malloc(bytes ? bytes : 1);
    if (p) return p;
    fprintf(stderr, "no memory\n");
    exit(1);
}

/* A row-major copy in host memory of another dtype. */
static fattn_tensor host_like(const fattn_tensor *t, fattn_dtype dtype) {
    fattn_tensor h = fattn_tensor_view(NULL, dtype, FATTN_CPU, 0, t->ndim, t->shape);
    h.data = room((size_t)fattn_tensor_numel(t) * fattn_dtype_size(dtype));
    return h;
}

double *call_read(call *c, enum call_tensor id) {
    const fattn_tensor h = host_like(&c->t[id], FATTN_F64);
    call_must(c->ctx, fattn_ctx_sync(c->ctx), "sync");
    if (fattn_tensor_numel(&h)) call_must(c->ctx, fattn_tensor_copy(c->ctx, &h, &c->t[id]), "copy");
    return h.data;
}

void call_write(call *c, enum call_tensor id, const double *x) {
    fattn_tensor h = fattn_tensor_view(NULL, FATTN_F64, FATTN_CPU, 0, c->t[id].ndim, c->t[id].shape);
    h.data = (void *)(uintptr_t)x;
    if (fattn_tensor_numel(&h)) call_must(c->ctx, fattn_tensor_copy(c->ctx, &c->t[id], &h), "copy");
}

void call_fill(call *c, enum call_tensor id, double x) {
    const int64_t count = fattn_tensor_numel(&c->t[id]);
    double *const all = room((size_t)count * sizeof *all);
    for (int64_t n = 0; n < count; ++n) all[n] = x;
    call_write(c, id, all);
    free(all);
}

static uint64_t hash(uint64_t h, const void *p, size_t bytes) { /* FNV-1a, four bytes at a time */
    for (size_t n = 0; n < bytes; n += 4) {
        uint32_t word = 0;
        memcpy(&word, (const char *)p + n, bytes - n < 4 ? bytes - n : 4);
        h = (h ^ word) * 0x100000001b3u;
    }
    return h ^ h >> 29;
}

uint64_t call_bits(call *c, enum call_tensor first, enum call_tensor last) {
    uint64_t bits = 0xcbf29ce484222325u;
    call_must(c->ctx, fattn_ctx_sync(c->ctx), "sync");
    for (int id = (int)first; id <= (int)last; ++id) {
        const fattn_tensor *const t = &c->t[id];
        if (!t->dtype || !fattn_tensor_numel(t)) continue;
        const fattn_tensor h = host_like(t, (fattn_dtype)t->dtype);
        call_must(c->ctx, fattn_tensor_copy(c->ctx, &h, t), "copy");
        bits = hash(bits, h.data, (size_t)fattn_tensor_numel(t) * fattn_dtype_size((fattn_dtype)t->dtype));
        free(h.data);
    }
    return bits;
}

static void give(call *c, enum call_tensor id, fattn_dtype dtype, int ndim, const int64_t *shape) {
    call_must(c->ctx, fattn_tensor_alloc(c->ctx, dtype, ndim, shape, &c->t[id]), "alloc");
    if (dtype == FATTN_I32) return;
    const bool input = id < CALL_O || (id >= CALL_BIAS && id <= CALL_SINK) || (id >= CALL_D_O && id <= CALL_DELTA);
    const fattn_rng rng = {.seed = 77, .stream = (uint32_t)id};
    if (!fattn_tensor_numel(&c->t[id])) return;
    if (input)
        call_must(c->ctx, fattn_tensor_normal(c->ctx, &c->t[id], 0, 1, rng), "normal");
    else
        call_fill(c, id, NAN);
}

static void give_lengths(call *c, const attention_case *a, bool packed) {
    const int64_t n[1] = {a->B + (packed ? 1 : 0)};
    double q[MAX_SEQUENCES + 1] = {0}, k[MAX_SEQUENCES + 1] = {0};
    for (int64_t b = 0; b < a->B; ++b) {
        if (packed)
            q[b + 1] = q[b] + a->length_q[b], k[b + 1] = k[b] + a->length_k[b];
        else
            q[b] = a->length_q[b], k[b] = a->length_k[b];
    }
    give(c, packed ? CALL_CU_Q : CALL_SEQLENS_Q, FATTN_I32, 1, n);
    give(c, packed ? CALL_CU_K : CALL_SEQLENS_K, FATTN_I32, 1, n);
    call_write(c, packed ? CALL_CU_Q : CALL_SEQLENS_Q, q);
    call_write(c, packed ? CALL_CU_K : CALL_SEQLENS_K, k);
}

static int64_t total(const int32_t *lengths, int64_t count) {
    int64_t sum = 0;
    for (int64_t b = 0; b < count; ++b) sum += lengths[b];
    return sum;
}

/* Memory full of NaN. */
static fattn_tensor poisoned(fattn_ctx *ctx, size_t bytes) {
    const int64_t words[1] = {(int64_t)(bytes / 4 + 1)};
    fattn_tensor t;
    call_must(ctx, fattn_tensor_alloc(ctx, FATTN_F32, 1, words, &t), "memory of a call");
    double *const poison = room((size_t)words[0] * sizeof *poison);
    for (int64_t n = 0; n < words[0]; ++n) poison[n] = NAN;
    const fattn_tensor from = fattn_tensor_view(poison, FATTN_F64, FATTN_CPU, 0, 1, words);
    call_must(ctx, fattn_tensor_copy(ctx, &t, &from), "poison");
    free(poison);
    return t;
}

call *call_new(fattn_ctx *ctx, const attention_case *a) {
    call *const c = room(sizeof *c);
    *c = (call){.ctx = ctx};
    const fattn_dtype dtype = a->dtype, statistic = dtype == FATTN_F64 ? dtype : FATTN_F32;
    const fattn_dtype out = a->wide ? statistic : dtype;
    const bool packed = a->lengths == LENGTHS_PACKED;
    const int64_t Hkv = a->Hkv ? a->Hkv : a->Hq, Dv = a->Dv ? a->Dv : a->D, B = packed ? 1 : a->B;
    const int64_t Rq = packed ? total(a->length_q, a->B) : a->Sq;
    const int64_t Rk = packed ? total(a->length_k, a->B) : a->Sk;
    const int64_t q[4] = {B, a->Hq, Rq, a->D}, o[4] = {B, a->Hq, Rq, Dv};
    const int64_t k[4] = {B, Hkv, Rk, a->D}, v[4] = {B, Hkv, Rk, Dv};
    const int64_t bias[4] = {a->bias & BIAS_OVER_B ? 1 : a->B, a->bias & BIAS_OVER_H ? 1 : a->Hq,
                             a->bias & BIAS_OVER_I ? 1 : a->Sq, a->bias & BIAS_OVER_J ? 1 : a->Sk};
    give(c, CALL_Q, dtype, 4, q);
    give(c, CALL_K, dtype, 4, k);
    give(c, CALL_V, dtype, 4, v);
    give(c, CALL_O, out, 4, o);
    give(c, CALL_LSE, statistic, 3, o);
    give(c, CALL_D_O, out, 4, o);
    give(c, CALL_DQ, out, 4, q);
    give(c, CALL_DK, out, 4, k);
    give(c, CALL_DV, out, 4, v);
    if (a->bias) give(c, CALL_BIAS, dtype, 4, bias), give(c, CALL_D_BIAS, statistic, 4, bias);
    if (a->alibi) give(c, CALL_ALIBI, statistic, 1, &a->Hq);
    if (a->sink) give(c, CALL_SINK, statistic, 1, &a->Hq), give(c, CALL_D_SINK, statistic, 1, &a->Hq);
    if (a->d_lse) give(c, CALL_D_LSE, statistic, 3, o);
    if (a->rng_step) give(c, CALL_RNG_STEP, FATTN_I32, 0, NULL), call_fill(c, CALL_RNG_STEP, 7);
    if (packed || a->lengths == LENGTHS_PADDED) give_lengths(c, a, packed);

    c->params = (fattn_attention_params){.struct_size = sizeof c->params,
                                         .flags = a->flags,
                                         .algorithm = a->algorithm,
                                         .scale = a->scale,
                                         .softcap = a->softcap,
                                         .dropout_p = a->dropout_p,
                                         .window_left = a->window_left,
                                         .window_right = a->window_right,
                                         .q_pos0 = a->q_pos0,
                                         .k_pos0 = a->k_pos0,
                                         .unified_max = a->unified_max,
                                         .rng = {.seed = 99, .stream = 3}};
    if (packed) c->params.max_seqlen_q = a->Sq, c->params.max_seqlen_k = a->Sk;
    c->io = (fattn_attention_io){.struct_size = sizeof c->io};
    const fattn_tensor **const slots[CALL_COUNT] = {
        &c->io.q,        &c->io.k,      &c->io.v,         &c->io.o,         &c->io.lse,          &c->io.bias,
        &c->io.alibi,    &c->io.sink,   &c->io.seqlens_q, &c->io.seqlens_k, &c->io.cu_seqlens_q, &c->io.cu_seqlens_k,
        &c->io.rng_step, &c->io.d_o,    &c->io.d_lse,     &c->io.delta,     &c->io.dq,           &c->io.dk,
        &c->io.dv,       &c->io.d_bias, &c->io.d_sink};
    for (int id = 0; id < CALL_COUNT; ++id) *slots[id] = c->t[id].dtype ? &c->t[id] : NULL;

    c->plan = (fattn_attention_plan){.struct_size = sizeof c->plan};
    call_must(ctx, fattn_attention_query(ctx, &c->params, &c->io, &c->plan), a->name);
    const size_t f = c->plan.fwd_workspace, b = c->plan.bwd_workspace;
    c->workspace = poisoned(ctx, f > b ? f : b);
    c->io.workspace = c->workspace.data;
    c->io.workspace_bytes = f > b ? f : b;
    c->saved = poisoned(ctx, c->plan.saved_bytes);
    c->io.saved = c->saved.data;
    c->io.saved_bytes = c->plan.saved_bytes;
    return c;
}

void call_free(call *c) {
    call_must(c->ctx, fattn_ctx_sync(c->ctx), "sync");
    for (int id = 0; id < CALL_COUNT; ++id) fattn_tensor_free(c->ctx, &c->t[id]);
    fattn_tensor_free(c->ctx, &c->workspace);
    fattn_tensor_free(c->ctx, &c->saved);
    free(c);
}

void call_forward(call *c) { call_must(c->ctx, fattn_attention_fwd(c->ctx, &c->params, &c->io), c->plan.fwd_kernel); }
void call_backward(call *c) { call_must(c->ctx, fattn_attention_bwd(c->ctx, &c->params, &c->io), c->plan.bwd_kernel); }
void call_run(call *c) {
    call_forward(c);
    call_backward(c);
}
