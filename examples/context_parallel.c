/* One sequence over ranks: each rank has a part of the rows, attention sees them all. The loss and the gradients of one
   layer on 1, 2 and 4 ranks, here threads of this process on the CPU; on GPUs only the context's options differ, and
   with MPI or NCCL how the communicator is made. */
#include <fattn/fattn.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum { N = 1000, H = 4, D = 16, C = H * D, RANKS = 4 };

typedef struct rank {
    fattn_world *world;
    int number;
    double loss;
    float gradient[3 * C * C]; /* of the weights, the sum over the ranks */
    fattn_status status;
} rank;

/* The loss of this rank's rows: x [1,rows,C] through one attention layer, squared, over N. */
static fattn_var layer(fattn_tape *t, fattn_cp *cp, fattn_var x, fattn_param *weight, const fattn_tensor *positions) {
    const fattn_attention_params causal = {.struct_size = sizeof causal, .flags = FATTN_CAUSAL};
    const fattn_var h = fattn_op_linear(t, x, fattn_use(t, weight), (fattn_var){0}), at = fattn_input(t, positions);
    const fattn_attention_vars qkv = {.struct_size = sizeof qkv,
                                      .q = fattn_op_rope_at(t, fattn_op_heads(t, h, 0, H, D), 1e4f, at),
                                      .k = fattn_op_rope_at(t, fattn_op_heads(t, h, H, H, D), 1e4f, at),
                                      .v = fattn_op_heads(t, h, 2 * H, H, D)};
    const fattn_var o = fattn_op_merge(t, fattn_op_attention_cp(t, cp, &qkv, &causal, NULL));
    return fattn_op_scale(t, fattn_op_sum(t, fattn_op_mul(t, o, o), NULL, 0, 0), 1.0 / N);
}

static fattn_status step(rank *r, fattn_ctx *ctx, fattn_comm *comm, fattn_cp *cp, fattn_tape *t) {
    static const int64_t all[] = {1, N, C}, square[] = {3 * C, C};
    const int64_t rows = fattn_cp_rows(cp), mine[] = {1, rows, C};
    int32_t places[N];
    float sum;
    fattn_cp_positions(cp, places);
    const fattn_tensor positions = fattn_tensor_view(places, FATTN_I32, FATTN_CPU, 0, 1, &rows);
    fattn_tensor whole = {0}, x = {0}, w = {0};
    fattn_status s = fattn_tensor_alloc(ctx, FATTN_F32, 3, all, &whole);
    if (!s) s = fattn_tensor_alloc(ctx, FATTN_F32, 3, mine, &x);
    if (!s) s = fattn_tensor_alloc(ctx, FATTN_F32, 2, square, &w);
    if (!s) s = fattn_tensor_normal(ctx, &whole, 0, 1, (fattn_rng){.seed = 1});
    if (!s) s = fattn_tensor_normal(ctx, &w, 0, 0.2, (fattn_rng){.seed = 2}); /* the same on every rank */
    if (!s) s = fattn_cp_take(cp, &whole, 1, &x);
    memset(r->gradient, 0, sizeof r->gradient);
    fattn_param weight = {.value = w, .grad = w, .name = "w"};
    weight.grad.data = r->gradient;
    const fattn_var loss = s ? (fattn_var){0} : layer(t, cp, fattn_input(t, &x), &weight, &positions);
    if (!s) s = fattn_tape_backward(t, loss);
    if (!s) s = fattn_tape_item(t, loss, &r->loss);
    sum = (float)r->loss;
    const fattn_tensor total = fattn_tensor_view(&sum, FATTN_F32, FATTN_CPU, 0, 0, NULL);
    if (!s) s = fattn_comm_all_reduce(comm, &weight.grad); /* each rank's is that of its rows */
    if (!s) s = fattn_comm_all_reduce(comm, &total);
    r->loss = (double)sum;
    fattn_tape_reset(t);
    fattn_tensor_free(ctx, &whole);
    fattn_tensor_free(ctx, &x);
    fattn_tensor_free(ctx, &w);
    return s;
}

static void *work(void *arg) {
    rank *const r = arg;
    const fattn_ctx_options one_thread = {.struct_size = sizeof one_thread, .cpu_threads = 1};
    const fattn_cp_options options = {.struct_size = sizeof options, .rows = N};
    fattn_ctx *ctx;
    fattn_comm *comm = NULL;
    fattn_cp *cp = NULL;
    fattn_tape *tape = NULL;
    r->status = fattn_ctx_create(&one_thread, &ctx);
    if (!r->status) r->status = fattn_comm_join(ctx, r->world, r->number, NULL, &comm);
    if (!r->status) r->status = fattn_cp_create(comm, &options, &cp);
    if (!r->status) r->status = fattn_tape_create(ctx, &tape);
    if (!r->status) r->status = step(r, ctx, comm, cp, tape);
    if (r->status) fprintf(stderr, "rank %d: %s\n", r->number, fattn_ctx_error(ctx));
    fattn_tape_destroy(tape);
    fattn_cp_destroy(cp);
    fattn_comm_destroy(comm);
    fattn_ctx_destroy(ctx);
    return NULL;
}

int main(void) {
    static rank ranks[RANKS];
    static float first[3 * C * C];
    double loss = 0;
    for (int size = 1; size <= RANKS; size *= 2) {
        pthread_t threads[RANKS];
        fattn_world *world;
        if (fattn_world_create(size, &world)) return 1;
        for (int n = 0; n < size; ++n) {
            ranks[n].world = world, ranks[n].number = n;
            if (pthread_create(&threads[n], NULL, work, &ranks[n])) return 1;
        }
        for (int n = 0; n < size; ++n) pthread_join(threads[n], NULL);
        fattn_world_destroy(world);
        double error = 0, norm = 0;
        for (int n = 0; n < size; ++n)
            if (ranks[n].status) return 1;
        if (size == 1) loss = ranks[0].loss, memcpy(first, ranks[0].gradient, sizeof first);
        for (int i = 0; i < 3 * C * C; ++i) {
            const double difference = (double)ranks[size - 1].gradient[i] - (double)first[i];
            error += difference * difference, norm += (double)first[i] * (double)first[i];
        }
        printf("%d ranks: loss %.6f, gradient off by %.1e of one rank's\n", size, ranks[0].loss, sqrt(error / norm));
        if (fabs(ranks[0].loss - loss) > 1e-5 * loss || sqrt(error / norm) > 1e-5) return 1;
    }
    return 0;
}
