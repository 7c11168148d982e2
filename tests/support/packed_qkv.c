#define _POSIX_C_SOURCE 200809L
#include "packed_qkv.h"

#include <criterion/criterion.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static const fattn_attention_params causal = {.struct_size = sizeof causal, .flags = FATTN_CAUSAL};

static size_t rows_of(const packed_qkv *x) { return (size_t)x->B * (size_t)x->T; }
static size_t qkv_size(const packed_qkv *x) { return rows_of(x) * (size_t)((x->Hq + 2 * x->Hkv) * x->HS); }
static size_t o_size(const packed_qkv *x) { return rows_of(x) * (size_t)(x->Hq * x->HS); }
static size_t lse_size(const packed_qkv *x) { return rows_of(x) * (size_t)x->Hq; }

static void *of_bytes(size_t bytes, int byte) {
    void *const p = malloc(bytes);
    cr_assert_not_null(p);
    return memset(p, byte, bytes);
}

static uint16_t *normal(fattn_ctx *ctx, fattn_dtype dtype, size_t n, uint64_t seed) {
    uint16_t *const p = of_bytes(n * sizeof *p, 0);
    const fattn_tensor t = fattn_tensor_view(p, dtype, FATTN_CPU, 0, 1, (int64_t[]){(int64_t)n});
    cr_assert_eq(fattn_tensor_normal(ctx, &t, 0, 1, (fattn_rng){.seed = seed}), FATTN_OK);
    return p;
}

packed_qkv packed_new(fattn_dtype dtype, int B, int T, int Hq, int Hkv, int HS) {
    packed_qkv x = {dtype, B, T, Hq, Hkv, HS};
    fattn_ctx *ctx;
    cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK);
    x.qkv = normal(ctx, dtype, qkv_size(&x), 1);
    x.d_o = normal(ctx, dtype, o_size(&x), 2);
    x.dqkv = of_bytes(qkv_size(&x) * sizeof *x.dqkv, 0xff);
    x.o = of_bytes(o_size(&x) * sizeof *x.o, 0xff);
    x.lse = of_bytes(lse_size(&x) * sizeof *x.lse, 0xff);
    fattn_ctx_destroy(ctx);
    return x;
}

void packed_free(packed_qkv *x) {
    free(x->qkv), free(x->d_o), free(x->dqkv), free(x->o), free(x->lse);
    *x = (packed_qkv){0};
}

/* Copies H heads between rows [B,T,width,HS], from head `first` on, and row-major [B,H,T,HS]. */
static void copy_heads(const packed_qkv *x, uint16_t *rows, int width, int first, uint16_t *heads, int H, int to_rows) {
    const size_t HS = (size_t)x->HS;
    for (int b = 0; b < x->B; ++b)
        for (int h = 0; h < H; ++h)
            for (int t = 0; t < x->T; ++t) {
                uint16_t *const a = rows + ((size_t)(b * x->T + t) * (size_t)width + (size_t)(first + h)) * HS;
                uint16_t *const c = heads + ((size_t)(b * H + h) * (size_t)x->T + (size_t)t) * HS;
                memcpy(to_rows ? a : c, to_rows ? c : a, HS * sizeof *a);
            }
}

/* A row-major tensor of memory of its own. */
static fattn_tensor heads_of(const packed_qkv *x, int H) {
    const int64_t shape[] = {x->B, H, x->T, x->HS};
    void *const p = of_bytes(rows_of(x) * (size_t)(H * x->HS) * 2, 0xff);
    return fattn_tensor_view(p, x->dtype, FATTN_CPU, 0, 4, shape);
}

void packed_check(const packed_qkv *x, int gradients) {
    const int H[] = {x->Hq, x->Hkv, x->Hkv}, first[] = {0, x->Hq, x->Hq + x->Hkv}, width = x->Hq + 2 * x->Hkv;
    fattn_tensor in[3], gradient[3], o = heads_of(x, x->Hq), d_o = heads_of(x, x->Hq);
    packed_qkv want = *x;
    want.o = of_bytes(o_size(x) * sizeof *want.o, 0);
    want.dqkv = of_bytes(qkv_size(x) * sizeof *want.dqkv, 0);
    want.lse = of_bytes(lse_size(x) * sizeof *want.lse, 0);
    for (int n = 0; n < 3; ++n) {
        in[n] = heads_of(x, H[n]);
        gradient[n] = heads_of(x, H[n]);
        copy_heads(x, x->qkv, width, first[n], in[n].data, H[n], 0);
    }
    copy_heads(x, x->d_o, x->Hq, 0, d_o.data, x->Hq, 0);

    fattn_ctx *ctx;
    fattn_tensor workspace = {0};
    const fattn_tensor lse = fattn_tensor_view(want.lse, FATTN_F32, FATTN_CPU, 0, 3, (int64_t[]){x->B, x->Hq, x->T});
    fattn_attention_io io = {.struct_size = sizeof io, .q = &in[0], .k = &in[1], .v = &in[2], .o = &o, .lse = &lse};
    io.d_o = &d_o, io.dq = &gradient[0], io.dk = &gradient[1], io.dv = &gradient[2];
    fattn_attention_plan plan = {.struct_size = sizeof plan};
    cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK);
    cr_assert_eq(fattn_attention_query(ctx, &causal, &io, &plan), FATTN_OK, "%s", fattn_ctx_error(ctx));
    io.workspace_bytes = plan.fwd_workspace > plan.bwd_workspace ? plan.fwd_workspace : plan.bwd_workspace;
    const int64_t bytes = (int64_t)io.workspace_bytes;
    cr_assert_eq(fattn_tensor_alloc(ctx, FATTN_U8, 1, &bytes, &workspace), FATTN_OK);
    io.workspace = workspace.data;
    cr_assert_eq(fattn_attention_fwd(ctx, &causal, &io), FATTN_OK, "%s", fattn_ctx_error(ctx));
    cr_assert_eq(fattn_attention_bwd(ctx, &causal, &io), FATTN_OK, "%s", fattn_ctx_error(ctx));
    fattn_tensor_free(ctx, &workspace);
    fattn_ctx_destroy(ctx);

    copy_heads(x, want.o, x->Hq, 0, o.data, x->Hq, 1);
    for (int n = 0; n < 3; ++n) {
        copy_heads(x, want.dqkv, width, first[n], gradient[n].data, H[n], 1);
        free(in[n].data), free(gradient[n].data);
    }
    free(o.data), free(d_o.data);
    cr_assert_arr_eq(x->o, want.o, o_size(x) * sizeof *x->o, "o");
    cr_assert_arr_eq(x->lse, want.lse, lse_size(x) * sizeof *x->lse, "stats");
    if (gradients) cr_assert_arr_eq(x->dqkv, want.dqkv, qkv_size(x) * sizeof *x->dqkv, "gradients");
    free(want.o), free(want.dqkv), free(want.lse);
}

void packed_check_failure(void (*call)(packed_qkv *x), packed_qkv *x, const char *message) {
    int ends[2];
    cr_assert_eq(pipe(ends), 0);
    const pid_t child = fork();
    cr_assert(child >= 0);
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]), close(ends[1]);
        call(x);
        _exit(0);
    }
    close(ends[1]);
    char text[4096];
    size_t size = 0;
    for (ssize_t n; size < sizeof text - 1 && (n = read(ends[0], text + size, sizeof text - 1 - size)) > 0;)
        size += (size_t)n;
    text[size] = 0;
    close(ends[0]);
    int status = 0;
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_FAILURE, "wait status %d: %s", status, text);
    cr_assert_not_null(strstr(text, message), "not '%s', but: %s", message, text);
}
