/* AdamW and SGD with the launches and kernels of a GPU, on the host, beside the CPU's code: the same arithmetic, so the
   same bits of values, masters and moments, with masters and without, rounded to nearest and stochastically. */
#include "suite.h"

#include "autograd_c/optim/optimizer.h"
#include "core/tensor/numeric.h"

#include <math.h>
#include <string.h>

extern const fattni_optimizer_code emulated_optimizer; /* fattni_optimizer_cuda */

static void set_up(void) { open_context(1); }
TestSuite(emulated_optimizer, .init = set_up, .fini = close_context, .timeout = 300);

#define MUST(call) cr_assert_eq(call, FATTN_OK, "%s", fattn_ctx_error(ctx))

/* Lengths around packs (4), pieces (1024) and chunks (8192), then short ones, more than a launch takes. Gradients and
   values of CROOKED are not aligned: no packs. */
enum { PARAMS = 64, FROZEN = 1, PLAIN = 3, CROOKED = 5 };
static const int64_t first_lengths[] = {1, 5, 16391, 700, 0, 2178, 2047};
static int64_t length_of(int i) {
    const int first = sizeof first_lengths / sizeof *first_lengths;
    return i < first ? first_lengths[i] : i % 7;
}

typedef struct kind {
    fattn_dtype value, grad;
    uint32_t flags;
} kind;
enum {
    NEAREST = FATTN_OPTIM_NO_MASTERS,
    FOLLOWS = FATTN_OPTIM_STOCHASTIC_ROUNDING, /* values follow masters */
    STOCHASTIC = NEAREST | FOLLOWS
};
static const kind kinds[] = {
    {FATTN_F64, FATTN_F64, 0},          {FATTN_F32, FATTN_F32, 0},           {FATTN_BF16, FATTN_F32, 0},
    {FATTN_F16, FATTN_F16, 0},          {FATTN_BF16, FATTN_F32, NEAREST},    {FATTN_F16, FATTN_F32, NEAREST},
    {FATTN_F16, FATTN_F16, NEAREST},    {FATTN_BF16, FATTN_F32, STOCHASTIC}, {FATTN_BF16, FATTN_BF16, STOCHASTIC},
    {FATTN_F16, FATTN_F32, STOCHASTIC}, {FATTN_F16, FATTN_F16, STOCHASTIC},  {FATTN_F32, FATTN_F32, STOCHASTIC},
    {FATTN_BF16, FATTN_F32, FOLLOWS},   {FATTN_F16, FATTN_F16, FOLLOWS}};
enum { KINDS = sizeof kinds / sizeof *kinds };

typedef struct run {
    fattn_param p[PARAMS];
    fattn_param *list[PARAMS];
    fattn_tensor memory[2 * PARAMS];
    fattn_adamw *adamw;
    fattn_sgd *sgd;
} run;

/* Elements of a tensor of one more: of CROOKED those from the second on. */
static fattn_tensor part_of(const fattn_tensor *all, int i) {
    return fattn_tensor_slice(all, 0, i == CROOKED, length_of(i) + (i == CROOKED));
}

static void run_new(run *r, const kind *k, bool is_sgd, bool is_emulated) {
    *r = (run){.adamw = NULL};
    for (int i = 0; i < PARAMS; ++i) {
        const int64_t n = length_of(i) + 1;
        fattn_param *const p = r->list[i] = &r->p[i];
        MUST(fattn_tensor_alloc(ctx, k->value, 1, &n, &r->memory[2 * i]));
        MUST(fattn_tensor_alloc(ctx, k->grad, 1, &n, &r->memory[2 * i + 1]));
        *p = (fattn_param){.name = "p",
                           .value = part_of(&r->memory[2 * i], i),
                           .grad = part_of(&r->memory[2 * i + 1], i),
                           .flags = i == FROZEN  ? FATTN_PARAM_FROZEN
                                    : i == PLAIN ? FATTN_PARAM_NO_DECAY
                                    : i % 3 == 2 ? FATTN_PARAM_ONE_PASS
                                                 : 0};
        /* F16: with subnormal numbers. */
        const double size = i == PLAIN && k->value == FATTN_F16 ? 0x1p-15 : 1;
        MUST(fattn_tensor_normal(ctx, &p->value, 0, size, (fattn_rng){.seed = 5, .stream = (uint32_t)i}));
    }
    const uint64_t seed = k->flags & FOLLOWS ? UINT64_C(0x123456789abcdef1) : 0;
    fattn_adamw_options a = {.struct_size = sizeof a};
    fattn_adamw_defaults(&a);
    a.flags = k->flags, a.seed = seed;
    const fattn_sgd_options s = {.struct_size = sizeof s,
                                 .momentum = 0.9f,
                                 .weight_decay = 0.1f,
                                 .nesterov = 1,
                                 .flags = k->flags,
                                 .seed = seed};
    if (is_sgd)
        MUST(fattn_sgd_create(ctx, &s, r->list, PARAMS, &r->sgd));
    else
        MUST(fattn_adamw_create(ctx, &a, r->list, PARAMS, &r->adamw));
    fattni_optimizer *const o = is_sgd ? (fattni_optimizer *)r->sgd : (fattni_optimizer *)r->adamw;
    if (!is_emulated) return;
    o->code = &emulated_optimizer;
    MUST(o->code->open(o));
}
static void run_free(run *r) {
    fattn_adamw_destroy(r->adamw);
    fattn_sgd_destroy(r->sgd);
    for (int i = 0; i < 2 * PARAMS; ++i) fattn_tensor_free(ctx, &r->memory[i]);
}
static void step(run *r, int t) {
    for (int i = 0; i < PARAMS; ++i)
        MUST(fattn_tensor_normal(ctx, &r->p[i].grad, 0, 0.1,
                                 (fattn_rng){.seed = 100 + (uint64_t)t, .stream = (uint32_t)i}));
    if (t == 2) fattni_store(r->p[2].grad.data, r->p[2].grad.dtype, 16390, (double)INFINITY); /* skipped */
    MUST(r->sgd ? fattn_sgd_set_lr(r->sgd, 2e-3f) : fattn_adamw_set_lr(r->adamw, 2e-3f));
    MUST(r->sgd ? fattn_sgd_step(r->sgd) : fattn_adamw_step(r->adamw));
}

static bool same(const fattn_tensor *a, const fattn_tensor *b) {
    const size_t bytes = (size_t)fattn_tensor_numel(a) * fattn_dtype_size((fattn_dtype)a->dtype);
    return a->dtype == b->dtype && fattn_tensor_numel(a) == fattn_tensor_numel(b) &&
           (!bytes || memcmp(a->data, b->data, bytes) == 0);
}

static void compare(const kind *k, bool is_sgd) {
    run cpu, gpu;
    run_new(&cpu, k, is_sgd, false), run_new(&gpu, k, is_sgd, true);
    for (int t = 0; t < 4; ++t) {
        step(&cpu, t), step(&gpu, t);
        for (int i = 0; i < PARAMS; ++i) {
            const fattni_optimizer *const a = is_sgd ? (fattni_optimizer *)cpu.sgd : (fattni_optimizer *)cpu.adamw;
            const fattni_optimizer *const b = is_sgd ? (fattni_optimizer *)gpu.sgd : (fattni_optimizer *)gpu.adamw;
            const char *const dtype = fattn_dtype_name(k->value);
            cr_assert(same(&cpu.p[i].value, &gpu.p[i].value), "%s, flags %u, sgd %d, step %d: params[%d]", dtype,
                      k->flags, is_sgd, t, i);
            cr_assert(i == FROZEN || same(&cpu.p[i].grad, &gpu.p[i].grad), "zeroed, or kept");
            cr_assert(same(&a->slots[i].m, &b->slots[i].m) && same(&a->slots[i].v, &b->slots[i].v) &&
                          same(&a->slots[i].master, &b->slots[i].master),
                      "%s: state of params[%d]", dtype, i);
        }
    }
    run_free(&cpu), run_free(&gpu);
}

Test(emulated_optimizer, adamw) {
    for (int k = 0; k < KINDS; ++k) compare(&kinds[k], false);
}
Test(emulated_optimizer, sgd) {
    for (int k = 0; k < KINDS; ++k) compare(&kinds[k], true);
}
