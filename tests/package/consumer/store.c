/* Writes a tensor into an HDF5 fixture and reads it back. argv[1]: the file. */
#include <fattn/fattn.h>
#include <fattn/fixture.h>

#include <stdio.h>
#include <string.h>

static fattn_status round_trip(fattn_ctx *ctx, const char *path, const fattn_tensor *x, fattn_tensor *back) {
    fattn_fixture *f;
    fattn_status s = fattn_fixture_open(ctx, path, 1, &f);
    if (s != FATTN_OK) return s;
    s = fattn_fixture_put(f, "/cases/one/q", x);
    const fattn_status closed = fattn_fixture_close(f);
    if (s == FATTN_OK) s = closed;
    if (s == FATTN_OK) s = fattn_fixture_open(ctx, path, 0, &f);
    if (s != FATTN_OK) return s;
    s = fattn_fixture_get(f, "/cases/one/q", FATTN_F64, back);
    const fattn_status ended = fattn_fixture_close(f);
    return s == FATTN_OK ? ended : s;
}

int main(int argc, char **argv) {
    double data[6] = {1, -2, 3.5, 4, 1e300, 0};
    const fattn_tensor x = fattn_tensor_view(data, FATTN_F64, FATTN_CPU, 0, 2, (const int64_t[]){2, 3});
    fattn_tensor back = {0};
    fattn_ctx *ctx;
    if (argc < 2 || fattn_ctx_create(NULL, &ctx) != FATTN_OK) return 2;
    const fattn_status s = round_trip(ctx, argv[1], &x, &back);
    if (s != FATTN_OK) fprintf(stderr, "%s: %s\n", fattn_status_name(s), fattn_ctx_error(ctx));
    const int same = s == FATTN_OK && memcmp(back.data, data, sizeof data) == 0;
    fattn_tensor_free(ctx, &back);
    fattn_ctx_destroy(ctx);
    return !same;
}
