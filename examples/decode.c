/* Decoding with a cache of keys and values in pages: a prompt at once, then token by token, each with one append and
   one attention call. The result is compared with one forward over all tokens. On a GPU only the context's options
   differ; lengths stay on the device, so that a step can be a CUDA graph. */
#include <fattn/fattn.h>
#include <math.h>
#include <stdio.h>

enum { B = 2, HQ = 8, HKV = 2, D = 64, PROMPT = 100, N = 160, PAGE = 32, PAGES = N / PAGE };
enum { Q, K, V, O, LSE, K_CACHE, V_CACHE, FLOATS, TABLE = FLOATS, LENGTHS, AFTER, WORKSPACE, TENSORS };

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        const fattn_status s = (call);                                                                                 \
        if (s) return printf("%s: %s\n", fattn_status_name(s), fattn_ctx_error(ctx)), s;                               \
    } while (0)

/* q, k, v of all tokens, which a model would compute step by step; their cache; the results. */
static fattn_status open_layer(fattn_ctx *ctx, fattn_tensor *t) {
    static const int64_t shapes[FLOATS][4] = {{B, HQ, N, D},
                                              {B, HKV, N, D},
                                              {B, HKV, N, D},
                                              {B, HQ, N, D},
                                              {B, HQ, N},
                                              {B * PAGES, HKV, PAGE, D},
                                              {B * PAGES, HKV, PAGE, D}};
    int32_t numbers[B * PAGES];
    const fattn_tensor table = fattn_tensor_view(numbers, FATTN_I32, FATTN_CPU, 0, 2, (int64_t[]){B, PAGES});
    const fattn_tensor lengths = fattn_tensor_view((int32_t[B]){0}, FATTN_I32, FATTN_CPU, 0, 1, (int64_t[]){B});
    for (int n = 0; n < B * PAGES; ++n) numbers[n] = n % PAGES * B + n / PAGES; /* the sequences take turns */
    for (uint32_t n = 0; n < FLOATS; ++n) {
        TRY(fattn_tensor_alloc(ctx, FATTN_F32, n == LSE ? 3 : 4, shapes[n], &t[n]));
        TRY(fattn_tensor_normal(ctx, &t[n], 0, 1, (fattn_rng){.seed = n}));
    }
    TRY(fattn_tensor_alloc(ctx, FATTN_I32, 2, table.shape, &t[TABLE]));
    TRY(fattn_tensor_alloc(ctx, FATTN_I32, 1, lengths.shape, &t[LENGTHS]));
    TRY(fattn_tensor_alloc(ctx, FATTN_I32, 1, lengths.shape, &t[AFTER]));
    TRY(fattn_tensor_copy(ctx, &t[TABLE], &table));
    return fattn_tensor_copy(ctx, &t[LENGTHS], &lengths);
}

/* Tokens [first, end) of both sequences: k and v into the cache, q turned in place, attention over all keys so far. */
static fattn_status step(fattn_ctx *ctx, fattn_tensor *t, int64_t first, int64_t end) {
    fattn_tensor rows[LSE + 1];
    for (int n = 0; n <= LSE; ++n) rows[n] = fattn_tensor_slice(&t[n], 2, first, end);
    const fattn_kv_append_io append = {.struct_size = sizeof append,
                                       .rope_base = 10000,
                                       .k = &rows[K],
                                       .v = &rows[V],
                                       .k_cache = &t[K_CACHE],
                                       .v_cache = &t[V_CACHE],
                                       .lengths = &t[LENGTHS],
                                       .lengths_after = &t[AFTER],
                                       .page_table = &t[TABLE],
                                       .q = &rows[Q],
                                       .q_rotated = &rows[Q]};
    const fattn_attention_params causal = {.struct_size = sizeof causal, .flags = FATTN_CAUSAL};
    fattn_attention_plan plan = {.struct_size = sizeof plan};
    fattn_attention_io attend = {.struct_size = sizeof attend,
                                 .q = &rows[Q],
                                 .k = &t[K_CACHE],
                                 .v = &t[V_CACHE],
                                 .o = &rows[O],
                                 .lse = &rows[LSE],
                                 .seqlens_k = &t[AFTER],
                                 .page_table = &t[TABLE]};
    TRY(fattn_attention_query(ctx, &causal, &attend, &plan));
    if ((size_t)fattn_tensor_numel(&t[WORKSPACE]) < plan.fwd_workspace) { /* of the longest step, then no more */
        fattn_tensor_free(ctx, &t[WORKSPACE]);
        TRY(fattn_tensor_alloc(ctx, FATTN_U8, 1, (int64_t[]){(int64_t)plan.fwd_workspace}, &t[WORKSPACE]));
    }
    attend.workspace = t[WORKSPACE].data, attend.workspace_bytes = plan.fwd_workspace;
    TRY(fattn_kv_append(ctx, &append)); /* the layers of a model all append after the same lengths */
    TRY(fattn_attention_fwd(ctx, &causal, &attend));
    return fattn_tensor_copy(ctx, &t[LENGTHS], &t[AFTER]); /* once per step */
}

static fattn_status decode(fattn_ctx *ctx, fattn_tensor *one, fattn_tensor *all, double *most) {
    TRY(open_layer(ctx, one));
    TRY(open_layer(ctx, all));
    TRY(step(ctx, all, 0, N));
    TRY(step(ctx, one, 0, PROMPT));
    for (int64_t n = PROMPT; n < N; ++n) TRY(step(ctx, one, n, n + 1));
    const float *const x = one[O].data, *const y = all[O].data;
    for (int64_t n = 0; n < B * HQ * N * D; ++n) *most = fmax(*most, fabs((double)x[n] - (double)y[n]));
    return FATTN_OK;
}

int main(void) {
    fattn_tensor one[TENSORS] = {0}, all[TENSORS] = {0};
    double most = 0;
    fattn_ctx *ctx;
    if (fattn_ctx_create(NULL, &ctx)) return 1;
    const fattn_status s = decode(ctx, one, all, &most);
    printf("%d tokens after a prompt of %d: at most %.1e from one forward over all\n", N - PROMPT, PROMPT, most);
    for (int n = 0; n < TENSORS; ++n) fattn_tensor_free(ctx, &one[n]), fattn_tensor_free(ctx, &all[n]);
    fattn_ctx_destroy(ctx);
    return s || !(most < 1e-5);
}
