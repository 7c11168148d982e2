/* For ThreadSanitizer, with EMULATED_RACES: device threads, and what copies for them, are contexts of their own, and
   only what orders memory on the device orders their accesses. So it finds a missing wait in any order of warps.
   The asynchronous proxy (PTX ISA, "proxies") is two contexts for each warp, of shared and of global memory. They know
   what its lanes knew at their last fence, and what others' proxies knew when a barrier was met: so it finds a missing
   fence before a product or a copy reads what threads have written, and a missing wait after it. A copy that has
   arrived tells proxies all that its issuer knew, which is more than it should: a fence that is missing later may stay
   hidden. */
#ifndef EMULATED_RACES_H
#define EMULATED_RACES_H

#ifndef EMULATED_RACES
#define EMULATED_RACES 0
#endif
#if EMULATED_RACES
#include <sanitizer/tsan_interface.h>
extern "C" void __tsan_read16(void *);
extern "C" void __tsan_write16(void *);
#define UNSEEN __attribute__((no_sanitize("thread"))) /* whose accesses are not seen */
/* That 16 bytes are read or written, for what is not seen. */
static inline void races_read(const void *from) { __tsan_read16((void *)from); }
static inline void races_write(void *to) { __tsan_write16(to); }
/* Accesses before a release of `at` come before those after an acquire of it. */
static inline void races_release(void *at) { __tsan_release(at); }
static inline void races_acquire(void *at) { __tsan_acquire(at); }
static inline void *races_own_context(void) { return __tsan_get_current_fiber(); }
static inline void *races_new_context(void) { return __tsan_create_fiber(0); }
/* Without an order between the contexts. */
static inline void races_enter(void *context) { __tsan_switch_to_fiber(context, __tsan_switch_to_fiber_no_sync); }
#else
#define UNSEEN
static inline void races_read(const void *) {}
static inline void races_write(void *) {}
static inline void races_release(void *) {}
static inline void races_acquire(void *) {}
static inline void *races_own_context(void) { return nullptr; }
static inline void *races_new_context(void) { return nullptr; }
static inline void races_enter(void *) {}
#endif

/* A fence: all fences have one order, which is more than there is. */
static inline void races_fence(void) {
    static char fences;
    races_release(&fences);
    races_acquire(&fences);
}

#endif
