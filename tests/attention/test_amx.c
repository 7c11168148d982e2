/* AMX is asked for when it is first needed, by BF16 tensors and, on CPUs with AMX-FP16, by F16 tensors. A refusal is no
   error. Each test is a process of its own. */
#define _XOPEN_SOURCE 700 /* sigaltstack */
#include "attention.h"
#include "core/base/internal.h"

#include <criterion/criterion.h>
#include <signal.h>
#include <string.h>

enum { SMALL_STACK = 8192 }; /* less than the registers of AMX need */

/* false: the kernel refuses it, because the process may use AMX. */
static bool set_small_stack(void) {
    static char memory[SMALL_STACK];
    const stack_t stack = {.ss_sp = memory, .ss_size = SMALL_STACK};
    return sigaltstack(&stack, NULL) == 0;
}

static void note(void *user, fattn_log level, const char *text) {
    if (level == FATTN_LOG_WARN && strstr(text, "AMX")) ++*(int *)user;
}

static fattn_ctx *logged_context(uint32_t flags, int *warnings) {
    const fattn_ctx_options o = {
        .struct_size = sizeof o, .cpu_threads = 2, .flags = flags, .log = note, .log_user = warnings};
    fattn_ctx *ctx;
    cr_assert_eq(fattn_ctx_create(&o, &ctx), FATTN_OK);
    return ctx;
}

/* Runs attention; whether its kernels are AMX's. */
static bool uses_amx(fattn_ctx *ctx, fattn_dtype dtype) {
    const attention_case c = {
        .name = "amx", .dtype = dtype, .B = 1, .Hq = 2, .Hkv = 2, .Sq = 70, .Sk = 90, .D = 16, .Dv = 16};
    attention *const a = attention_new(ctx, &c);
    attention_run(a, LIBRARY);
    const char *const name = dtype == FATTN_F16 ? "_amxfp16_" : "_amx_";
    const bool yes = strstr(a->plan.fwd_kernel, name) && strstr(a->plan.bwd_kernel, name);
    attention_free(a);
    return yes;
}

Test(amx, is_not_asked_for_without_16_bits) {
    int warnings = 0;
    fattn_ctx *const ctx = logged_context(0, &warnings), *const exact =
                                                             logged_context(FATTN_CTX_F32_PRODUCTS, &warnings);
    cr_assert_not(uses_amx(ctx, FATTN_F32));
    if (ctx->isa < FATTNI_ISA_AMXFP16) cr_assert_not(uses_amx(ctx, FATTN_F16));
    cr_assert_not(uses_amx(exact, FATTN_F16));
    cr_assert_not(uses_amx(exact, FATTN_BF16));
    cr_assert(set_small_stack());
    cr_assert_eq(warnings, 0);
    fattn_ctx_destroy(ctx);
    fattn_ctx_destroy(exact);
}

static void refuse(int isa, fattn_dtype dtype) {
    int warnings = 0;
    fattn_ctx *const ctx = logged_context(0, &warnings);
    if (ctx->isa < isa) cr_skip("no AMX for %s", fattn_dtype_name(dtype));
    cr_assert(set_small_stack());
    cr_assert_not(uses_amx(ctx, dtype));
    cr_assert_not(uses_amx(ctx, dtype));
    cr_assert_eq(warnings, 1);
    fattn_ctx_destroy(ctx);
}
Test(amx, refused_beside_a_small_signal_stack) { refuse(FATTNI_ISA_AMX, FATTN_BF16); }
Test(amx, refused_to_f16_beside_a_small_signal_stack) { refuse(FATTNI_ISA_AMXFP16, FATTN_F16); }

static void use(int isa, fattn_dtype dtype) {
    int warnings = 0;
    fattn_ctx *const ctx = logged_context(0, &warnings);
    if (ctx->isa < isa) cr_skip("no AMX for %s", fattn_dtype_name(dtype));
    cr_assert(uses_amx(ctx, dtype));
    cr_assert_not(set_small_stack(), "the process may use AMX, but signal stacks may be small");
    cr_assert(uses_amx(ctx, dtype));
    cr_assert_eq(warnings, 0);
    fattn_ctx_destroy(ctx);
}
Test(amx, is_used_once_allowed) { use(FATTNI_ISA_AMX, FATTN_BF16); }
Test(amx, is_used_by_f16_once_allowed) { use(FATTNI_ISA_AMXFP16, FATTN_F16); }
