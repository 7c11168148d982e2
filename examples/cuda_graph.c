/* A whole training step as a CUDA graph: captured once, replayed with one call.

   The first step runs eagerly: it allocates the tape's memory in chunks and loads the kernels. The reset
   after it replaces the chunks by one block of the same total size, which allocates once more. Later steps
   of the same shapes, and their resets, allocate nothing, so that a step can be captured. */
#include <cuda_runtime_api.h>
#include <fattn/fattn.h>
#include <stdio.h>

enum { N = 256, C = 64, HIDDEN = 256, CLASSES = 10, REPLAYS = 200, SKIPPED = 77 };
enum { UP, DOWN, PARAMS };

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        const fattn_status s = (call);                                                                                 \
        if (s) return printf("%s: %s\n", fattn_status_name(s), fattn_ctx_error(ctx)), s;                               \
    } while (0)
#define CUDA(call)                                                                                                     \
    if ((call) != cudaSuccess) return printf("%s\n", #call), FATTN_E_CUDA

/* loss = cross_entropy(gelu(x UP^T) DOWN^T, target), its gradients, AdamW: enqueued only. */
static fattn_status step(fattn_ctx *ctx, fattn_tape *t, fattn_adamw *opt, fattn_param *p, const fattn_tensor *x,
                         const fattn_tensor *target, fattn_var *loss) {
    const fattn_var none = {0};
    const fattn_var h = fattn_op_gelu(t, fattn_op_linear(t, fattn_input(t, x), fattn_use(t, &p[UP]), none));
    *loss = fattn_op_cross_entropy(t, fattn_op_linear(t, h, fattn_use(t, &p[DOWN]), none), fattn_input(t, target), -1);
    TRY(fattn_tape_backward(t, *loss));
    TRY(fattn_adamw_step(opt));
    return FATTN_OK;
}

static fattn_status create(fattn_ctx *ctx, fattn_param *p, fattn_tensor *x, fattn_tensor *target) {
    static const int64_t shapes[PARAMS][2] = {{HIDDEN, C}, {CLASSES, HIDDEN}};
    const int64_t rows[2] = {N, C};
    int32_t classes[N];
    for (int i = 0; i < N; ++i) classes[i] = i % CLASSES;
    const fattn_tensor here = fattn_tensor_view(classes, FATTN_I32, FATTN_CPU, 0, 1, rows);
    for (int i = 0; i < PARAMS; ++i) {
        const fattn_rng rng = {.seed = 1, .stream = (uint32_t)i};
        TRY(fattn_tensor_alloc(ctx, FATTN_F32, 2, shapes[i], &p[i].value));
        TRY(fattn_tensor_alloc(ctx, FATTN_F32, 2, shapes[i], &p[i].grad));
        TRY(fattn_tensor_normal(ctx, &p[i].value, 0, 0.1, rng));
        TRY(fattn_tensor_normal(ctx, &p[i].grad, 0, 0, rng));
    }
    TRY(fattn_tensor_alloc(ctx, FATTN_F32, 2, rows, x));
    TRY(fattn_tensor_normal(ctx, x, 0, 1, (fattn_rng){.seed = 2}));
    TRY(fattn_tensor_alloc(ctx, FATTN_I32, 1, rows, target));
    TRY(fattn_tensor_copy(ctx, target, &here)); /* a copy from the host synchronises */
    return FATTN_OK;
}

static fattn_status train(fattn_ctx *ctx, cudaStream_t stream, fattn_tape *t, fattn_adamw *opt, fattn_param *p,
                          const fattn_tensor *x, const fattn_tensor *target) {
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    fattn_var loss;
    double first = 0, last = 0;
    TRY(step(ctx, t, opt, p, x, target, &loss));
    TRY(fattn_tape_item(t, loss, &first));
    fattn_tape_reset(t); /* consolidates the arena into one block */
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    TRY(step(ctx, t, opt, p, x, target, &loss));
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&replay, graph, 0));
    for (int n = 0; n < REPLAYS; ++n) {
        /* The learning rate and the step count are in device memory. */
        TRY(fattn_adamw_set_lr(opt, 0.01f * (float)(REPLAYS - n) / REPLAYS));
        CUDA(cudaGraphLaunch(replay, stream));
    }
    TRY(fattn_tape_item(t, loss, &last));
    printf("loss %.4f, after %d replays %.4f\n", first, REPLAYS, last);
    cudaGraphExecDestroy(replay);
    cudaGraphDestroy(graph);
    return last < 0.1 * first ? FATTN_OK : FATTN_E_MISMATCH;
}

int main(void) {
    int devices = 0;
    cudaStream_t stream;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0)
        return printf("skipped: no CUDA device\n"), SKIPPED;
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    const fattn_ctx_options o = {.struct_size = sizeof o, .device = FATTN_CUDA, .stream = stream};
    fattn_param p[PARAMS] = {{.name = "up"}, {.name = "down"}}, *list[] = {&p[UP], &p[DOWN]};
    fattn_ctx *ctx = NULL;
    fattn_tape *t = NULL;
    fattn_adamw *opt = NULL;
    fattn_tensor x, target, *const all[] = {&x, &target, &p[UP].value, &p[UP].grad, &p[DOWN].value, &p[DOWN].grad};
    TRY(fattn_ctx_create(&o, &ctx));
    TRY(create(ctx, p, &x, &target));
    TRY(fattn_tape_create(ctx, &t));
    TRY(fattn_adamw_create(ctx, NULL, list, PARAMS, &opt));
    const fattn_status s = train(ctx, stream, t, opt, p, &x, &target);
    fattn_adamw_destroy(opt);
    fattn_tape_destroy(t);
    for (int i = 0; i < 6; ++i) fattn_tensor_free(ctx, all[i]);
    fattn_ctx_destroy(ctx);
    return s;
}
