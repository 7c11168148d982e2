/* AMX is asked for when it is first needed, by BF16 tensors and, on CPUs with AMX-FP16, by F16 tensors. A refusal is no
   error. Each test is a process of its own. */
#define _XOPEN_SOURCE 700 /* sigaltstack */
#include "attention.h"
#include "core/base/device.h"
#include "core/base/internal.h"
#include "core/cpu/tile.h"

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

#ifdef FATTNI_HAVE_NARROW_PRODUCTS
/* Of every instruction set, on any CPU: nothing is computed. */
Test(amx, which_tensors_ask_and_what_multiplies_them) {
    int warnings = 0;
    fattn_ctx *const contexts[] = {logged_context(0, &warnings), logged_context(FATTN_CTX_F32_PRODUCTS, &warnings)};
    cr_assert(set_small_stack()); /* to ask is to be refused */
    for (int isa = FATTNI_ISA_BASELINE; isa <= FATTNI_ISA_AMXFP16; ++isa)
        for (int type = FATTN_F64; type <= FATTN_BF16; ++type)
            for (int exact = 0; exact < 2; ++exact) {
                const fattn_dtype dtype = (fattn_dtype)type;
                fattn_ctx *const ctx = contexts[exact];
                ctx->isa = isa;
                const fattni_cpu_kernels *want = NULL; /* with F32 products */
                if (!exact && dtype == FATTN_F16 && isa == FATTNI_ISA_AMXFP16) want = &fattni_cpu_amxfp16;
                if (!exact && dtype == FATTN_BF16 && isa >= FATTNI_ISA_AMX) want = &fattni_cpu_amx;
                const bool asks = want != NULL;
                if (!exact && dtype == FATTN_BF16 && isa == FATTNI_ISA_AVX512BF16) want = &fattni_cpu_avx512bf16;
                const fattni_cpu_kernels *const got = fattni_cpu_kernels_of(ctx, dtype);
                cr_assert(want ? got == want : !got->round, "%s, set %d: %s", fattn_dtype_name(dtype), isa, got->isa);
                warnings = 0;
                ctx->ops->use(ctx, dtype);
                cr_assert_eq(warnings, asks, "%s, set %d", fattn_dtype_name(dtype), isa);
                cr_assert_eq(ctx->isa, asks ? FATTNI_ISA_AVX512 : isa);
            }
    for (int n = 0; n < 2; ++n) fattn_ctx_destroy(contexts[n]);
}
#endif
