/* Fixture files, starting from a valid sample. Either bytes of it are damaged, or objects in it are replaced. The
   whole file is read, and cases that can run are run: the result is a status, never a crash, a leak, or excessive
   memory. */
#include "fixtures.h"
#include "fuzz_hdf5.h"

#include <string.h>

enum { MOST_MEMORY = 64 << 20 };

static struct sample {
    unsigned char *bytes;
    size_t size;
    uint64_t digest;
} sample;

static void free_sample(void) { free(sample.bytes); }

static void make_sample(fattn_ctx *ctx) {
    FUZZ_CHECK(fixture_write_sample(ctx, fuzz_file()) == FATTN_OK, "%s", fattn_ctx_error(ctx));
    sample.bytes = fuzz_file_read(0, &sample.size);
    FUZZ_CHECK(fixture_read_all(ctx, fuzz_file(), &sample.digest) == FATTN_OK, "%s", fattn_ctx_error(ctx));
    atexit(free_sample);
}

/* Returns whether the seal was recomputed. */
static bool damage(fuzz_input *in) {
    unsigned char *const bytes = malloc(sample.size);
    FUZZ_CHECK(bytes, "no memory");
    memcpy(bytes, sample.bytes, sample.size);
    const bool resealed = fuzz_below(in, 2);
    const size_t size = fuzz_damage(in, bytes, sample.size);
    if (resealed && size > FIXTURE_SEAL) fixture_reseal(bytes, size);
    fuzz_file_write(bytes, size);
    free(bytes);
    return resealed;
}

static const char *const objects[] = {"/cases/a/q",
                                      "/cases/a/k",
                                      "/cases/a/lse",
                                      "/cases/a/bias",
                                      "/cases/a/sink",
                                      "/cases/a/seqlens_k",
                                      "/cases/a/rng_step",
                                      "/cases/a/o_in",
                                      "/cases/a/fd/q_index",
                                      "/cases/a/fd/q_value",
                                      "/cases/a/alibi",
                                      "/cases/a/cu_seqlens_q",
                                      "/cases/a",
                                      "/cases",
                                      "/cases/a/fd",
                                      "/cases/b",
                                      "/cases/a/d_o",
                                      "/cases/a/delta",
                                      "/cases/a/seqlens_q",
                                      "/",
                                      NULL};
static const char *const attributes[] = {"schema",     "layout",    "note",       "flags",        "algorithm",
                                         "scale",      "softcap",   "dropout_p",  "window_left",  "window_right",
                                         "q_pos0",     "k_pos0",    "rng_stream", "max_seqlen_q", "max_seqlen_k",
                                         "rng_batch0", "rng_head0", "rng_heads",  "rng_seed",     "step",
                                         "reserved",   NULL};

static void replace(fuzz_input *in) {
    fuzz_file_write(sample.bytes, sample.size);
    const hid_t file = H5Fopen(fuzz_file(), H5F_ACC_RDWR, H5P_DEFAULT);
    FUZZ_CHECK(file >= 0, "HDF5 does not open the sample");
    for (unsigned n = 1 + fuzz_below(in, 4); n > 0; --n) fuzz_hdf5_replace(in, file, objects, attributes);
    H5Fclose(file);
    size_t size;
    unsigned char *const bytes = fuzz_file_read(0, &size);
    if (fuzz_below(in, 2))
        memset(bytes, 0, FIXTURE_SEAL); /* a file of another program */
    else
        fixture_reseal(bytes, size);
    fuzz_file_write(bytes, size);
    free(bytes);
}

/* As fattn check does, in every dtype. */
static void run_cases(fattn_ctx *ctx, unsigned dtype) {
    fattn_fixture *f;
    if (fattn_fixture_open(ctx, fuzz_file(), 0, &f) != FATTN_OK) return;
    for (int n = 0; n < fattn_fixture_count(f); ++n) {
        fattn_fixture_attention c = {.struct_size = sizeof c};
        const fattn_dtype t = (fattn_dtype)(FATTN_F64 + dtype % 4);
        if (fattn_fixture_attention_load(f, fattn_fixture_case(f, n), t, &c) != FATTN_OK) continue;
        const fattn_status s = fattn_fixture_attention_run(ctx, &c);
        FUZZ_CHECK(s == FATTN_OK || fattn_ctx_error(ctx)[0], "no message");
        fattn_fixture_attention_free(ctx, &c);
    }
    const fattn_status s = fattn_fixture_close(f);
    FUZZ_CHECK(s == FATTN_OK, "%s", fattn_ctx_error(ctx));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_input in = {data, data + size};
    fattn_ctx *ctx;
    const fattn_ctx_options o = {.struct_size = sizeof o, .cpu_threads = 1};
    FUZZ_CHECK(fattn_ctx_create(&o, &ctx) == FATTN_OK, "context");
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    if (!sample.bytes) make_sample(ctx);
    const unsigned dtype = fuzz_byte(&in);
    bool sealed = false; /* true: the seal must detect the damage */
    if (dtype & 64)
        sealed = !damage(&in);
    else
        replace(&in);
    uint64_t digest;
    fattn_ctx_mem_reset_peak(ctx);
    const fattn_status s = fixture_read_all(ctx, fuzz_file(), &digest);
    FUZZ_CHECK(s != FATTN_E_STATE, "a failed open has left a fixture");
    FUZZ_CHECK(s == FATTN_OK || fattn_ctx_error(ctx)[0], "%s, no message", fattn_status_name(s));
    FUZZ_CHECK(!sealed || s != FATTN_OK || digest == sample.digest, "damage was not found");
    run_cases(ctx, dtype);
    FUZZ_CHECK(H5Fget_obj_count(H5F_OBJ_ALL, H5F_OBJ_ALL) == 0, "objects of HDF5 are left");
    FUZZ_CHECK(fattn_ctx_mem(ctx).live == 0, "%zu bytes leaked", fattn_ctx_mem(ctx).live);
    FUZZ_CHECK(fattn_ctx_mem(ctx).peak <= MOST_MEMORY, "%zu bytes", fattn_ctx_mem(ctx).peak);
    fattn_ctx_destroy(ctx);
    return 0;
}
