/* A sample file, and a function that reads all of a file: for tests, and for fuzz targets without Criterion. */
#include "fixtures.h"

#include <stdio.h>
#include <string.h>
#include <zlib.h>

void fixture_reseal(unsigned char *bytes, size_t size) {
    const unsigned long crc = crc32_z(0, bytes + FIXTURE_SEAL, size - FIXTURE_SEAL);
    memset(bytes, 0, FIXTURE_SEAL);
    snprintf((char *)bytes, FIXTURE_SEAL,
             "fattn fixture\nbytes %zu\ncrc32 of bytes 512 and up %08lx\nHDF5 begins at byte 512.\n", size, crc);
}

/* FNV-1a */
static void add(uint64_t *digest, const void *p, size_t bytes) {
    for (size_t n = 0; n < bytes; ++n) *digest = (*digest ^ ((const unsigned char *)p)[n]) * 0x100000001b3u;
}

static fattn_status read_dataset(fattn_ctx *ctx, fattn_fixture *f, const char *path, uint64_t *digest) {
    if (!fattn_fixture_has(f, path)) return FATTN_OK;
    fattn_tensor t = {0};
    const fattn_status s = fattn_fixture_get(f, path, FATTN_F64, &t);
    if (s != FATTN_OK) return s;
    add(digest, t.shape, sizeof t.shape);
    add(digest, t.data, (size_t)fattn_tensor_numel(&t) * sizeof(double));
    fattn_tensor_free(ctx, &t);
    return FATTN_OK;
}

static const char *const datasets[] = {"q",
                                       "k",
                                       "v",
                                       "o",
                                       "lse",
                                       "bias",
                                       "alibi",
                                       "sink",
                                       "seqlens_q",
                                       "seqlens_k",
                                       "cu_seqlens_q",
                                       "cu_seqlens_k",
                                       "rng_step",
                                       "d_o",
                                       "d_lse",
                                       "delta",
                                       "dq",
                                       "dk",
                                       "dv",
                                       "d_bias",
                                       "d_sink",
                                       "o_in",
                                       "lse_in",
                                       "dq_in",
                                       "dk_in",
                                       "dv_in",
                                       "d_bias_in",
                                       "d_sink_in",
                                       "fd/q_index",
                                       "fd/q_value",
                                       "fd/k_index",
                                       "fd/k_value",
                                       "fd/v_index",
                                       "fd/v_value",
                                       "fd/bias_index",
                                       "fd/bias_value",
                                       "fd/sink_index",
                                       "fd/sink_value"};

static fattn_status read_case(fattn_ctx *ctx, fattn_fixture *f, const char *name, uint64_t *digest) {
    char path[256], text[4096];
    double step;
    fattn_attention_params p = {.struct_size = sizeof p};
    fattn_status first = fattn_fixture_params(f, name, &p), s;
    add(digest, &p, sizeof p);
    snprintf(path, sizeof path, "/cases/%s", name);
    if ((s = fattn_fixture_get_text(f, path, "note", text, sizeof text)) == FATTN_OK)
        add(digest, text, strlen(text));
    else if (first == FATTN_OK)
        first = s;
    for (size_t n = 0; n < sizeof datasets / sizeof *datasets; ++n) {
        snprintf(path, sizeof path, "/cases/%s/%s", name, datasets[n]);
        s = read_dataset(ctx, f, path, digest);
        if (first == FATTN_OK) first = s;
        if (strstr(path, "_value") && fattn_fixture_has(f, path) &&
            fattn_fixture_get_f64(f, path, "step", &step) == FATTN_OK)
            add(digest, &step, sizeof step);
    }
    fattn_fixture_attention c = {.struct_size = sizeof c};
    s = fattn_fixture_attention_load(f, name, FATTN_F64, &c);
    if (s == FATTN_OK) fattn_fixture_attention_free(ctx, &c);
    return first == FATTN_OK ? s : first;
}

fattn_status fixture_read_all(fattn_ctx *ctx, const char *path, uint64_t *digest) {
    fattn_fixture *f;
    *digest = 0xcbf29ce484222325u;
    fattn_status first = fattn_fixture_open(ctx, path, 0, &f);
    if (first != FATTN_OK) return f ? FATTN_E_STATE : first;
    for (int n = 0; n < fattn_fixture_count(f); ++n) {
        const char *const name = fattn_fixture_case(f, n);
        add(digest, name, strlen(name));
        const fattn_status s = read_case(ctx, f, name, digest);
        if (first == FATTN_OK) first = s;
    }
    const fattn_status closed = fattn_fixture_close(f);
    return closed == FATTN_OK ? first : closed;
}

/* Numbers that depend on the name; I32: 0 or 1. */
static fattn_status put(fattn_ctx *ctx, fattn_fixture *f, const char *name, fattn_dtype t, int ndim,
                        const int64_t *shape) {
    char path[64];
    fattn_tensor x = {0}, integers = {0};
    snprintf(path, sizeof path, "/cases/a/%s", name);
    fattn_status s = fattn_tensor_alloc(ctx, t == FATTN_I32 ? FATTN_F32 : t, ndim, shape, &x);
    if (!s) s = fattn_tensor_normal(ctx, &x, 0, 1, (fattn_rng){.seed = (uint64_t)name[0]});
    if (!s && t == FATTN_I32) s = fattn_tensor_alloc(ctx, t, ndim, shape, &integers);
    for (int64_t n = 0; integers.data && n < fattn_tensor_numel(&x); ++n)
        ((int32_t *)integers.data)[n] = ((float *)x.data)[n] > 0;
    if (!s) s = fattn_fixture_put(f, path, t == FATTN_I32 ? &integers : &x);
    fattn_tensor_free(ctx, &integers);
    fattn_tensor_free(ctx, &x);
    return s;
}

fattn_status fixture_write_sample(fattn_ctx *ctx, const char *path) {
    enum { B = 1, H = 2, S = 17, D = 8 };
    const fattn_attention_params p = {.struct_size = sizeof p,
                                      .flags = FATTN_CAUSAL | FATTN_MERGE,
                                      .scale = 0.5f,
                                      .rng = {.seed = 0x123456789abcdefu}};
    const int64_t x[4] = {B, H, S, D}, bias[4] = {1, 1, 1, S}, heads = H, batch = B, sample = 5;
    const struct {
        const char *name;
        fattn_dtype t;
        int ndim;
        const int64_t *shape;
    } sets[] = {{"q", FATTN_F32, 4, x},
                {"k", FATTN_F32, 4, x},
                {"v", FATTN_F32, 4, x},
                {"d_o", FATTN_F32, 4, x},
                {"o", FATTN_F64, 4, x},
                {"lse", FATTN_F64, 3, x},
                {"o_in", FATTN_F32, 4, x},
                {"lse_in", FATTN_F32, 3, x},
                {"dq", FATTN_F64, 4, x},
                {"dk", FATTN_F64, 4, x},
                {"dv", FATTN_F64, 4, x},
                {"bias", FATTN_F32, 4, bias},
                {"d_bias", FATTN_F64, 4, bias},
                {"sink", FATTN_F32, 1, &heads},
                {"d_sink", FATTN_F64, 1, &heads},
                {"seqlens_k", FATTN_I32, 1, &batch},
                {"rng_step", FATTN_I32, 0, NULL},
                {"fd/q_index", FATTN_I32, 1, &sample},
                {"fd/q_value", FATTN_F64, 1, &sample}};
    fattn_fixture *f;
    fattn_status s = fattn_fixture_open(ctx, path, 1, &f);
    if (s) return s;
    s = fattn_fixture_put_params(f, "a", &p);
    if (!s) s = fattn_fixture_put_text(f, "/cases/a", "layout", "bshd");
    if (!s) s = fattn_fixture_put_text(f, "/cases/a", "note", "every dataset");
    for (size_t n = 0; !s && n < sizeof sets / sizeof *sets; ++n)
        s = put(ctx, f, sets[n].name, sets[n].t, sets[n].ndim, sets[n].shape);
    if (!s) s = fattn_fixture_put_f64(f, "/cases/a/fd/q_value", "step", 0x1p-17);
    const fattn_status closed = fattn_fixture_close(f);
    return s ? s : closed;
}
