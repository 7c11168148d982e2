#include "core/cuda/library.h"

#include <dlfcn.h>
#include <string.h>

void *fattni_library_open(const char *file, const fattni_symbol *wanted, size_t count, const char **missing) {
    *missing = NULL;
    void *const library = dlopen(file, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    for (size_t n = 0; library && n < count; ++n) {
        void *const f = dlsym(library, wanted[n].name);
        if (!f) {
            *missing = wanted[n].name;
            dlclose(library);
            return NULL;
        }
        memcpy(wanted[n].to, &f, sizeof f); /* ISO C does not convert an object pointer to a function pointer */
    }
    return library;
}
