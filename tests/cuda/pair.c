#include "pair.h"

#include "attention.h"
#include "call.h"
#include "device.h"

pair pair_or_skip(uint32_t flags) {
    pair p = {.gpu = device_context(0)};
    if (!p.gpu) cr_skip_test("no CUDA device");
    if (flags) {
        const fattn_ctx_options o = {
            .struct_size = sizeof o, .device = FATTN_CUDA, .flags = flags, .arch_cap = call_arch()};
        fattn_ctx_destroy(p.gpu);
        cr_assert_eq(fattn_ctx_create(&o, &p.gpu), FATTN_OK);
    }
    p.cpu = attention_context(0);
    return p;
}

void pair_free(pair *p) {
    cr_assert_eq(fattn_ctx_sync(p->gpu), FATTN_OK, "%s", fattn_ctx_error(p->gpu));
    cr_assert_eq(fattn_ctx_mem(p->gpu).live, 0u);
    fattn_ctx_destroy(p->gpu);
    fattn_ctx_destroy(p->cpu);
}

fattn_tensor to_host(const pair *p, const fattn_tensor *t) {
    fattn_tensor here;
    MUST(p->cpu, fattn_tensor_alloc(p->cpu, FATTN_F64, t->ndim, t->shape, &here));
    MUST(p->gpu, fattn_tensor_copy(p->gpu, &here, t));
    return here;
}
