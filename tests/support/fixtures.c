#define _POSIX_C_SOURCE 200809L
#include "fixtures.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>

void fixture_temporary(char path[FIXTURE_PATH]) {
    strcpy(path, "/tmp/fattn_fixture_XXXXXX");
    const int file = mkstemp(path);
    cr_assert(file >= 0, "no temporary file");
    close(file);
}

unsigned char *fixture_bytes(const char *path, size_t *size) {
    FILE *const file = fopen(path, "rb");
    cr_assert_not_null(file, "%s", path);
    fseek(file, 0, SEEK_END);
    *size = (size_t)ftell(file);
    rewind(file);
    unsigned char *const bytes = calloc(*size + 1, 1);
    cr_assert_eq(fread(bytes, 1, *size, file), *size);
    fclose(file);
    return bytes;
}

void fixture_write_bytes(const char *path, const void *bytes, size_t size) {
    FILE *const file = fopen(path, "wb");
    cr_assert_not_null(file, "%s", path);
    cr_assert_eq(fwrite(bytes, 1, size, file), size);
    cr_assert_eq(fclose(file), 0);
}

void fixture_reseal(unsigned char *bytes, size_t size) {
    const unsigned long crc = crc32_z(0, bytes + FIXTURE_SEAL, size - FIXTURE_SEAL);
    memset(bytes, 0, FIXTURE_SEAL);
    snprintf(
        (char *)bytes, FIXTURE_SEAL,
        "fattn fixture\nbytes %zu\ncrc32 of bytes 512 and up %08lx\nHDF5 begins at byte 512.\n",
        size, crc);
}

/* FNV-1a */
static void add(uint64_t *digest, const void *p, size_t bytes) {
    for (size_t n = 0; n < bytes; ++n)
        *digest = (*digest ^ ((const unsigned char *)p)[n]) * 0x100000001b3u;
}

static fattn_status read_dataset(fattn_ctx *ctx, fattn_fixture *f, const char *path,
                                 uint64_t *digest) {
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

static fattn_status read_case(fattn_ctx *ctx, fattn_fixture *f, const char *name,
                              uint64_t *digest) {
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
    if (first != FATTN_OK) {
        cr_assert_null(f);
        return first;
    }
    for (int n = 0; n < fattn_fixture_count(f); ++n) {
        const char *const name = fattn_fixture_case(f, n);
        add(digest, name, strlen(name));
        const fattn_status s = read_case(ctx, f, name, digest);
        if (first == FATTN_OK) first = s;
    }
    cr_assert_eq(fattn_fixture_close(f), FATTN_OK);
    return first;
}

#define OK(call) cr_assert_eq((call), FATTN_OK, "%s", fattn_ctx_error(ctx))

static void put(fattn_ctx *ctx, fattn_fixture *f, const char *name, fattn_dtype t, int ndim,
                const int64_t *shape) {
    char path[64];
    fattn_tensor x, integers;
    snprintf(path, sizeof path, "/cases/a/%s", name);
    OK(fattn_tensor_alloc(ctx, t == FATTN_I32 ? FATTN_F32 : t, ndim, shape, &x));
    OK(fattn_tensor_normal(ctx, &x, 0, 1, (fattn_rng){.seed = (uint64_t)name[0]}));
    if (t == FATTN_I32) { /* 0 or 1 */
        OK(fattn_tensor_alloc(ctx, t, ndim, shape, &integers));
        for (int64_t n = 0; n < fattn_tensor_numel(&x); ++n)
            ((int32_t *)integers.data)[n] = ((float *)x.data)[n] > 0;
        OK(fattn_fixture_put(f, path, &integers));
        fattn_tensor_free(ctx, &integers);
    } else {
        OK(fattn_fixture_put(f, path, &x));
    }
    fattn_tensor_free(ctx, &x);
}

void fixture_write_sample(fattn_ctx *ctx, const char *path) {
    enum { B = 1, H = 2, S = 17, D = 8 };
    const fattn_attention_params p = {.struct_size = sizeof p,
                                      .flags = FATTN_CAUSAL | FATTN_MERGE,
                                      .scale = 0.5f,
                                      .rng = {.seed = 0x123456789abcdefu}};
    const int64_t x[4] = {B, H, S, D}, bias[4] = {1, 1, 1, S}, heads = H, batch = B, sample = 5;
    fattn_fixture *f;
    OK(fattn_fixture_open(ctx, path, 1, &f));
    OK(fattn_fixture_put_params(f, "a", &p));
    OK(fattn_fixture_put_text(f, "/cases/a", "layout", "bshd"));
    OK(fattn_fixture_put_text(f, "/cases/a", "note", "every dataset"));
    put(ctx, f, "q", FATTN_F32, 4, x), put(ctx, f, "k", FATTN_F32, 4, x);
    put(ctx, f, "v", FATTN_F32, 4, x), put(ctx, f, "d_o", FATTN_F32, 4, x);
    put(ctx, f, "o", FATTN_F64, 4, x), put(ctx, f, "lse", FATTN_F64, 3, x);
    put(ctx, f, "o_in", FATTN_F32, 4, x), put(ctx, f, "lse_in", FATTN_F32, 3, x);
    put(ctx, f, "dq", FATTN_F64, 4, x), put(ctx, f, "dk", FATTN_F64, 4, x);
    put(ctx, f, "dv", FATTN_F64, 4, x), put(ctx, f, "bias", FATTN_F32, 4, bias);
    put(ctx, f, "d_bias", FATTN_F64, 4, bias), put(ctx, f, "sink", FATTN_F32, 1, &heads);
    put(ctx, f, "d_sink", FATTN_F64, 1, &heads), put(ctx, f, "seqlens_k", FATTN_I32, 1, &batch);
    put(ctx, f, "rng_step", FATTN_I32, 0, NULL), put(ctx, f, "fd/q_index", FATTN_I32, 1, &sample);
    put(ctx, f, "fd/q_value", FATTN_F64, 1, &sample);
    OK(fattn_fixture_put_f64(f, "/cases/a/fd/q_value", "step", 0x1p-17));
    OK(fattn_fixture_close(f));
}
