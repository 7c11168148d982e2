/* Outputs, workspace and saved that share memory with another tensor of the call are rejected exactly when
   addresses prove it. */
#include "core/attention/kernel.h"

#include <criterion/criterion.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { B = 2, HQ = 4, HKV = 2, SQ = 6, SK = 8, D = 8, ROOM = 1 << 18, PLACES = 23 };
enum { WORKSPACE = 21, SAVED = 22 };

static fattn_ctx *ctx;
static char *memory; /* ROOM bytes for each tensor, workspace and saved */

static void set_up(void) {
    const fattn_ctx_options o = {.struct_size = sizeof o, .cpu_threads = 1};
    cr_assert_eq(fattn_ctx_create(&o, &ctx), FATTN_OK);
    memory = aligned_alloc(256, (size_t)PLACES * ROOM);
    memset(memory, 0, (size_t)PLACES * ROOM);
}
static void tear_down(void) {
    free(memory);
    fattn_ctx_destroy(ctx);
}
TestSuite(overlaps, .init = set_up, .fini = tear_down);

static const char *const names[PLACES] = {
    "q",         "k",         "v",         "o",        "lse",          "bias",         "alibi",
    "sink",      "seqlens_q", "seqlens_k", "rng_step", "cu_seqlens_q", "cu_seqlens_k", "d_o",
    "d_lse",     "delta",     "dq",        "dk",       "dv",           "d_bias",       "d_sink",
    "workspace", "saved"};

typedef struct call {
    fattn_attention_params p;
    fattn_attention_io io;
    fattn_tensor t[WORKSPACE];
} call;

/* Every tensor there is; packed or padded. */
static void fill(call *c, fattn_dtype dtype, int32_t algorithm, bool packed) {
    const fattn_dtype wide = dtype == FATTN_F64 ? dtype : FATTN_F32;
    const struct {
        fattn_dtype dtype;
        int ndim;
        int64_t shape[4];
    } of[WORKSPACE] = {{dtype, 4, {B, HQ, SQ, D}},
                       {dtype, 4, {B, HKV, SK, D}},
                       {dtype, 4, {B, HKV, SK, D}},
                       {dtype, 4, {B, HQ, SQ, D}},
                       {wide, 3, {B, HQ, SQ}},
                       {dtype, 4, {B, HQ, SQ, SK}},
                       {wide, 1, {HQ}},
                       {wide, 1, {HQ}},
                       {FATTN_I32, 1, {B}},
                       {FATTN_I32, 1, {B}},
                       {FATTN_I32, 0, {0}},
                       {FATTN_I32, 1, {B + 1}},
                       {FATTN_I32, 1, {B + 1}},
                       {dtype, 4, {B, HQ, SQ, D}},
                       {wide, 3, {B, HQ, SQ}},
                       {wide, 3, {B, HQ, SQ}},
                       {dtype, 4, {B, HQ, SQ, D}},
                       {dtype, 4, {B, HKV, SK, D}},
                       {dtype, 4, {B, HKV, SK, D}},
                       {wide, 4, {B, HQ, SQ, SK}},
                       {wide, 1, {HQ}}};
    *c = (call){.p = {.struct_size = sizeof c->p,
                      .algorithm = algorithm,
                      .dropout_p = 0.5f,
                      .max_seqlen_q = SQ,
                      .max_seqlen_k = SK},
                .io = {.struct_size = sizeof c->io}};
    for (int n = 0; n < WORKSPACE; ++n) {
        const bool rows = packed && (n < 5 || (n >= 13 && n < 19)); /* [1,H,total,D] */
        int64_t shape[4];
        memcpy(shape, of[n].shape, sizeof shape);
        if (rows) shape[0] = 1, shape[2] *= B;
        c->t[n] = fattn_tensor_view(memory + n * ROOM, of[n].dtype, FATTN_CPU, 0, of[n].ndim, shape);
    }
    fattn_attention_io *const io = &c->io;
    io->q = &c->t[0], io->k = &c->t[1], io->v = &c->t[2], io->o = &c->t[3], io->lse = &c->t[4];
    io->bias = &c->t[5], io->alibi = &c->t[6], io->sink = &c->t[7], io->rng_step = &c->t[10];
    if (packed)
        io->cu_seqlens_q = &c->t[11], io->cu_seqlens_k = &c->t[12];
    else
        io->seqlens_q = &c->t[8], io->seqlens_k = &c->t[9];
    io->d_o = &c->t[13], io->d_lse = &c->t[14], io->delta = &c->t[15];
    io->dq = &c->t[16], io->dk = &c->t[17], io->dv = &c->t[18];
    io->d_bias = &c->t[19], io->d_sink = &c->t[20];
    io->workspace = memory + WORKSPACE * ROOM, io->saved = memory + SAVED * ROOM;
    io->workspace_bytes = io->saved_bytes = ROOM;
    memset(io->workspace, 0, 4096); /* counters of the call before, which are no lengths */
}

static fattn_status run(call *c, bool forward) {
    return forward ? fattn_attention_fwd(ctx, &c->p, &c->io) : fattn_attention_bwd(ctx, &c->p, &c->io);
}

static void move(call *c, int n, char *to) {
    if (n == WORKSPACE)
        c->io.workspace = to;
    else if (n == SAVED)
        c->io.saved = to;
    else
        c->t[n].data = to;
}
static char *place(const call *c, int n) {
    return n == WORKSPACE ? c->io.workspace : n == SAVED ? c->io.saved : c->t[n].data;
}

/* What a pass writes, and what it reads or writes. */
static bool is_written(int n, bool forward, bool saves) {
    if (n == SAVED) return forward && saves;
    return n == WORKSPACE || (forward ? n == 3 || n == 4 : n >= 16 && n <= 20);
}
static bool is_used(int n, bool forward, bool packed, bool saves) {
    if (n == SAVED) return saves;
    if (n == WORKSPACE) return true;
    if (n == 8 || n == 9) return !packed;
    if (n == 11 || n == 12) return packed;
    return n < 13 || !forward;
}

/* Each result at the first element of each other tensor, in every dtype and algorithm, with what each saves. */
Test(overlaps, one_place_for_two_is_rejected) {
    static const fattn_dtype types[] = {FATTN_F64, FATTN_F32, FATTN_F16, FATTN_BF16};
    for (int n = 0; n < 4 * 2 * 2 * 4 * 2; ++n) {
        const fattn_dtype dtype = types[n % 4];
        const bool packed = n / 4 % 2, forward = n / 8 % 2, exact_delta = n / 64 && n % 4 > 1;
        const int32_t algorithm = n / 16 % 4;
        const bool saves = algorithm == FATTN_ALGO_STANDARD || exact_delta;
        const uint32_t flags = exact_delta ? FATTN_EXACT_DELTA : 0;
        if (n / 64 && (!exact_delta || algorithm == FATTN_ALGO_STANDARD)) continue;
        call c;
        fill(&c, dtype, algorithm, packed);
        c.p.flags = flags;
        cr_assert_eq(run(&c, forward), FATTN_OK, "%s", fattn_ctx_error(ctx));
        for (int a = 0; a < PLACES; ++a)
            for (int b = 0; b < PLACES; ++b) {
                if (a == b || !is_used(b, forward, packed, saves)) continue;
                if (!is_used(a, forward, packed, saves)) continue;
                const bool wrong = is_written(a, forward, saves) || is_written(b, forward, saves);
                char first[32], second[32];
                fill(&c, dtype, algorithm, packed);
                c.p.flags = flags;
                move(&c, a, place(&c, b));
                const fattn_status s = run(&c, forward);
                if (!wrong) {
                    cr_assert_eq(s, FATTN_OK, "%s at %s: %s", names[a], names[b], fattn_ctx_error(ctx));
                    continue;
                }
                snprintf(first, sizeof first, "%s and", names[a]);
                snprintf(second, sizeof second, "%s and", names[b]);
                cr_assert_eq(s, FATTN_E_ARG, "%s at %s in %s, algorithm %d", names[a], names[b],
                             forward ? "forward" : "backward", algorithm);
                const char *const text = fattn_ctx_error(ctx);
                cr_assert(strstr(text, first) || strstr(text, second), "%s", text);
                cr_assert(strstr(text, names[a]) && strstr(text, names[b]) && strstr(text, "0x"), "%s", text);
            }
    }
}

/* A slice [.., part, ..] of memory seen as [rows, parts, width] elements of F32. */
static fattn_tensor part_of(void *data, int64_t H, int64_t S, int64_t parts, int64_t part) {
    fattn_tensor t = fattn_tensor_view((float *)data + part * H * D, FATTN_F32, FATTN_CPU, 0, 4,
                                       (int64_t[]){B, H, S, D}); /* of [B,S,parts,H,D] */
    t.stride[0] = S * parts * H * D, t.stride[1] = D, t.stride[2] = parts * H * D;
    return t;
}

/* Address ranges intersect, but no element is shared. */
Test(overlaps, slices_of_one_buffer_are_fine) {
    for (int layout = 0; layout < 3; ++layout) {
        call c;
        fill(&c, FATTN_F32, FATTN_ALGO_AUTO, false);
        c.io.bias = c.io.d_bias = NULL;
        for (int n = 0; n < 19; ++n) { /* [B,S,8,H,D]: everything in one buffer */
            static const int part[19] = {[0] = 0, [1] = 1, [2] = 2, [3] = 3, [13] = 4, [16] = 5, [17] = 6, [18] = 7};
            if (n > 3 && n != 13 && n < 16) continue;
            c.t[n] = part_of(memory, HQ, SQ, 8, part[n]);
            if (layout == 1) { /* [B,S,H,8 D] */
                c.t[n].data = (float *)(void *)memory + part[n] * D;
                c.t[n].stride[1] = 8 * D, c.t[n].stride[2] = HQ * 8 * D;
            }
            if (layout == 2) { /* [8,D,..]: each dense, side by side */
                c.t[n] = fattn_tensor_view((float *)(void *)memory + part[n] * B * HQ * SQ * D, FATTN_F32, FATTN_CPU, 0,
                                           4, (int64_t[]){B, HQ, SQ, D});
            }
        }
        for (int forward = 1; forward >= 0; --forward)
            cr_assert_eq(run(&c, forward), FATTN_OK, "layout %d: %s", layout, fattn_ctx_error(ctx));
        c.t[18].data = c.t[17].data; /* dv = dk */
        cr_assert_eq(run(&c, false), FATTN_E_ARG);
    }
}

/* L in the padding of o's rows; o's rows in q's padding; results with room of no element. */
Test(overlaps, memory_between_rows_is_free) {
    call c;
    fill(&c, FATTN_F32, FATTN_ALGO_AUTO, false);
    float *const rows = (float *)(void *)memory;
    for (int n = 0; n < 4; n += 3) { /* q and o: rows of D out of 3 D */
        c.t[n].stride[2] = 3 * D, c.t[n].stride[1] = SQ * 3 * D, c.t[n].stride[0] = HQ * SQ * 3 * D;
        c.t[n].data = rows + (n ? D : 0);
    }
    c.t[4].data = rows + 2 * D;
    c.t[4].stride[2] = 3 * D, c.t[4].stride[1] = SQ * 3 * D, c.t[4].stride[0] = HQ * SQ * 3 * D;
    cr_assert_eq(run(&c, true), FATTN_OK, "%s", fattn_ctx_error(ctx));
    c.t[4].data = rows + 2 * D - 1; /* an element of o */
    cr_assert_eq(run(&c, true), FATTN_E_ARG);
}

/* Random layouts of q and o in one small buffer against the elements themselves. */
static uint64_t state = 1;
static int64_t roll(int64_t n) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (int64_t)(state >> 33) % n;
}

Test(overlaps, what_is_rejected_shares_an_element) {
    enum { CELLS = 400 };
    int rejected = 0, missed = 0, fine = 0;
    for (int n = 0; n < 30000; ++n) {
        fattni_problem p = {.pass = FATTNI_FWD};
        fattni_array *const both[2] = {&p.o, &p.q};
        bool used[2][CELLS] = {{false}}, dense = true, shares = false;
        for (int k = 0; k < 2; ++k) {
            fattni_array *const a = both[k];
            int64_t low = 0, high = 0, next = 1, count = 1, cells = 0;
            *a = (fattni_array){.dtype = FATTN_F32, .present = true};
            int order[4] = {0, 1, 2, 3};
            for (int d = 3; d > 0; --d) {
                const int64_t other = roll(d + 1);
                const int swap = order[d];
                order[d] = order[other], order[other] = swap;
            }
            for (int d = 0; d < 4; ++d) {
                const int at = order[d];
                a->n[at] = 1 + roll(3);
                if (a->n[at] == 1) continue;
                a->s[at] = roll(3) ? next : roll(3) ? next + roll(4) : roll(6); /* dense, gaps, anything */
                if (roll(4) == 0) a->s[at] = -a->s[at];
                next = a->n[at] * (a->s[at] < 0 ? -a->s[at] : a->s[at]);
                (a->s[at] < 0 ? &low : &high)[0] += (a->n[at] - 1) * a->s[at];
                count *= a->n[at];
            }
            if (high - low >= CELLS) {
                --k;
                continue;
            }
            const int64_t start = roll(CELLS - (high - low)) - low;
            a->p = (float *)(void *)memory + start;
            for (int64_t e = 0; e < count; ++e) {
                int64_t at = start, rest = e;
                for (int d = 0; d < 4; ++d) {
                    at += rest % a->n[d] * a->s[d];
                    rest /= a->n[d];
                }
                cells += !used[k][at];
                used[k][at] = true;
            }
            dense = dense && cells == high - low + 1;
        }
        for (int e = 0; e < CELLS; ++e) shares = shares || (used[0][e] && used[1][e]);
        const bool proven = fattni_check_overlaps(ctx, &p, 0, 0) != FATTN_OK;
        cr_assert(!proven || shares, "call %d: nothing is shared, but: %s", n, fattn_ctx_error(ctx));
        const bool nests = dense && shares;
        rejected += proven, fine += !shares, missed += nests && !proven;
    }
    /* Tensors with overlapping windows may be dense without nesting; all others are detected. */
    printf("%d rejected, %d fine, %d dense and missed\n", rejected, fine, missed);
    cr_assert_gt(rejected, 1500);
    cr_assert_gt(fine, 3000);
    cr_assert_lt(missed, rejected / 100);
}

Test(overlaps, flags_that_add_change_nothing) {
    call c;
    fill(&c, FATTN_F32, FATTN_ALGO_AUTO, false);
    c.p.flags = FATTN_MERGE;
    cr_assert_eq(run(&c, true), FATTN_OK, "%s", fattn_ctx_error(ctx));
    c.p.flags = FATTN_ACC_DQ | FATTN_ACC_DK | FATTN_ACC_DV | FATTN_ACC_DBIAS | FATTN_ACC_DSINK;
    cr_assert_eq(run(&c, false), FATTN_OK, "%s", fattn_ctx_error(ctx));
    c.t[13].data = c.t[3].data, c.t[1].data = c.t[2].data; /* inputs may be one: d_o = o, k = v */
    cr_assert_eq(run(&c, false), FATTN_OK, "%s", fattn_ctx_error(ctx));
    c.io.workspace = memory + 3 * ROOM + 256; /* ends inside of what lies beyond o */
    cr_assert_eq(run(&c, false), FATTN_E_ARG);
    cr_assert(strstr(fattn_ctx_error(ctx), "workspace and"), "%s", fattn_ctx_error(ctx));
}

/* Only the bytes that a kernel needs are checked, not all of workspace_bytes. */
Test(overlaps, only_what_is_needed_of_the_workspace_counts) {
    call c;
    fill(&c, FATTN_F32, FATTN_ALGO_AUTO, false);
    c.io.workspace = memory;
    for (int n = 0; n < 5; ++n) c.t[n].data = memory + (WORKSPACE - 4) * ROOM + n * ROOM;
    c.io.workspace_bytes = SIZE_MAX / 2;
    cr_assert_eq(run(&c, true), FATTN_OK, "%s", fattn_ctx_error(ctx));
}

/* Nothing shares memory with a tensor that has no element. */
Test(overlaps, tensors_without_elements) {
    call c;
    fill(&c, FATTN_F32, FATTN_ALGO_AUTO, false);
    c.io.bias = c.io.d_bias = NULL;
    for (int n = 0; n < WORKSPACE; ++n)
        if (n != 6 && n != 7 && n != 10 && n != 20) {
            if (n >= 8 && n <= 12) continue;
            c.t[n].shape[2] = 0, c.t[n].data = memory;
        }
    for (int forward = 1; forward >= 0; --forward) cr_assert_eq(run(&c, forward), FATTN_OK, "%s", fattn_ctx_error(ctx));
}
