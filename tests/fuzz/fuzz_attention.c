/* Arbitrary attention calls. Each is planned; when its tensors are small, it runs, in memory of exactly their
   size. A call that is rejected has an error message and has written nothing; a valid one runs with the memory
   of its plan, allocates nothing, and agrees with the reference. */
#include "fuzz_call.h"

#include "core/tensor/numeric.h"
#include "core/attention/ref.h"

#include <math.h>
#include <string.h>

static const double MOST_WORK = 5e5, MOST_COMPARED = 1e5;

static void check_message(const fuzz_call *c, fattn_status s) {
    if (s == FATTN_OK) return;
    FUZZ_CHECK(s > FATTN_OK && s < FATTN_STATUS_COUNT, "status %d", (int)s);
    FUZZ_CHECK(fattn_ctx_error(c->ctx)[0], "%s without a message", fattn_status_name(s));
}

static void check_untouched(const fuzz_call *c, const char *after) {
    for (int n = 0; n < TENSORS; ++n)
        FUZZ_CHECK(!c->memory[n] || memcmp(c->memory[n], c->before[n], c->bytes[n]) == 0, "%s has changed %s", after,
                   fuzz_tensor_name(n));
}

static void check_inputs(const fuzz_call *c) {
    for (int n = 0; n < TENSORS; ++n)
        FUZZ_CHECK(fuzz_is_output(n) || !c->memory[n] || memcmp(c->memory[n], c->before[n], c->bytes[n]) == 0,
                   "%s has changed", fuzz_tensor_name(n));
}

/* Memory of exactly the planned size and alignment. */
static void *scratch(size_t bytes) {
    void *p = NULL;
    FUZZ_CHECK(bytes < (size_t)1 << 30, "%zu bytes for a small call", bytes);
    FUZZ_CHECK(!bytes || posix_memalign(&p, 256, bytes) == 0, "no memory");
    if (p) memset(p, 0xff, bytes); /* NaN */
    return p;
}

static fattn_status run(fuzz_call *c, enum fattni_pass pass, size_t workspace) {
    c->io.workspace = scratch(workspace);
    c->io.workspace_bytes = workspace;
    const size_t allocations = fattn_ctx_mem(c->ctx).allocs;
    const fattn_status s = pass == FATTNI_FWD ? fattn_attention_fwd(c->ctx, c->params, &c->io)
                                              : fattn_attention_bwd(c->ctx, c->params, &c->io);
    FUZZ_CHECK(fattn_ctx_mem(c->ctx).allocs == allocations, "the call allocated");
    check_message(c, s);
    free(c->io.workspace);
    return s;
}

/* A workspace that is one byte too small, or absent, is rejected. */
static void check_too_little(fuzz_call *c, size_t workspace) {
    if (!workspace) return;
    const fattn_status s = run(c, FATTNI_FWD, workspace - 1);
    FUZZ_CHECK(s == FATTN_E_WORKSPACE || s == FATTN_E_ARG, "%s", fattn_status_name(s));
    check_untouched(c, "too small a workspace");
}

/* Relative to the largest element. Scores may be some hundreds, and gradients multiply their rounding errors by
   as much: this test finds wrong indices and masks. */
static double tolerance(fattn_dtype t) {
    switch (t) {
    case FATTN_F64: return 1e-9;
    case FATTN_F32: return 1e-2;
    case FATTN_F16: return 0.2;
    default: return 0.5;
    }
}

static void check_close(const fuzz_call *c, int tensor, const void *got, fattn_dtype arithmetic) {
    const int32_t t = c->t[tensor].dtype;
    const int64_t count = (int64_t)(c->bytes[tensor] / fattn_dtype_size((fattn_dtype)t));
    double largest = 1;
    for (int64_t n = 0; n < count; ++n) {
        const double x = fabs(fattni_load(c->memory[tensor], t, n));
        if (x > largest && isfinite(x)) largest = x;
    }
    for (int64_t n = 0; n < count; ++n) {
        const double x = fattni_load(got, t, n), want = fattni_load(c->memory[tensor], t, n);
        const bool same = x == want || (isnan(x) && isnan(want));
        FUZZ_CHECK(same || fabs(x - want) <= tolerance(arithmetic) * largest, "%s[%lld] is %g, the reference has %g",
                   fuzz_tensor_name(tensor), (long long)n, x, want);
    }
}

/* Both passes of the reference from the same start. */
static void compare(fuzz_call *c, bool backward) {
    void *got[TENSORS] = {0};
    for (int n = 0; n < TENSORS; ++n) {
        if (!c->memory[n] || !fuzz_is_output(n)) continue;
        got[n] = c->memory[n];
        c->memory[n] = malloc(c->bytes[n]);
        FUZZ_CHECK(c->memory[n], "no memory");
        memcpy(c->memory[n], c->before[n], c->bytes[n]);
        c->t[n].data = (char *)c->memory[n] + ((char *)c->t[n].data - (char *)got[n]);
    }
    fattni_problem p;
    fattn_status s = fattni_problem_init(c->ctx, c->params, &c->io, FATTNI_FWD, true, &p);
    if (!s) s = fattni_fwd_ref(c->ctx, &p);
    if (!s && backward) {
        s = fattni_problem_init(c->ctx, c->params, &c->io, FATTNI_BWD, true, &p);
        if (!s) s = fattni_bwd_ref(c->ctx, &p);
    }
    FUZZ_CHECK(s == FATTN_OK, "%s", fattn_ctx_error(c->ctx));
    for (int n = 0; n < TENSORS; ++n) {
        if (got[n] && (backward || n == O || n == LSE)) check_close(c, n, got[n], p.dtype);
        free(got[n]);
    }
}

static void try_to_run(fuzz_call *c, fattn_status planned, const fattn_attention_plan *plan) {
    const bool sound = planned == FATTN_OK && !c->edited;
    if (planned == FATTN_OK) check_too_little(c, plan->fwd_workspace);
    c->io.saved = scratch(plan->saved_bytes);
    c->io.saved_bytes = plan->saved_bytes;
    fattn_status s = run(c, FATTNI_FWD, plan->fwd_workspace);
    FUZZ_CHECK(!sound || s == FATTN_OK, "%s", fattn_ctx_error(c->ctx));
    if (s != FATTN_OK) check_untouched(c, "forward");
    check_inputs(c);
    bool backward = false;
    if (s == FATTN_OK) {
        s = run(c, FATTNI_BWD, plan->bwd_workspace);
        FUZZ_CHECK(!sound || s == FATTN_OK, "%s", fattn_ctx_error(c->ctx));
        backward = s == FATTN_OK;
        check_inputs(c);
    }
    if (sound && c->work <= MOST_COMPARED) compare(c, backward);
    free(c->io.saved);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_input in = {data, data + size};
    fuzz_call c;
    fuzz_call_open(&c, &in);
    fattn_attention_plan plan = {.struct_size = sizeof plan};
    const fattn_status s = fattn_attention_query(c.ctx, c.params, &c.io, &plan);
    check_message(&c, s);
    check_untouched(&c, "query");
    if (c.runnable && c.work <= MOST_WORK) try_to_run(&c, s, &plan);
    fuzz_call_close(&c);
    return 0;
}
