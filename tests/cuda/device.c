#include "device.h"

#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static fattn_ctx *device; /* Criterion runs each test in a process of its own */

fattn_ctx *device_context(int arch_cap) {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) return NULL;
    const fattn_ctx_options o = {.struct_size = sizeof o, .device = FATTN_CUDA, .arch_cap = arch_cap};
    fattn_ctx *ctx;
    cr_assert_eq(fattn_ctx_create(&o, &ctx), FATTN_OK);
    return ctx;
}

void device_use(fattn_ctx *ctx) { device = ctx; }

static void must(cudaError_t e, const char *what) {
    cr_assert_eq(e, cudaSuccess, "%s: %s", what, cudaGetErrorString(e));
}

static unsigned char *to_device(const void *p, size_t bytes) {
    void *d = NULL;
    must(cudaMalloc(&d, bytes), "cudaMalloc");
    must(cudaMemcpy(d, p, bytes, cudaMemcpyHostToDevice), "copy to the device");
    return d;
}

enum { GUARD = 256 };

/* Poisoned memory between guards: NaN in every float type. */
static unsigned char *workspace_new(size_t bytes) {
    void *d = NULL;
    must(cudaMalloc(&d, bytes + 2 * GUARD), "cudaMalloc");
    must(cudaMemset(d, 0xff, bytes + 2 * GUARD), "cudaMemset");
    return d;
}

static void workspace_check(const attention *a, unsigned char *d, size_t bytes) {
    unsigned char guard[2][GUARD];
    must(cudaMemcpy(guard[0], d, GUARD, cudaMemcpyDeviceToHost), "guard");
    must(cudaMemcpy(guard[1], d + GUARD + bytes, GUARD, cudaMemcpyDeviceToHost), "guard");
    for (int side = 0; side < 2; ++side)
        for (int n = 0; n < GUARD; ++n)
            cr_assert_eq(guard[side][n], 0xff, "%s: wrote %s the workspace", a->c.name,
                         side ? "behind" : "before");
    must(cudaFree(d), "cudaFree");
}

fattn_status device_run(attention *a, enum fattni_pass pass) {
    unsigned char *fields[T_COUNT] = {0};
    fattn_tensor t[T_COUNT];
    fattn_attention_io io = a->io;
    const fattn_tensor **const slots[T_COUNT] = {
        &io.q, &io.k, &io.v, &io.o, &io.lse, &io.bias, &io.alibi, &io.sink, &io.seqlens_q,
        &io.seqlens_k, &io.cu_seqlens_q, &io.cu_seqlens_k, &io.rng_step, &io.d_o, &io.d_lse,
        &io.delta, &io.dq, &io.dk, &io.dv, &io.d_bias, &io.d_sink};
    for (int id = 0; id < T_COUNT; ++id)
        if (a->fields[id].memory) fields[id] = to_device(a->fields[id].memory, a->fields[id].size);
    for (int id = 0; id < T_COUNT; ++id) {
        if (!a->present[id]) continue;
        t[id] = a->t[id];
        t[id].device = FATTN_CUDA;
        t[id].data = fields[a->home[id]] + ((unsigned char *)a->t[id].data -
                                            a->fields[a->home[id]].memory);
        *slots[id] = &t[id];
    }
    fattn_attention_plan plan = {.struct_size = sizeof plan};
    fattn_status s = fattn_attention_query(device, &a->params, &io, &plan);
    const size_t bytes = pass == FATTNI_FWD ? plan.fwd_workspace : plan.bwd_workspace;
    unsigned char *const workspace = workspace_new(bytes);
    io.workspace = workspace + GUARD;
    io.workspace_bytes = bytes;
    if (s == FATTN_OK)
        s = (pass == FATTNI_FWD ? fattn_attention_fwd : fattn_attention_bwd)(device, &a->params, &io);
    if (s == FATTN_OK) s = fattn_ctx_sync(device);
    if (s != FATTN_OK) printf("%s: %s\n", a->c.name, fattn_ctx_error(device));
    workspace_check(a, workspace, bytes);
    for (int id = 0; id < T_COUNT; ++id) {
        if (!fields[id]) continue;
        must(cudaMemcpy(a->fields[id].memory, fields[id], a->fields[id].size, cudaMemcpyDeviceToHost),
             "copy from the device");
        must(cudaFree(fields[id]), "cudaFree");
    }
    return s;
}
