/* A context whose allocator fails after a number of allocations. */
#ifndef TEST_FAILING_ALLOC_H
#define TEST_FAILING_ALLOC_H

#include <fattn/context.h>

typedef struct failing_alloc {
    long left; /* allocations that still succeed; negative = no limit */
    long live; /* allocated blocks; the context itself is one */
} failing_alloc;

/* A CPU context that allocates through a, which must outlive it. a->left does not count the
   context's own block. */
fattn_ctx *failing_context(failing_alloc *a, int threads);

#endif
