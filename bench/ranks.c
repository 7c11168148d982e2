/* Attention over several GPUs (fattn/context_parallel.h), ranks being threads of this process, rank r on GPU r modulo
   their number; so one GPU can have all, to see that results are right and that transfers overlap. TRANSPORT is
   threads (copy engines) or nccl, which needs a GPU for each rank.

   bits    o, lse, dq, dk, dv on 1, 2, 4, ... ranks: their bits beside one rank's with FATTN_DETERMINISTIC, and the
           relative error against F64 on the CPU without
   speed   time of forward and backward, of one rank and of all: whole; "compute", without moves: of ULYSSES each rank's
           heads in one call, of the others with a transport that moves nothing, but with copies to messages and from
           them; "moves", the bytes of a ring's steps alone. ULYSSES twice: backward moves its inputs, or has what
           forward saved of them. "one": one rank's time for the whole sequence, the harmonic mean of each GPU's alone.
           Efficiency: that over ranks times theirs, from 1 where the GPUs are as many as the ranks. All of it repeats
           times in turns, since clocks change from run to run: medians, and the least and the largest efficiency
   moves   a message to the next rank and one from the last at the same time, of 64 KB to 512 MB

   cc -O2 -std=c11 -Iinclude -I/usr/local/cuda/include bench/ranks.c -o ranks -Lbuild/release/lib -lfattn \
      -L/usr/local/cuda/lib64 -lcudart_static -ldl -lrt -lpthread -lm -Wl,-rpath,build/release/lib
   ./ranks bits|speed|moves RANKS TRANSPORT [N...] [HqxHkvxD...] [sms=SMs for the kernels of several ranks]
           [repeats=1] [FORM] */
#include <cuda_runtime_api.h>
#include <fattn/fattn.h>
#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_RANKS = 16, MOST_LENGTHS = 16, MOST_MODELS = 16, ROUNDS = 3, MOST_REPEATS = 25 };

static int gpus, first_gpu, sm_limit, only_form; /* first_gpu: rank 0's. only_form: of speed; 0: all */
static int repeats = 1;
static bool by_nccl;

static double now(void) {
    struct timespec t;
    timespec_get(&t, TIME_UTC);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- ranks ---- */

typedef struct rank {
    int number, size;
    fattn_world *world;
    const uint8_t *id; /* of NCCL, else NULL */
    fattn_ctx *ctx;
    fattn_comm *comm;
    cudaStream_t stream;
    const struct shape *shape;
    void *out; /* of the function */
    fattn_status (*function)(struct rank *);
    bool copies; /* of the transport that moves nothing */
    fattn_status status;
    char error[512];
} rank;

static void *work(void *arg) {
    rank *const r = arg;
    cudaSetDevice((first_gpu + r->number) % gpus);
    cudaStreamCreateWithFlags(&r->stream, cudaStreamNonBlocking);
    const fattn_ctx_options o = {.struct_size = sizeof o,
                                 .device = FATTN_CUDA,
                                 .device_id = (first_gpu + r->number) % gpus,
                                 .sm_limit = r->size > 1 ? sm_limit : 0,
                                 .stream = (fattn_stream)r->stream};
    r->status = fattn_ctx_create(&o, &r->ctx);
    if (!r->status)
        r->status = r->id ? fattn_comm_nccl(r->ctx, r->id, r->number, r->size, NULL, &r->comm)
                          : fattn_comm_join(r->ctx, r->world, r->number, NULL, &r->comm);
    if (!r->status) r->status = r->function(r);
    snprintf(r->error, sizeof r->error, "%s", fattn_ctx_error(r->ctx));
    if (r->status) fattn_comm_abort(r->comm, r->error);
    if (r->ctx && fattn_ctx_sync(r->ctx) && !r->status) r->status = FATTN_E_CUDA;
    fattn_comm_destroy(r->comm);
    fattn_ctx_destroy(r->ctx);
    cudaStreamDestroy(r->stream);
    return NULL;
}

static bool new_id(uint8_t *id) {
    const fattn_ctx_options o = {.struct_size = sizeof o, .device = FATTN_CUDA};
    fattn_ctx *ctx;
    if (fattn_ctx_create(&o, &ctx)) return false;
    const fattn_status s = fattn_comm_nccl_id(ctx, id);
    if (s) fprintf(stderr, "%s\n", fattn_ctx_error(ctx));
    fattn_ctx_destroy(ctx);
    return !s;
}

static bool run(int size, const struct shape *shape, fattn_status (*function)(rank *), void *const *out) {
    rank ranks[MOST_RANKS];
    pthread_t threads[MOST_RANKS];
    uint8_t id[FATTN_NCCL_ID];
    fattn_world *world;
    const bool nccl = by_nccl && size > 1;
    if (fattn_world_create(size, &world) || (nccl && !new_id(id))) return false;
    for (int n = 0; n < size; ++n) {
        ranks[n] = (rank){.number = n,
                          .size = size,
                          .world = world,
                          .id = nccl ? id : NULL,
                          .shape = shape,
                          .out = out[n],
                          .function = function};
        if (pthread_create(&threads[n], NULL, work, &ranks[n])) exit(1);
    }
    bool ok = true;
    for (int n = 0; n < size; ++n) {
        pthread_join(threads[n], NULL);
        if (ranks[n].status && ok) fprintf(stderr, "rank %d: %s\n", n, ranks[n].error);
        ok = ok && !ranks[n].status;
    }
    fattn_world_destroy(world);
    return ok;
}

#define TRY(expression)                                                                                                \
    do {                                                                                                               \
        const fattn_status try_status = (expression);                                                                  \
        if (try_status) return try_status;                                                                             \
    } while (0)

/* ---- calls ---- */

typedef struct shape {
    int64_t B, Hq, Hkv, N, D;
    fattn_dtype dtype;
    uint32_t flags;
    int form;
    bool stubbed, alone; /* the transport moves nothing; no transport, ranks have calls of their own */
    bool saves;          /* backward has what forward saved */
    int calls;           /* to time */
} shape;

enum { Q, K, V, D_O, O, LSE, DQ, DK, DV, TENSORS };
static const char *const names[TENSORS] = {"q", "k", "v", "d_o", "o", "lse", "dq", "dk", "dv"};

static int64_t heads_of(const shape *s, int i) { return i == K || i == V || i == DK || i == DV ? s->Hkv : s->Hq; }

static fattn_status tensor(const rank *r, int i, int64_t rows, fattn_tensor *t) {
    const shape *const s = r->shape;
    const int64_t dims[4] = {s->B, heads_of(s, i), rows, s->D};
    const fattn_dtype wide = s->dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
    return fattn_tensor_alloc(r->ctx, i == LSE ? wide : s->dtype, i == LSE ? 3 : 4, dims, t);
}

/* The same numbers for every number of ranks: normal ones, rounded to BF16. */
static fattn_status fill(const rank *r, fattn_cp *cp, int i, const fattn_tensor *local) {
    fattn_tensor whole, rounded;
    const shape *const s = r->shape;
    const int64_t dims[4] = {s->B, heads_of(s, i), s->N, s->D};
    TRY(tensor(r, i, s->N, &whole));
    TRY(fattn_tensor_alloc(r->ctx, FATTN_BF16, 4, dims, &rounded));
    TRY(fattn_tensor_normal(r->ctx, &rounded, 0, 1, (fattn_rng){.seed = 1, .stream = (uint32_t)i}));
    TRY(fattn_tensor_copy(r->ctx, &whole, &rounded));
    TRY(fattn_cp_take(cp, &whole, 2, local));
    TRY(fattn_ctx_sync(r->ctx));
    fattn_tensor_free(r->ctx, &whole);
    fattn_tensor_free(r->ctx, &rounded);
    return FATTN_OK;
}

static fattn_attention_io io_of(const fattn_tensor *t) {
    return (fattn_attention_io){.struct_size = sizeof(fattn_attention_io),
                                .q = &t[Q],
                                .k = &t[K],
                                .v = &t[V],
                                .o = &t[O],
                                .lse = &t[LSE],
                                .d_o = &t[D_O],
                                .dq = &t[DQ],
                                .dk = &t[DK],
                                .dv = &t[DV]};
}

/* ---- bits ---- */

typedef struct results {
    double *x[TENSORS]; /* whole, as double: exact */
} results;

static fattn_status compute(rank *r) {
    const shape *const s = r->shape;
    results *const out = r->out;
    const fattn_cp_options o = {.struct_size = sizeof o, .form = s->form, .rows = s->N};
    const fattn_attention_params p = {.struct_size = sizeof p, .flags = s->flags};
    fattn_cp *cp;
    fattn_tensor t[TENSORS];
    TRY(fattn_cp_create(r->comm, &o, &cp));
    for (int i = 0; i < TENSORS; ++i) {
        TRY(tensor(r, i, fattn_cp_rows(cp), &t[i]));
        if (i <= D_O) TRY(fill(r, cp, i, &t[i]));
    }
    const fattn_attention_io io = io_of(t);
    TRY(fattn_cp_fwd(cp, &p, &io));
    TRY(fattn_cp_bwd(cp, &p, &io));
    for (int i = O; i < TENSORS; ++i) {
        fattn_tensor whole;
        TRY(tensor(r, i, s->N, &whole));
        TRY(fattn_cp_gather(cp, &t[i], 2, &whole));
        const fattn_tensor to = fattn_tensor_view(out->x[i], FATTN_F64, FATTN_CPU, 0, whole.ndim, whole.shape);
        if (r->number == 0) TRY(fattn_tensor_copy(r->ctx, &to, &whole));
        TRY(fattn_ctx_sync(r->ctx));
        fattn_tensor_free(r->ctx, &whole);
    }
    TRY(fattn_ctx_sync(r->ctx));
    for (int i = 0; i < TENSORS; ++i) fattn_tensor_free(r->ctx, &t[i]);
    fattn_cp_destroy(cp);
    return FATTN_OK;
}

static int64_t numel(const shape *s, int i) { return s->B * heads_of(s, i) * s->N * (i == LSE ? 1 : s->D); }

static bool compute_on(const shape *s, int ranks, results *out) {
    void *outs[MOST_RANKS];
    for (int i = O; i < TENSORS; ++i) out->x[i] = calloc((size_t)numel(s, i), sizeof(double));
    for (int n = 0; n < ranks; ++n) outs[n] = out;
    return run(ranks, s, compute, outs);
}

static void free_results(results *r) {
    for (int i = O; i < TENSORS; ++i) free(r->x[i]);
}

static double error_of(const double *x, const double *y, int64_t n) {
    double error = 0, norm = 0;
    for (int64_t i = 0; i < n; ++i) error += (x[i] - y[i]) * (x[i] - y[i]), norm += y[i] * y[i];
    return sqrt(error / norm);
}

/* Ways to be timed: the forms, then ULYSSES with what forward saved. */
enum { FIRST_WAY = FATTN_CP_RING, WAYS = FATTN_CP_ULYSSES + 2 };
static const char *const ways[WAYS] = {"auto", "ring", "all-gather", "ulysses", "saved"};

static int form_of(int way) { return way < FATTN_CP_ULYSSES ? way : FATTN_CP_ULYSSES; }

static int bits(int most) {
    const fattn_dtype dtypes[] = {FATTN_BF16, FATTN_F16, FATTN_F32};
    int bad = 0;
    printf("%-10s %-5s %-6s %5s %6s  %-28s relative error, in 1e-4: o dq dk dv\n", "form", "dtype", "mask", "N",
           "ranks", "bits of one rank");
    for (int d = 0; d < 3; ++d)
        for (int causal = 0; causal < 2; ++causal)
            for (int form = FATTN_CP_RING; form <= FATTN_CP_ULYSSES; ++form) {
                shape s = {.B = 1, .Hq = 8, .Hkv = 4, .N = 1500, .D = d == 1 ? 128 : 64, .dtype = dtypes[d]};
                s.flags = causal ? FATTN_CAUSAL : 0, s.form = form;
                shape exact = s, fixed = s;
                exact.dtype = FATTN_F64, exact.form = FATTN_CP_ULYSSES;
                fixed.flags |= FATTN_DETERMINISTIC;
                results truth, one = {{0}};
                if (!compute_on(&exact, 1, &truth)) return 1;
                for (int ranks = 1; ranks <= most; ranks *= 2) {
                    if (form == FATTN_CP_ULYSSES && s.Hkv % ranks) continue;
                    results got, free_order;
                    if (!compute_on(&fixed, ranks, &got) || !compute_on(&s, ranks, &free_order)) return 1;
                    char same[64] = "";
                    for (int i = O; i < TENSORS && ranks > 1; ++i) {
                        const bool equal = !memcmp(got.x[i], one.x[i], (size_t)numel(&s, i) * sizeof(double));
                        snprintf(same + strlen(same), sizeof same - strlen(same), "%s%s ", names[i],
                                 equal ? "" : "(no)");
                        bad += !equal && form != FATTN_CP_RING;
                    }
                    printf("%-10s %-5s %-6s %5lld %6d  %-28s", ways[form], fattn_dtype_name(s.dtype),
                           causal ? "causal" : "full", (long long)s.N, ranks, ranks > 1 ? same : "");
                    for (int i = O; i < TENSORS; ++i)
                        if (i != LSE) printf(" %.4f", 1e4 * error_of(free_order.x[i], truth.x[i], numel(&s, i)));
                    printf("\n");
                    fflush(stdout);
                    if (ranks == 1)
                        one = got;
                    else
                        free_results(&got);
                    free_results(&free_order);
                }
                free_results(&one);
                free_results(&truth);
            }
    printf("%s\n", bad ? "bits: FAILED" : "bits: the same for all-gather and ulysses");
    return bad > 0;
}

/* ---- speed ---- */

/* Moves nothing from rank to rank. Its first calls copy what the rank itself sends, so that kernels have numbers like
   the real ones: zeros take less power, and clocks rise. Later calls copy only the few bytes by which ranks agree. */
static fattn_status nothing_starts(void *state, fattn_ctx *ctx, const fattn_message *sends, int n_sends,
                                   const fattn_message *receives, int n_receives, void **request) {
    const rank *const r = state;
    (void)ctx;
    for (int n = 0; n < n_receives && n_sends > 0; ++n) {
        const fattn_message *const from = &sends[n < n_sends ? n : 0];
        const size_t bytes = receives[n].bytes < from->bytes ? receives[n].bytes : from->bytes;
        if ((bytes <= 4096 || r->copies) && receives[n].data != from->data)
            cudaMemcpyAsync(receives[n].data, from->data, bytes, cudaMemcpyDefault, r->stream);
    }
    *request = state;
    return FATTN_OK;
}
static fattn_status nothing_ends(void *state, fattn_ctx *ctx, void *request) {
    (void)state, (void)ctx, (void)request;
    return FATTN_OK;
}
static void nothing_aborts(void *state, const char *text) { (void)state, (void)text; }
static void nothing_closes(void *state, fattn_ctx *ctx) { (void)state, (void)ctx; }

static fattn_status stub(rank *r, fattn_comm **out) {
    const fattn_transport t = {.struct_size = sizeof t,
                               .rank = r->number,
                               .size = r->size,
                               .devices = 1u << FATTN_CUDA,
                               .name = "nothing",
                               .state = r,
                               .start = nothing_starts,
                               .finish = nothing_ends,
                               .abort = nothing_aborts,
                               .close = nothing_closes};
    return fattn_comm_create(r->ctx, &t, out);
}

enum { FWD, BWD, MOVES, TIMES };
typedef struct timing {
    double rounds[TIMES][ROUNDS];
} timing;

/* The slowest rank's time in the best round. Ranks that share a GPU may run one after the other, so that each has a
   round in which it was first. */
static double best_of(const timing *ranks, int n, int what) {
    double best = INFINITY;
    for (int round = 0; round < ROUNDS; ++round) {
        double longest = 0;
        for (int r = 0; r < n; ++r) longest = fmax(longest, ranks[r].rounds[what][round]);
        best = fmin(best, longest);
    }
    return best;
}

static fattn_status timed(rank *r, fattn_cp *cp, bool backward, const fattn_attention_params *p,
                          const fattn_attention_io *io, double *seconds) {
    for (int round = 0; round < 1 + ROUNDS; ++round) {
        r->copies = round == 0;
        TRY(fattn_ctx_sync(r->ctx));
        TRY(fattn_comm_barrier(r->comm));
        TRY(fattn_ctx_sync(r->ctx));
        const double begin = now();
        for (int n = 0; n < r->shape->calls; ++n) TRY(backward ? fattn_cp_bwd(cp, p, io) : fattn_cp_fwd(cp, p, io));
        TRY(fattn_ctx_sync(r->ctx));
        if (round > 0) seconds[round - 1] = (now() - begin) / r->shape->calls; /* the first warms up */
    }
    return FATTN_OK;
}

/* size - 1 steps with K and V, as many with dK and dV in F32. */
static fattn_status time_moves(rank *r, int64_t rows, double *seconds) {
    const shape *const s = r->shape;
    const int64_t bytes = s->B * s->Hkv * rows * s->D * 4;
    fattn_tensor a, b;
    TRY(fattn_tensor_alloc(r->ctx, FATTN_U8, 1, (const int64_t[]){2 * bytes}, &a));
    TRY(fattn_tensor_alloc(r->ctx, FATTN_U8, 1, (const int64_t[]){2 * bytes}, &b));
    for (int round = 0; round < 1 + ROUNDS; ++round) {
        TRY(fattn_ctx_sync(r->ctx));
        TRY(fattn_comm_barrier(r->comm));
        TRY(fattn_ctx_sync(r->ctx));
        const double begin = now();
        for (int step = 0; step < 2 * (r->size - 1); ++step) {
            const int64_t n = step < r->size - 1 ? bytes : 2 * bytes;
            const fattn_tensor out = fattn_tensor_slice(&a, 0, 0, n), in = fattn_tensor_slice(&b, 0, 0, n);
            TRY(fattn_comm_send_receive(r->comm, &out, (r->number + 1) % r->size, &in,
                                        (r->number + r->size - 1) % r->size));
        }
        TRY(fattn_ctx_sync(r->ctx));
        if (round > 0) seconds[round - 1] = now() - begin;
    }
    fattn_tensor_free(r->ctx, &a);
    fattn_tensor_free(r->ctx, &b);
    return FATTN_OK;
}

static fattn_status time_rank(rank *r) {
    const shape *const s = r->shape;
    timing *const out = r->out;
    const fattn_cp_options o = {.struct_size = sizeof o, .form = s->form, .rows = s->N};
    const fattn_attention_params p = {.struct_size = sizeof p, .flags = s->flags};
    fattn_comm *comm = r->comm;
    fattn_world *world = NULL;
    fattn_cp *filler, *cp;
    fattn_tensor t[TENSORS], saved = {0};
    if (s->alone) {
        TRY(fattn_world_create(1, &world));
        TRY(fattn_comm_join(r->ctx, world, 0, NULL, &comm));
    }
    TRY(fattn_cp_create(comm, &o, &filler));
    for (int i = 0; i < TENSORS; ++i) {
        TRY(tensor(r, i, fattn_cp_rows(filler), &t[i]));
        if (i <= D_O) TRY(fill(r, filler, i, &t[i]));
    }
    if (s->stubbed) TRY(stub(r, &comm));
    const fattn_status made = fattn_cp_create(comm, &o, &cp);
    if (made) return made;
    fattn_attention_io io = io_of(t);
    if (s->saves) {
        TRY(fattn_cp_saved(cp, &p, &io, &io.saved_bytes));
        TRY(fattn_tensor_alloc(r->ctx, FATTN_U8, 1, (const int64_t[]){(int64_t)io.saved_bytes}, &saved));
        io.saved = saved.data;
    }
    TRY(timed(r, cp, false, &p, &io, out->rounds[FWD]));
    TRY(timed(r, cp, true, &p, &io, out->rounds[BWD]));
    if (r->size > 1) TRY(time_moves(r, fattn_cp_rows(filler), out->rounds[MOVES]));
    TRY(fattn_comm_barrier(r->comm));
    fattn_cp_destroy(cp);
    fattn_cp_destroy(filler);
    for (int i = 0; i < TENSORS; ++i) fattn_tensor_free(r->ctx, &t[i]);
    fattn_tensor_free(r->ctx, &saved);
    if (comm != r->comm) fattn_comm_destroy(comm);
    fattn_world_destroy(world);
    return FATTN_OK;
}

typedef struct times {
    double fwd, bwd, moves;
} times;

static bool time_on(const shape *s, int ranks, times *out) {
    timing all[MOST_RANKS] = {{{{0}}}};
    void *outs[MOST_RANKS];
    for (int n = 0; n < ranks; ++n) outs[n] = &all[n];
    if (!run(ranks, s, time_rank, outs)) return false;
    *out = (times){best_of(all, ranks, FWD), best_of(all, ranks, BWD), best_of(all, ranks, MOVES)};
    return true;
}

/* One rank on each GPU, one GPU after the other: of the mean of their rates. */
static bool time_one(const shape *s, int parallel, times *out) {
    double fwd = 0, bwd = 0;
    for (first_gpu = 0; first_gpu < parallel; ++first_gpu) {
        times t;
        if (!time_on(s, 1, &t)) return false;
        fwd += 1 / t.fwd, bwd += 1 / t.bwd;
    }
    first_gpu = 0;
    *out = (times){parallel / fwd, parallel / bwd, 0};
    return true;
}

typedef struct model {
    int64_t Hq, Hkv, D;
} model;

/* About 50 ms of calls on an H100. */
static int calls_for(const shape *s) {
    const double forward = 2.0 * (double)(s->Hq * s->N * s->N * s->D) / 5e14;
    const int n = (int)(0.05 / (3 * forward));
    return n < 1 ? 1 : n > 20 ? 20 : n;
}

typedef struct readings {
    times one[MOST_REPEATS], whole[WAYS][MOST_REPEATS], compute[WAYS];
} readings;

static bool has_way(const shape *s, int way, int ranks) {
    const int form = form_of(way);
    return (!only_form || form == only_form) && (form != FATTN_CP_ULYSSES || s->Hkv % ranks == 0);
}

static bool read_way(const shape *given, int way, int ranks, readings *r, int repeat) {
    shape s = *given;
    s.form = form_of(way), s.saves = way > FATTN_CP_ULYSSES;
    if (!time_on(&s, ranks, &r->whole[way][repeat])) return false;
    if (repeat > 0) return true;
    s.saves = false;
    s.alone = s.form == FATTN_CP_ULYSSES, s.stubbed = !s.alone;
    if (s.alone) s.Hq /= ranks, s.Hkv /= ranks;
    return time_on(&s, ranks, &r->compute[way]);
}

static int by_size(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x) {
    qsort(x, (size_t)repeats, sizeof *x, by_size);
    return (x[(repeats - 1) / 2] + x[repeats / 2]) / 2;
}

static times medians(const times *t) {
    double fwd[MOST_REPEATS], bwd[MOST_REPEATS], moves[MOST_REPEATS];
    for (int i = 0; i < repeats; ++i) fwd[i] = t[i].fwd, bwd[i] = t[i].bwd, moves[i] = t[i].moves;
    return (times){median(fwd), median(bwd), median(moves)};
}

static void print_way(const shape *s, int way, int parallel, const readings *r) {
    const times one = medians(r->one), whole = medians(r->whole[way]), compute_only = r->compute[way];
    double share[MOST_REPEATS];
    char name[32];
    for (int i = 0; i < repeats; ++i) {
        const times *const w = &r->whole[way][i];
        share[i] = (r->one[i].fwd + r->one[i].bwd) / (parallel * (w->fwd + w->bwd));
    }
    snprintf(name, sizeof name, "%lld/%lld x %lld", (long long)s->Hq, (long long)s->Hkv, (long long)s->D);
    printf("%-12s %7lld %-10s | %8.3f %8.3f | %8.3f %8.3f | %8.3f %8.3f | %8.3f | %6.3f", name, (long long)s->N,
           ways[way], 1e3 * one.fwd, 1e3 * one.bwd, 1e3 * whole.fwd, 1e3 * whole.bwd, 1e3 * compute_only.fwd,
           1e3 * compute_only.bwd, 1e3 * whole.moves, median(share));
    if (repeats > 1) printf(" (%.3f to %.3f)", share[0], share[repeats - 1]); /* the median has sorted them */
    printf("\n");
    fflush(stdout);
}

static int speed(int ranks, const model *models, int n_models, const int64_t *lengths, int n_lengths) {
    static readings r;
    const int parallel = ranks < gpus ? ranks : gpus;
    printf("bf16, causal, %d ranks on %d GPUs by %s; ms. efficiency: one rank's time for all / (%d x whole)\n", ranks,
           parallel, by_nccl ? "NCCL" : "threads", parallel);
    if (sm_limit) printf("kernels of several ranks on %d SMs\n", sm_limit);
    printf("%-12s %7s %-10s | %8s %8s | %8s %8s | %8s %8s | %8s | %6s\n", "heads x d", "N", "form", "one fwd", "bwd",
           "fwd", "bwd", "compute", "bwd", "moves", "eff.");
    for (int m = 0; m < n_models; ++m)
        for (int n = 0; n < n_lengths; ++n) {
            shape s = {.B = 1, .Hq = models[m].Hq, .Hkv = models[m].Hkv, .N = lengths[n], .D = models[m].D};
            s.dtype = FATTN_BF16, s.flags = FATTN_CAUSAL;
            s.calls = calls_for(&s);
            s.form = FATTN_CP_ULYSSES;
            for (int i = 0; i < repeats; ++i) {
                if (!time_one(&s, parallel, &r.one[i])) return 1;
                for (int way = FIRST_WAY; way < WAYS; ++way)
                    if (has_way(&s, way, ranks) && !read_way(&s, way, ranks, &r, i)) return 1;
            }
            for (int way = FIRST_WAY; way < WAYS; ++way)
                if (has_way(&s, way, ranks)) print_way(&s, way, parallel, &r);
        }
    return 0;
}

/* ---- moves ---- */

enum { SIZES = 14 }; /* 64 KB .. 512 MB */

static fattn_status time_messages(rank *r) {
    double *const out = r->out;
    for (int n = 0; n < SIZES; ++n) {
        const int64_t bytes = (int64_t)65536 << n;
        const int calls = n < 7 ? 50 : 5;
        fattn_tensor a, b;
        TRY(fattn_tensor_alloc(r->ctx, FATTN_U8, 1, &bytes, &a));
        TRY(fattn_tensor_alloc(r->ctx, FATTN_U8, 1, &bytes, &b));
        out[n] = 1e9;
        for (int round = 0; round < 1 + ROUNDS; ++round) {
            TRY(fattn_ctx_sync(r->ctx));
            TRY(fattn_comm_barrier(r->comm));
            TRY(fattn_ctx_sync(r->ctx));
            const double begin = now();
            for (int i = 0; i < calls; ++i)
                TRY(fattn_comm_send_receive(r->comm, &a, (r->number + 1) % r->size, &b,
                                            (r->number + r->size - 1) % r->size));
            TRY(fattn_ctx_sync(r->ctx));
            if (round > 0) out[n] = fmin(out[n], (now() - begin) / calls);
        }
        fattn_tensor_free(r->ctx, &a);
        fattn_tensor_free(r->ctx, &b);
    }
    return FATTN_OK;
}

static int moves(int ranks) {
    double all[MOST_RANKS][SIZES];
    void *outs[MOST_RANKS];
    for (int n = 0; n < ranks; ++n) outs[n] = all[n];
    if (!run(ranks, NULL, time_messages, outs)) return 1;
    printf("messages around %d ranks on %d GPUs by %s, each sends and receives\n%10s %10s %10s\n", ranks,
           ranks < gpus ? ranks : gpus, by_nccl ? "NCCL" : "threads", "KB", "us", "GB/s");
    for (int n = 0; n < SIZES; ++n) {
        double longest = 0;
        for (int r = 0; r < ranks; ++r) longest = fmax(longest, all[r][n]);
        printf("%10d %10.1f %10.1f\n", 64 << n, 1e6 * longest, 65536e-9 * (double)(1 << n) / longest);
    }
    return 0;
}

int main(int argc, char **argv) {
    model models[MOST_MODELS] = {{16, 16, 128}, {32, 8, 128}, {32, 4, 128}, {12, 12, 64}, {32, 8, 64}, {32, 4, 64}};
    int64_t lengths[MOST_LENGTHS] = {8192, 16384, 65536};
    int n = 3, m = 6;
    bool own_n = false, own_m = false;
    const int ranks = argc > 2 ? atoi(argv[2]) : 0;
    const char *const what = argc > 1 ? argv[1] : "", *const transport = argc > 3 ? argv[3] : "";
    by_nccl = strcmp(transport, "nccl") == 0;
    bool ok = ranks >= 1 && ranks <= MOST_RANKS && (by_nccl || strcmp(transport, "threads") == 0);
    ok = ok && (!strcmp(what, "bits") || !strcmp(what, "speed") || !strcmp(what, "moves"));
    for (int i = 4; i < argc && ok; ++i) {
        long long x[3];
        const int given = sscanf(argv[i], "%lldx%lldx%lld", &x[0], &x[1], &x[2]);
        if (sscanf(argv[i], "sms=%d", &sm_limit) == 1) continue;
        if (sscanf(argv[i], "repeats=%d", &repeats) == 1 && repeats >= 1 && repeats <= MOST_REPEATS) continue;
        for (int f = FATTN_CP_RING; f <= FATTN_CP_ULYSSES; ++f)
            if (!strcmp(argv[i], ways[f])) only_form = f;
        if (only_form && !strcmp(argv[i], ways[only_form])) continue;
        if (given == 3 && !own_m) m = 0, own_m = true;
        if (given == 1 && !own_n) n = 0, own_n = true;
        ok = (given == 3 && m < MOST_MODELS) || (given == 1 && n < MOST_LENGTHS);
        if (ok && given == 3) models[m++] = (model){x[0], x[1], x[2]};
        if (ok && given == 1) lengths[n++] = x[0];
    }
    if (!ok) {
        fprintf(stderr,
                "usage: ranks bits|speed|moves RANKS threads|nccl [N...] [HqxHkvxD...] [sms=N] [repeats=N] "
                "[ring|all-gather|ulysses]; at most %d ranks, %d repeats\n",
                MOST_RANKS, MOST_REPEATS);
        return 2;
    }
    if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0 || (by_nccl && gpus < ranks)) {
        fprintf(stderr, "ranks: %d GPUs are too few\n", gpus);
        return 1;
    }
    if (what[0] == 'b') return bits(ranks);
    return what[0] == 'm' ? moves(ranks) : speed(ranks, models, m, lengths, n);
}
