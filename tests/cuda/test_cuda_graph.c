/* fattn_graph: what is recorded does not run, then each launch does; with the default stream and with one of the
   context's own; copies of page-locked memory between launches; errors leave a context that works. */
#include "core/base/device.h"
#include "contexts.h"

#include <fattn/fattn.h>

#include <string.h>

enum { N = 1000 };

static fattn_tensor ones(fattn_ctx *ctx, double value) {
    fattn_tensor t;
    cr_assert_eq(fattn_tensor_alloc(ctx, FATTN_F32, 1, (int64_t[]){N}, &t), FATTN_OK);
    cr_assert_eq(fattn_tensor_normal(ctx, &t, value, 0, (fattn_rng){0}), FATTN_OK);
    return t;
}

static float last_of(fattn_ctx *ctx, const fattn_tensor *t) {
    float x[N];
    const fattn_tensor host = fattn_tensor_view(x, FATTN_F32, FATTN_CPU, 0, 1, (int64_t[]){N});
    cr_assert_eq(fattn_tensor_copy(ctx, &host, t), FATTN_OK, "%s", fattn_ctx_error(ctx));
    return x[N - 1];
}

static void expect(fattn_ctx *ctx, fattn_status got, fattn_status want, const char *message) {
    cr_assert_eq(got, want, "%s", fattn_ctx_error(ctx));
    cr_assert(strstr(fattn_ctx_error(ctx), message), "%s", fattn_ctx_error(ctx));
}

static void launches(fattn_ctx *ctx) {
    fattn_tensor sum = ones(ctx, 0), one = ones(ctx, 1);
    fattn_graph *g;
    cr_assert_eq(fattn_tensor_add(ctx, &sum, &one), FATTN_OK); /* loads the kernel */
    cr_assert_eq(last_of(ctx, &sum), 1);
    cr_assert_eq(fattn_graph_begin(ctx), FATTN_OK, "%s", fattn_ctx_error(ctx));
    cr_assert_eq(fattn_tensor_add(ctx, &sum, &one), FATTN_OK);
    cr_assert_eq(fattn_tensor_add(ctx, &sum, &one), FATTN_OK);
    cr_assert_eq(fattn_graph_end(ctx, &g), FATTN_OK, "%s", fattn_ctx_error(ctx));
    cr_assert_eq(last_of(ctx, &sum), 1);
    for (int n = 0; n < 3; ++n) cr_assert_eq(fattn_graph_launch(ctx, g), FATTN_OK, "%s", fattn_ctx_error(ctx));
    cr_assert_eq(last_of(ctx, &sum), 7);
    fattn_graph_destroy(ctx, g);
    fattn_tensor_free(ctx, &sum);
    fattn_tensor_free(ctx, &one);
    cr_assert_eq(fattn_ctx_mem(ctx).live, 0);
}

Test(cuda_graph, launches_on_any_stream) {
    fattn_ctx *const ctx = context_or_skip();
    cudaStream_t stream;
    launches(ctx);
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    cr_assert_eq(fattn_ctx_set_stream(ctx, stream), FATTN_OK);
    launches(ctx);
    fattn_ctx_destroy(ctx);
    must(cudaStreamDestroy(stream), "stream");
}

/* Each launch takes the number that lay in page-locked memory when it was enqueued behind it, and the host reads the
   results of a launch while the next one may run. */
Test(cuda_graph, pinned_memory_and_marks) {
    enum { LAUNCHES = 20 };
    fattn_ctx *const ctx = context_or_skip();
    fattn_tensor sum = ones(ctx, 0), more = ones(ctx, 0), in[2], out[2], t;
    fattn_mark *done[2], *m;
    fattn_graph *g;
    for (int i = 0; i < 2; ++i) {
        cr_assert_eq(fattn_pinned_alloc(ctx, FATTN_F32, 1, (int64_t[]){N}, &in[i]), FATTN_OK);
        cr_assert_eq(fattn_pinned_alloc(ctx, FATTN_F32, 1, (int64_t[]){N}, &out[i]), FATTN_OK);
        cr_assert_eq(fattn_mark_create(ctx, &done[i]), FATTN_OK);
        cr_assert_eq(fattn_mark_wait(ctx, done[i]), FATTN_OK, "never set");
    }
    cr_assert_eq(fattn_tensor_add(ctx, &sum, &more), FATTN_OK);
    cr_assert_eq(fattn_graph_begin(ctx), FATTN_OK);
    cr_assert_eq(fattn_tensor_add(ctx, &sum, &more), FATTN_OK);
    expect(ctx, fattn_pinned_alloc(ctx, FATTN_F32, 1, (int64_t[]){N}, &t), FATTN_E_STATE, "4000 bytes are asked for");
    expect(ctx, fattn_mark_set(ctx, done[0]), FATTN_E_STATE, "mark_set: not while a graph is recorded");
    expect(ctx, fattn_mark_wait(ctx, done[0]), FATTN_E_STATE, "mark_wait: not while a graph is recorded");
    cr_assert_eq(fattn_graph_end(ctx, &g), FATTN_OK, "%s", fattn_ctx_error(ctx));
    for (int n = 0; n <= LAUNCHES; ++n) {
        if (n < LAUNCHES) {
            for (int i = 0; i < N; ++i) ((float *)in[n % 2].data)[i] = (float)(n + i);
            cr_assert_eq(fattn_tensor_copy(ctx, &more, &in[n % 2]), FATTN_OK, "%s", fattn_ctx_error(ctx));
            cr_assert_eq(fattn_graph_launch(ctx, g), FATTN_OK, "%s", fattn_ctx_error(ctx));
            cr_assert_eq(fattn_tensor_copy(ctx, &out[n % 2], &sum), FATTN_OK);
            cr_assert_eq(fattn_mark_set(ctx, done[n % 2]), FATTN_OK);
        }
        if (n == 0) continue;
        const int last = n - 1; /* of which the sum of 0, ..., last and (last + 1) i is due */
        cr_assert_eq(fattn_mark_wait(ctx, done[last % 2]), FATTN_OK, "%s", fattn_ctx_error(ctx));
        for (int i = 0; i < N; ++i)
            cr_assert_eq(((const float *)out[last % 2].data)[i], (float)(last * (last + 1) / 2 + (last + 1) * i));
    }
    for (int i = 0; i < 2; ++i) {
        fattn_pinned_free(ctx, &in[i]);
        fattn_pinned_free(ctx, &out[i]);
        fattn_mark_destroy(ctx, done[i]);
    }
    expect(ctx, fattn_mark_create(ctx, NULL), FATTN_E_ARG, "out is NULL");
    cr_assert_eq(fattn_mark_create(ctx, &m), FATTN_OK);
    fattn_mark_destroy(ctx, m);
    fattn_graph_destroy(ctx, g);
    fattn_tensor_free(ctx, &sum);
    fattn_tensor_free(ctx, &more);
    cr_assert_eq(fattn_ctx_mem(ctx).live, 0);
    fattn_ctx_destroy(ctx);
}

/* By a kernel or by a memset: as many bytes as asked for, no others, between two additions. */
Test(cuda_graph, zeroes_what_is_asked_for) {
    enum { COUNT = 10000 };
    static const size_t begins[] = {0, 4, 6, 8}, sizes[] = {2, 4, 6, 100, 1024, 16380, 16384, 16388, 39000};
    static float want[COUNT], got[COUNT];
    fattn_ctx *const ctx = context_or_skip();
    const int64_t shape[1] = {COUNT};
    const fattn_tensor host = fattn_tensor_view(got, FATTN_F32, FATTN_CPU, 0, 1, shape);
    fattn_tensor x, one;
    fattn_graph *g;
    cr_assert_eq(fattn_tensor_alloc(ctx, FATTN_F32, 1, shape, &x), FATTN_OK);
    cr_assert_eq(fattn_tensor_alloc(ctx, FATTN_F32, 1, shape, &one), FATTN_OK);
    cr_assert_eq(fattn_tensor_normal(ctx, &one, 1, 0, (fattn_rng){0}), FATTN_OK);
    for (size_t i = 0; i < sizeof begins / sizeof *begins; ++i)
        for (size_t k = 0; k < sizeof sizes / sizeof *sizes; ++k) {
            cr_assert_eq(fattn_tensor_normal(ctx, &x, 2, 0, (fattn_rng){0}), FATTN_OK);
            cr_assert_eq(fattn_tensor_add(ctx, &x, &one), FATTN_OK); /* loads the kernel */
            cr_assert_eq(fattn_graph_begin(ctx), FATTN_OK);
            cr_assert_eq(fattn_tensor_add(ctx, &x, &one), FATTN_OK);
            cr_assert_eq(ctx->ops->zero_rows(ctx, (char *)x.data + begins[i], sizes[k], sizes[k], 1), FATTN_OK);
            cr_assert_eq(fattn_tensor_add(ctx, &x, &one), FATTN_OK);
            cr_assert_eq(fattn_graph_end(ctx, &g), FATTN_OK, "%s", fattn_ctx_error(ctx));
            cr_assert_eq(fattn_graph_launch(ctx, g), FATTN_OK, "%s", fattn_ctx_error(ctx));
            cr_assert_eq(fattn_tensor_copy(ctx, &host, &x), FATTN_OK);
            for (int n = 0; n < COUNT; ++n) want[n] = 4;
            memset((char *)want + begins[i], 0, sizes[k]);
            for (int n = 0; n < COUNT; ++n) want[n] += 1;
            cr_assert_eq(memcmp(want, got, sizeof want), 0, "%zu bytes from %zu on", sizes[k], begins[i]);
            fattn_graph_destroy(ctx, g);
        }
    fattn_tensor_free(ctx, &x);
    fattn_tensor_free(ctx, &one);
    fattn_ctx_destroy(ctx);
}

Test(cuda_graph, errors) {
    fattn_ctx *const ctx = context_or_skip();
    fattn_tensor one = ones(ctx, 1), more;
    float x[N];
    const fattn_tensor host = fattn_tensor_view(x, FATTN_F32, FATTN_CPU, 0, 1, (int64_t[]){N});
    fattn_graph *g;
    expect(ctx, fattn_graph_end(ctx, &g), FATTN_E_STATE, "the context is not recording one");
    expect(ctx, fattn_graph_end(ctx, NULL), FATTN_E_ARG, "graph: out is NULL");
    expect(ctx, fattn_graph_launch(ctx, NULL), FATTN_E_ARG, "graph: NULL");
    cr_assert_eq(fattn_graph_begin(ctx), FATTN_OK);
    expect(ctx, fattn_graph_begin(ctx), FATTN_E_STATE, "the context is recording one already");
    expect(ctx, fattn_tensor_alloc(ctx, FATTN_F32, 1, (int64_t[]){N}, &more), FATTN_E_STATE,
           "4000 bytes are asked for while a graph is recorded");
    cr_assert_eq(fattn_graph_end(ctx, &g), FATTN_OK, "%s", fattn_ctx_error(ctx)); /* nothing */
    cr_assert_eq(fattn_graph_launch(ctx, g), FATTN_OK, "%s", fattn_ctx_error(ctx));
    cr_assert_eq(fattn_graph_begin(ctx), FATTN_OK);
    expect(ctx, fattn_graph_launch(ctx, g), FATTN_E_STATE, "the context is recording one");
    fattn_graph *const recorded = g;
    cr_assert_neq(fattn_tensor_copy(ctx, &host, &one), FATTN_OK); /* waits for the stream */
    expect(ctx, fattn_graph_end(ctx, &g), FATTN_E_CUDA, "graph: what was enqueued cannot be recorded");
    cr_assert_null(g);
    fattn_graph_destroy(ctx, recorded);
    fattn_tensor_free(ctx, &one);
    launches(ctx); /* after all this */
    fattn_ctx_destroy(ctx);
}
