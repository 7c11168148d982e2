/* Runs the README's training step, which stands above this when test_readme.sh compiles it: the loss
   on one batch must fall. */
#include <stdlib.h>

enum { V = 32, C = H * D, B = 2, S = 16, STEPS = 12, PARAMS = 8 };

static fattn_status make(fattn_ctx *ctx, fattn_param *p, uint32_t stream, int64_t rows,
                         int64_t columns) {
    const int64_t shape[2] = {rows, columns};
    const int ndim = columns ? 2 : 1;
    fattn_status s = fattn_tensor_alloc(ctx, FATTN_F32, ndim, shape, &p->value);
    if (!s) s = fattn_tensor_alloc(ctx, FATTN_F32, ndim, shape, &p->grad);
    if (!s) s = fattn_tensor_normal(ctx, &p->grad, 0, 0, (fattn_rng){0});
    return s ? s
             : fattn_tensor_normal(ctx, &p->value, ndim == 1, ndim == 1 ? 0 : 0.04,
                                   (fattn_rng){.seed = 1, .stream = stream});
}

int main(void) {
    fattn_ctx *ctx;
    fattn_tape *tape;
    fattn_adamw *opt;
    struct model m = {0};
    fattn_param *const params[PARAMS] = {&m.emb, &m.g1,  &m.wqkv, &m.wo,
                                         &m.g2,  &m.wup, &m.wdn,  &m.gf};
    static const int64_t shapes[PARAMS][2] = {{V, C}, {C, 0},     {3 * C, C}, {C, C},
                                              {C, 0}, {4 * C, C}, {C, 4 * C}, {C, 0}};
    int32_t ids[B][S], next[B][S];
    for (int b = 0; b < B; ++b)
        for (int i = 0; i < S; ++i)
            ids[b][i] = (i * i + 3 * b) % V, next[b][i] = (i * 7 + b) % V;
    const fattn_tensor x = fattn_tensor_view(ids, FATTN_I32, FATTN_CPU, 0, 2, (int64_t[]){B, S});
    const fattn_tensor y = fattn_tensor_view(next, FATTN_I32, FATTN_CPU, 0, 2, (int64_t[]){B, S});
    if (fattn_ctx_create(NULL, &ctx) || fattn_tape_create(ctx, &tape)) return 1;
    for (uint32_t i = 0; i < PARAMS; ++i)
        if (make(ctx, params[i], i, shapes[i][0], shapes[i][1])) return 1;
    if (fattn_adamw_create(ctx, NULL, params, PARAMS, &opt)) return 1;
    double first = 0, last = 0;
    for (unsigned step = 0; step < STEPS; ++step) {
        if (train_step(ctx, tape, opt, &m, &x, &y, step)) return 1;
        fattn_tape_reset(tape);
        if (fattn_tape_item(tape, forward(tape, &m, &x, &y), step ? &last : &first)) return 1;
    }
    printf("loss %.3f after the first step, %.3f after the last\n", first, last);
    fattn_adamw_destroy(opt);
    fattn_tape_destroy(tape);
    for (int i = 0; i < PARAMS; ++i) {
        fattn_tensor_free(ctx, &params[i]->value);
        fattn_tensor_free(ctx, &params[i]->grad);
    }
    const size_t leaked = fattn_ctx_mem(ctx).live;
    fattn_ctx_destroy(ctx);
    return leaked || !(last < 0.3 * first);
}
