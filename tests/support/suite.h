/* The context and the tape that the tests of one suite use: new ones for each test, closed with nothing allocated.
   Fresh memory is NaN; memory.left makes allocations fail. For one file each: the variables are static. */
#ifndef TEST_SUITE_H
#define TEST_SUITE_H

#include "failing_alloc.h"

#include <criterion/criterion.h>
#include <fattn/fattn.h>

static failing_alloc memory;
static fattn_ctx *ctx;
static fattn_tape *tape;

static inline void open_context(int threads) {
    memory = (failing_alloc){.left = -1};
    ctx = failing_context(&memory, threads);
}

static inline void close_context(void) {
    cr_assert_eq(fattn_ctx_mem(ctx).live, 0, "%zu bytes leaked", fattn_ctx_mem(ctx).live);
    fattn_ctx_destroy(ctx);
    cr_assert_eq(memory.live, 0);
}

static inline void open_tape(void) {
    open_context(2);
    cr_assert_eq(fattn_tape_create(ctx, &tape), FATTN_OK);
}

static inline void close_tape(void) {
    fattn_tape_destroy(tape);
    close_context();
}

#endif
