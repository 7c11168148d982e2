/* Products of BF16 and F32 matrices by oneDNN 2.6 and later, 3 included: the only user of it.

   BF16: sizes and pitches are given when a product runs, so that four primitives, one for each pair of transposes,
   serve all shapes: nothing is compiled per shape. A product runs on the calling thread, for fattni_parallel sets
   OpenMP's number of threads to 1 in its tasks. oneDNN takes memory from malloc: the primitives, and during a product
   the packed blocks of its operands; README.md has their size. */
#include "core/cpu/gemm_bf16.h"

#include "core/tensor/numeric.h"

#include <oneapi/dnnl/dnnl.h>
#include <signal.h>
#include <string.h>

/* What differs between the versions: in 2 a description is a struct, in 3 an object. */
#if DNNL_VERSION_MAJOR < 3
typedef const dnnl_memory_desc_t *described;
static dnnl_status_t describe(dnnl_memory_desc_t *d, dnnl_data_type_t type, const dnnl_dims_t shape,
                              const dnnl_dims_t stride) {
    return dnnl_memory_desc_init_by_strides(d, 2, shape, type, stride);
}
static void forget(dnnl_memory_desc_t *d) { (void)d; }
static described of(const dnnl_memory_desc_t *d) { return d; }
static dnnl_status_t plan(dnnl_primitive_desc_t *out, dnnl_engine_t engine, const dnnl_memory_desc_t d[3],
                          dnnl_primitive_attr_t attributes) {
    dnnl_matmul_desc_t matmul;
    const dnnl_status_t s = dnnl_matmul_desc_init(&matmul, &d[0], &d[1], NULL, &d[2]);
    return s ? s : dnnl_primitive_desc_create(out, &matmul, attributes, engine, NULL);
}
#else
typedef const_dnnl_memory_desc_t described;
static dnnl_status_t describe(dnnl_memory_desc_t *d, dnnl_data_type_t type, const dnnl_dims_t shape,
                              const dnnl_dims_t stride) {
    return dnnl_memory_desc_create_with_strides(d, 2, shape, type, stride);
}
static void forget(dnnl_memory_desc_t *d) { dnnl_memory_desc_destroy(*d); }
static described of(const dnnl_memory_desc_t *d) { return *d; }
static dnnl_status_t plan(dnnl_primitive_desc_t *out, dnnl_engine_t engine, const dnnl_memory_desc_t d[3],
                          dnnl_primitive_attr_t attributes) {
    return dnnl_matmul_primitive_desc_create(out, engine, d[0], d[1], NULL, d[2], attributes);
}
#endif

enum { A, B, C, MATRICES };
static const dnnl_data_type_t types[MATRICES] = {dnnl_bf16, dnnl_bf16, dnnl_f32};
static const int arguments[MATRICES + 1] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST, DNNL_ARG_SCRATCHPAD};

/* Descriptions of the three matrices as op(a) [M,K], op(b) [K,N], c [M,N]. */
static dnnl_status_t describe_all(dnnl_memory_desc_t d[MATRICES], const fattni_gemm *g) {
    const dnnl_dims_t shape[MATRICES] = {{g->M, g->K}, {g->K, g->N}, {g->M, g->N}};
    const dnnl_dims_t stride[MATRICES] = {{g->trans_a ? 1 : g->lda, g->trans_a ? g->lda : 1},
                                          {g->trans_b ? 1 : g->ldb, g->trans_b ? g->ldb : 1},
                                          {g->ldc, 1}};
    for (int i = 0; i < MATRICES; ++i) {
        const dnnl_status_t s = describe(&d[i], types[i], shape[i], stride[i]);
        if (!s) continue;
        while (i-- > 0) forget(&d[i]);
        return s;
    }
    return dnnl_success;
}

/* Its place among the four. */
static int index_of(const fattni_gemm *g) { return 2 * g->trans_a + g->trans_b; }

/* The primitive of a pair of transposes, for any sizes. */
static dnnl_status_t make(fattni_bf16 *o, dnnl_primitive_attr_t attributes, int which) {
    const int64_t any = DNNL_RUNTIME_DIM_VAL;
    const fattni_gemm g = {
        .trans_a = which / 2, .trans_b = which % 2, .M = any, .N = any, .K = any, .lda = any, .ldb = any, .ldc = any};
    dnnl_memory_desc_t d[MATRICES];
    dnnl_primitive_desc_t desc = NULL;
    dnnl_primitive_t product = NULL;
    dnnl_status_t s = describe_all(d, &g);
    if (s) return s;
    s = plan(&desc, o->engine, d, attributes);
    if (!s) s = dnnl_primitive_create(&product, desc);
    for (int i = 0; i < MATRICES; ++i) forget(&d[i]);
    o->plan[which] = desc, o->product[which] = product;
    if (s) return s;
    const size_t bytes = dnnl_memory_desc_get_size(dnnl_primitive_desc_query_md(desc, dnnl_query_scratchpad_md, 0));
    if (bytes > o->scratch) o->scratch = bytes;
    return dnnl_success;
}

static dnnl_status_t make_all(fattni_bf16 *o) {
    dnnl_primitive_attr_t attributes = NULL;
    dnnl_engine_t engine = NULL;
    dnnl_status_t s = dnnl_engine_create(&engine, dnnl_cpu, 0);
    o->engine = engine;
    if (!s) s = dnnl_primitive_attr_create(&attributes);
    if (!s) s = dnnl_primitive_attr_set_scratchpad_mode(attributes, dnnl_scratchpad_mode_user);
    for (int which = 0; which < 4 && !s; ++which) s = make(o, attributes, which);
    if (attributes) dnnl_primitive_attr_destroy(attributes);
    return s;
}

static void close_onednn(fattni_bf16 *o) {
    for (int which = 0; which < 4; ++which) {
        if (o->product[which]) dnnl_primitive_destroy(o->product[which]);
        if (o->plan[which]) dnnl_primitive_desc_destroy(o->plan[which]);
    }
    if (o->engine) dnnl_engine_destroy(o->engine);
    *o = (fattni_bf16){.engine = NULL};
}

/* A user may have capped it by ONEDNN_MAX_CPU_ISA. */
static bool uses(int isa) {
    const int wanted = isa >= FATTNI_ISA_AMX ? dnnl_cpu_isa_avx512_core_amx : dnnl_cpu_isa_avx512_core_bf16;
    return ((int)dnnl_get_effective_cpu_isa() & wanted) == wanted;
}

static fattn_status open_onednn(fattn_ctx *ctx, fattni_bf16 *o) {
    if (!uses(ctx->isa)) return FATTN_OK;
    const dnnl_status_t s = make_all(o);
    if (s == dnnl_success) return FATTN_OK;
    close_onednn(o);
    return fattn_ctx_fail(ctx, s == dnnl_out_of_memory ? FATTN_E_NOMEM : FATTN_E_UNSUPPORTED,
                          "oneDNN cannot prepare products of BF16 matrices: its status %d", (int)s);
}

/* Memory objects of the operands, and of the scratchpad if there is one. */
static dnnl_status_t bind(const fattni_bf16 *o, const fattni_gemm *g, void *scratch,
                          dnnl_memory_t memory[MATRICES + 1]) {
    void *const data[MATRICES] = {(void *)(uintptr_t)g->a, (void *)(uintptr_t)g->b, g->c};
    dnnl_memory_desc_t d[MATRICES];
    dnnl_status_t s = describe_all(d, g);
    if (s) return s;
    for (int i = 0; i < MATRICES && !s; ++i) s = dnnl_memory_create(&memory[i], of(&d[i]), o->engine, data[i]);
    for (int i = 0; i < MATRICES; ++i) forget(&d[i]);
    if (s || !o->scratch) return s;
    const described needed = dnnl_primitive_desc_query_md(o->plan[index_of(g)], dnnl_query_scratchpad_md, 0);
    return dnnl_memory_create(&memory[MATRICES], needed, o->engine, scratch);
}

static bool run(const fattni_bf16 *o, const fattni_gemm *g, void *scratch) {
    dnnl_memory_t memory[MATRICES + 1] = {NULL};
    dnnl_stream_t stream = NULL;
    dnnl_exec_arg_t list[MATRICES + 1] = {{.arg = 0}};
    dnnl_status_t s = dnnl_stream_create(&stream, o->engine, dnnl_stream_default_flags);
    if (!s) s = bind(o, g, scratch, memory);
    for (int i = 0; i <= MATRICES; ++i) list[i] = (dnnl_exec_arg_t){arguments[i], memory[i]};
    const int count = o->scratch ? MATRICES + 1 : MATRICES;
    if (!s) s = dnnl_primitive_execute(o->product[index_of(g)], stream, count, list);
    if (!s) s = dnnl_stream_wait(stream);
    for (int i = 0; i <= MATRICES; ++i)
        if (memory[i]) dnnl_memory_destroy(memory[i]);
    if (stream) dnnl_stream_destroy(stream);
    return s == dnnl_success;
}

/* c += the terms of the last k. */
static void add_last_terms(const fattni_gemm *g) {
    const uint16_t *const a = (const uint16_t *)g->a + (g->K - 1) * (g->trans_a ? g->lda : 1);
    const uint16_t *const b = (const uint16_t *)g->b + (g->K - 1) * (g->trans_b ? 1 : g->ldb);
    const int64_t a_step = g->trans_a ? 1 : g->lda, b_step = g->trans_b ? g->ldb : 1;
    for (int64_t m = 0; m < g->M; ++m) {
        float *const c = (float *)g->c + m * g->ldc;
        const float x = fattni_bf16_to_float(a[m * a_step]);
        for (int64_t n = 0; n < g->N; ++n) c[n] += x * fattni_bf16_to_float(b[n * b_step]);
    }
}

/* VDPBF16PS takes pairs of k. Beside the last one of an odd K oneDNN 2.6's code without AMX puts it once more, times 0:
   infinity would become NaN. */
static bool multiply(const fattni_bf16 *o, const fattni_gemm *g, void *scratch) {
    if (g->K % 2 == 0 || uses(FATTNI_ISA_AMX)) return run(o, g, scratch);
    fattni_gemm even = *g;
    even.K -= 1;
    if (even.K > 0 && !run(o, &even, scratch)) return false;
    for (int64_t m = 0; m < g->M && even.K == 0; ++m)
        memset((float *)g->c + m * g->ldc, 0, (size_t)g->N * sizeof(float));
    add_last_terms(g);
    return true;
}

/* All signals but those of the thread's own faults, which must still reach their handlers. */
static void signals_from_outside(sigset_t *set) {
    static const int faults[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGSYS};
    sigfillset(set);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; ++i) sigdelset(set, faults[i]);
}

/* F32: oneDNN's older interface, without objects, for any sizes. Row-major. Up to version 3.11.1 its code for a long K
   makes the stack pointer point into memory from malloc (oneDNN's issue 4845), and a signal handler's frame would be
   written over what lies below. Signals wait until the product is done, or go to another thread. */
bool fattni_onednn_f32(const fattni_gemm *g, double beta) {
    sigset_t outside, before;
    signals_from_outside(&outside);
    if (pthread_sigmask(SIG_BLOCK, &outside, &before) != 0) return false;
    const dnnl_status_t s = dnnl_sgemm(g->trans_a ? 'T' : 'N', g->trans_b ? 'T' : 'N', g->M, g->N, g->K,
                                       (float)g->alpha, g->a, g->lda, g->b, g->ldb, (float)beta, g->c, g->ldc);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return s == dnnl_success;
}

const fattni_bf16_library fattni_onednn = {open_onednn, close_onednn, multiply};
