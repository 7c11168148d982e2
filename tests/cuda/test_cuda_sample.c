/* fattn_sample on the device: the tokens of a sort of all, also as a CUDA graph whose draws count themselves. */
#include "contexts.h"
#include "sampling.h"

#define MUST(call) cr_assert_eq(call, FATTN_OK, "%s", fattn_ctx_error(ctx))

static fattn_ctx *ctx;
static void begin(void) { ctx = context_or_skip(); }
static void end(void) {
    if (ctx) cr_assert_eq(fattn_ctx_mem(ctx).live, 0u);
    fattn_ctx_destroy(ctx);
}
TestSuite(cuda_sample, .init = begin, .fini = end);

Test(cuda_sample, cases, .timeout = 200) {
    for (int n = 0; n < SAMPLING_CASES; ++n) sampling_check(ctx, n);
    for (int n = 0; n < SAMPLING_LARGE; ++n) sampling_check_large(ctx, n);
}
Test(cuda_sample, rows_without_a_choice) { sampling_check_bad_rows(ctx); }

Test(cuda_sample, as_a_graph) {
    enum { V = 1000, DRAWS = 50 };
    const sampling_rule r = {.temperature = 1.5, .top_k = 400, .top_p = 0.95, .rng = {.seed = 9, .stream = 2}};
    const int64_t shape[2] = {1, V}, one = 1;
    float x[V];
    fattn_tensor logits, draw, token;
    fattn_graph *graph;
    MUST(fattn_tensor_alloc(ctx, FATTN_F32, 2, shape, &logits));
    MUST(fattn_tensor_alloc(ctx, FATTN_I32, 1, &one, &draw));
    MUST(fattn_tensor_alloc(ctx, FATTN_I32, 1, &one, &token));
    MUST(fattn_tensor_normal(ctx, &logits, 0, 2, (fattn_rng){.seed = 4}));
    const fattn_tensor host = fattn_tensor_view(x, FATTN_F32, FATTN_CPU, 0, 2, shape);
    MUST(fattn_tensor_copy(ctx, &host, &logits));
    int32_t number = 0, got;
    const fattn_tensor from = fattn_tensor_view(&number, FATTN_I32, FATTN_CPU, 0, 1, &one);
    const fattn_tensor to = fattn_tensor_view(&got, FATTN_I32, FATTN_CPU, 0, 1, &one);
    MUST(fattn_tensor_copy(ctx, &draw, &from));
    const fattn_sample_io io = {.struct_size = sizeof io,
                                .top_k = r.top_k,
                                .temperature = r.temperature,
                                .top_p = r.top_p,
                                .rng = r.rng,
                                .logits = &logits,
                                .draws = &draw,
                                .draws_after = &draw,
                                .tokens = &token};
    MUST(fattn_graph_begin(ctx));
    MUST(fattn_sample(ctx, &io));
    MUST(fattn_graph_end(ctx, &graph));
    for (int32_t n = 0; n < DRAWS; ++n) {
        MUST(fattn_graph_launch(ctx, graph));
        MUST(fattn_tensor_copy(ctx, &to, &token));
        cr_assert_eq(got, sampling_expected(x, V, &r, n), "draw %d", n);
    }
    fattn_graph_destroy(ctx, graph);
    fattn_tensor_free(ctx, &logits);
    fattn_tensor_free(ctx, &draw);
    fattn_tensor_free(ctx, &token);
}
