#include "device.h"

#include "contexts.h"

#include "core/tensor/numeric.h"

#include <fattn/fp8.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static fattn_ctx *device; /* Criterion runs each test in a process of its own */

fattn_ctx *device_context(int arch_cap) { return context_of(NULL, 0, arch_cap); }

void device_use(fattn_ctx *ctx) { device = ctx; }

static bool capturing, copying;

void device_capture(bool on) { capturing = on; }
void device_copies(bool on) { copying = on; }

static fattn_attention_plan last_plan;

const fattn_attention_plan *device_plan(void) { return &last_plan; }

static unsigned char *to_device(const void *p, size_t bytes) {
    void *d = NULL;
    must(cudaMalloc(&d, bytes), "cudaMalloc");
    must(cudaMemcpy(d, p, bytes, cudaMemcpyHostToDevice), "copy to the device");
    return d;
}

enum { GUARD = 256 };

unsigned char *device_memory(size_t bytes) {
    void *d = NULL;
    must(cudaMalloc(&d, bytes + 2 * GUARD), "cudaMalloc");
    must(cudaMemset(d, 0xff, bytes + 2 * GUARD), "cudaMemset");
    return (unsigned char *)d + GUARD;
}

void device_memory_check(const char *name, unsigned char *d, size_t bytes, const char *what) {
    unsigned char guard[2][GUARD];
    must(cudaMemcpy(guard[0], d - GUARD, GUARD, cudaMemcpyDeviceToHost), "guard");
    must(cudaMemcpy(guard[1], d + bytes, GUARD, cudaMemcpyDeviceToHost), "guard");
    for (int side = 0; side < 2; ++side)
        for (int n = 0; n < GUARD; ++n)
            cr_assert_eq(guard[side][n], 0xff, "%s: wrote %s %s", name, side ? "behind" : "before", what);
    must(cudaFree(d - GUARD), "cudaFree");
}

/* The saved buffer, from forward to backward. */
static unsigned char *saved;

static fattn_status run_pass(const attention *a, enum fattni_pass pass, const fattn_attention_io *io) {
    const fattn_mem before = fattn_ctx_mem(device);
    if (io->fp8) FATTNI_TRY(fattn_fp8_quantize(device, &a->params, io));
    const fattn_status s = (pass == FATTNI_FWD ? fattn_attention_fwd : fattn_attention_bwd)(device, &a->params, io);
    cr_assert_eq(fattn_ctx_mem(device).allocs, before.allocs, "%s: the call allocated", a->c.name);
    return s;
}

/* The pass as a CUDA graph: an allocation or synchronisation would make the capture fail. */
static fattn_status run_captured(const attention *a, enum fattni_pass pass, const fattn_attention_io *io) {
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    must(cudaDeviceSynchronize(), "poison"); /* the new stream does not wait for the default one */
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    cr_assert_eq(fattn_ctx_set_stream(device, stream), FATTN_OK);
    must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
    const fattn_status s = run_pass(a, pass, io);
    must(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    must(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
    must(cudaGraphLaunch(executable, stream), "cudaGraphLaunch");
    must(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    must(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
    must(cudaGraphDestroy(graph), "cudaGraphDestroy");
    cr_assert_eq(fattn_ctx_set_stream(device, NULL), FATTN_OK);
    must(cudaStreamDestroy(stream), "cudaStreamDestroy");
    return s;
}

void device_upload(const attention *a, device_tensors *x) {
    *x = (device_tensors){.io = a->io};
    fattn_attention_io *const io = &x->io;
    const fattn_tensor **const slots[T_COUNT] = {
        &io->q,        &io->k,      &io->v,         &io->o,         &io->lse,          &io->bias,
        &io->alibi,    &io->sink,   &io->seqlens_q, &io->seqlens_k, &io->cu_seqlens_q, &io->cu_seqlens_k,
        &io->rng_step, &io->d_o,    &io->d_lse,     &io->delta,     &io->dq,           &io->dk,
        &io->dv,       &io->d_bias, &io->d_sink};
    for (int id = 0; id < T_COUNT; ++id)
        if (a->fields[id].memory) x->fields[id] = to_device(a->fields[id].memory, a->fields[id].size);
    for (int id = 0; id < T_COUNT; ++id) {
        if (!a->present[id]) continue;
        const enum tensor_id home = a->home[id];
        x->t[id] = a->t[id];
        x->t[id].device = FATTN_CUDA;
        x->t[id].data = x->fields[home] + ((unsigned char *)a->t[id].data - a->fields[home].memory);
        *slots[id] = &x->t[id];
    }
}

void device_download(attention *a, device_tensors *x) {
    for (int id = 0; id < T_COUNT; ++id) {
        if (!x->fields[id]) continue;
        must(cudaMemcpy(a->fields[id].memory, x->fields[id], a->fields[id].size, cudaMemcpyDeviceToHost),
             "copy from the device");
        must(cudaFree(x->fields[id]), "cudaFree");
    }
    *x = (device_tensors){.io = {.struct_size = 0}};
}

fattn_status device_run(attention *a, enum fattni_pass pass) {
    device_tensors x;
    fattn_fp8 copies;
    unsigned char *copies_memory = NULL;
    size_t copies_bytes = 0;
    device_upload(a, &x);
    fattn_status s = FATTN_OK;
    if (copying && pass == FATTNI_FWD) {
        s = fattn_fp8_layout(device, &a->params, &x.io, NULL, &copies_bytes, NULL);
        copies_memory = device_memory(copies_bytes);
        if (s == FATTN_OK) s = fattn_fp8_layout(device, &a->params, &x.io, copies_memory, &copies_bytes, &copies);
        x.io.fp8 = &copies;
    }
    fattn_attention_plan plan = {.struct_size = sizeof plan};
    if (s == FATTN_OK) s = fattn_attention_query(device, &a->params, &x.io, &plan);
    last_plan = plan;
    const size_t bytes = pass == FATTNI_FWD ? plan.fwd_workspace : plan.bwd_workspace;
    unsigned char *const workspace = device_memory(bytes);
    x.io.workspace = workspace;
    x.io.workspace_bytes = bytes;
    if (!saved) saved = device_memory(plan.saved_bytes);
    x.io.saved = saved;
    x.io.saved_bytes = plan.saved_bytes;
    if (s == FATTN_OK) s = (capturing ? run_captured : run_pass)(a, pass, &x.io);
    if (s == FATTN_OK) s = fattn_ctx_sync(device);
    if (s != FATTN_OK) printf("%s: %s\n", a->c.name, fattn_ctx_error(device));
    device_memory_check(a->c.name, workspace, bytes, "the workspace");
    if (copies_memory) device_memory_check(a->c.name, copies_memory, copies_bytes, "the copies");
    if (pass == FATTNI_BWD) {
        device_memory_check(a->c.name, saved, plan.saved_bytes, "saved");
        saved = NULL;
    }
    device_download(a, &x);
    return s;
}

/* An F32 d_o is rounded to 16 bits for the tensor cores: makes it exact in the dtype. */
static void round_d_o(attention *a, fattn_dtype dtype) {
    const fattn_tensor *const t = &a->t[T_D_O];
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(t); ++n) {
        double cell; /* storage for one element of any dtype */
        attention_index(t, n, at);
        fattni_store(&cell, dtype, 0, attention_get(t, at));
        attention_set(t, at, fattni_load(&cell, dtype, 0));
    }
}

void device_check(fattn_ctx *cpu, const attention_case *given) {
    attention_case c = *given;
    const bool narrow = c.dtype == FATTN_F16 || c.dtype == FATTN_BF16;
    if (narrow && (c.flags & FATTN_MERGE)) c.wide = true; /* a partial result is F32 */
    attention *const got = attention_new(cpu, &c), *const low = attention_new(cpu, &c);
    if (narrow) {
        round_d_o(got, c.dtype);
        round_d_o(low, c.dtype);
        attention_run(low, UNFUSED);
    }
    attention *const want = attention_twin(got, FATTN_F64);
    got->on_device = device_run;
    attention_run(want, REFERENCE);
    attention_run(got, ON_DEVICE);
    if (narrow)
        attention_match_16_bits(got, want, low);
    else if (c.dtype == FATTN_F32)
        attention_match_rounded(got, want);
    else
        attention_match(got, want, NULL, 0, (fattn_tolerance){1e-12, 1e-12, 0});
    attention_free(got);
    attention_free(want);
    attention_free(low);
}
