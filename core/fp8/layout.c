/* Where the 8-bit copies of a call lie, and which calls have them. */
#include "core/fp8/fp8.h"

#include "core/base/device.h"

int64_t fattni_fp8_chunks(const fattni_problem *p) {
    /* A sequence that ends a chunk begins the next one: at most one chunk per sequence is not full. */
    if (p->packed) return p->rows_k / FATTNI_FP8_CHUNK + p->B;
    return fattni_max(fattni_ceil_div(p->rows_k, FATTNI_FP8_CHUNK), 1);
}

/* Appends a row-major array, rows of bytes padded to multiples of 16. */
static fattni_array append(char *memory, size_t *end, fattn_dtype dtype, int ndim, int64_t n0, int64_t n1, int64_t n2,
                           int64_t n3) {
    fattni_array a = {.n = {n0, n1, n2, n3}, .dtype = (int32_t)dtype, .present = true};
    a.p = memory ? memory + *end : NULL;
    int64_t run = 1;
    for (int d = ndim - 1; d >= 0; --d) {
        a.s[d] = a.n[d] > 1 || d == ndim - 1 ? run : 0;
        run *= a.n[d];
        if (d == ndim - 1 && fattni_is_code((int32_t)dtype)) run = fattni_round_up(run, 16);
    }
    a.empty = run == 0;
    *end += (size_t)fattni_round_up(run * (int64_t)fattn_dtype_size(dtype), FATTNI_ALIGN);
    return a;
}

static fattni_fp8 lay_out(const fattni_problem *p, void *memory, size_t *bytes) {
    const int64_t Bt = p->packed ? 1 : p->B, chunks = fattni_fp8_chunks(p), columns = chunks * FATTNI_FP8_CHUNK;
    const bool by_32_keys = p->flags & FATTN_FP8_INT8;
    const fattn_dtype e4m3 = FATTN_F8E4M3, code = by_32_keys ? FATTN_I8 : e4m3, real = FATTN_F32;
    fattni_fp8 out = {.rope_base = 0};
    *bytes = 0;
    out.q = append(memory, bytes, code, 4, Bt, p->Hq, p->rows_q, p->D);
    out.k = append(memory, bytes, code, 4, Bt, p->Hkv, p->rows_k, p->D);
    out.v = append(memory, bytes, e4m3, 4, Bt, p->Hkv, p->Dv, columns);
    out.q_scale = append(memory, bytes, real, 3, Bt, p->Hq, p->rows_q, 0);
    out.q_shift = append(memory, bytes, real, 3, Bt, p->Hq, p->rows_q, 0);
    out.k_scale = by_32_keys ? append(memory, bytes, real, 3, Bt, p->Hkv, columns / FATTNI_FP8_KEYS_OF_SCALE, 0)
                             : append(memory, bytes, real, 2, p->B, p->Hkv, 0, 0);
    out.v_scale = append(memory, bytes, real, 3, p->B, p->Hkv, p->Dv, 0);
    out.v_mean = append(memory, bytes, real, 3, p->B, p->Hkv, p->Dv, 0);
    out.partials = append(memory, bytes, real, 4, Bt, p->Hkv, chunks, 3 * (p->D + p->Dv));
    return out;
}

fattni_fp8 fattni_fp8_lay_out(const fattni_problem *p, void *memory) {
    size_t bytes;
    return lay_out(p, memory, &bytes);
}

size_t fattni_fp8_bytes(const fattni_problem *p) {
    size_t bytes;
    (void)lay_out(p, NULL, &bytes);
    return bytes;
}

fattn_status fattni_fp8_copies(fattn_ctx *ctx, const fattni_problem *p, fattni_fp8 *out) {
    *out = p->fp8;
    if (out->q.present) return FATTN_OK;
    *out = fattni_fp8_lay_out(p, p->workspace);
    return ctx->ops->fp8_quantize(ctx, p, out);
}

size_t fattni_fp8_renew(fattni_problem *p, void *memory) {
    const int64_t Bt = p->packed ? 1 : p->B;
    size_t bytes = 0;
    p->o = append(memory, &bytes, (fattn_dtype)p->o.dtype, 4, Bt, p->Hq, p->rows_q, p->Dv);
    p->lse = append(memory, &bytes, (fattn_dtype)p->lse.dtype, 3, Bt, p->Hq, p->rows_q, 0);
    return bytes;
}

const char *fattni_fp8_why_unsupported(const fattni_problem *p) {
    const double rows = (double)(p->packed ? 1 : p->B) * (double)p->Hq *
                        ((double)p->rows_q + (double)FATTNI_FP8_CHUNK * (double)fattni_fp8_chunks(p));
    const bool power = (p->D & (p->D - 1)) == 0 && p->D >= 16;
    if (p->dtype == FATTN_F64) return "has no F64: q, k and v are f32, f16 or bf16";
    if (p->softcap > 0) return "has no softcap";
    if (p->alibi.present) return "has no ALiBi";
    if (p->bias.present) return "has no bias";
    if (p->drop_T) return "has no dropout";
    if (p->page) return "has no pages";
    if (p->flags & FATTN_MERGE) return "has no FATTN_MERGE";
    if (p->flags & FATTN_EXACT_DELTA) return "has no FATTN_EXACT_DELTA";
    if (p->algorithm == FATTN_ALGO_STANDARD) return "has no algorithm STANDARD";
    if (p->algorithm == FATTN_ALGO_FLASH1) return "has no algorithm FLASH1";
    if ((p->flags & FATTN_FP8_HADAMARD) && !power)
        return "with FATTN_FP8_HADAMARD needs a D that is a power of two of 16..256";
    if (rows > 0x1p50) return "has room for copies of at most 2^50 rows and keys"; /* bytes stay below 2^60 */
    return NULL;
}
