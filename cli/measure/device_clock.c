#include "cli/measure/device_clock.h"

#include <dlfcn.h>
#include <stddef.h>

enum { CLOCK_SM = 1 }; /* NVML_CLOCK_SM */

typedef int nvml_init(void);
typedef int nvml_device(unsigned, void **);
typedef int nvml_clock(void *, int, unsigned *);

/* dlsym returns an object pointer, which POSIX allows to be converted to a function pointer. */
static void *symbol(void *library, const char *name) { return dlsym(library, name); }

int device_clock(void) {
    void *const library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!library) return 0;
    nvml_init *init, *shutdown;
    nvml_device *device;
    nvml_clock *clock;
    *(void **)&init = symbol(library, "nvmlInit_v2");
    *(void **)&shutdown = symbol(library, "nvmlShutdown");
    *(void **)&device = symbol(library, "nvmlDeviceGetHandleByIndex_v2");
    *(void **)&clock = symbol(library, "nvmlDeviceGetClockInfo");
    unsigned mhz = 0;
    if (init && shutdown && device && clock && init() == 0) {
        void *handle = NULL;
        if (device(0, &handle) != 0 || clock(handle, CLOCK_SM, &mhz) != 0) mhz = 0;
        shutdown();
    }
    dlclose(library);
    return (int)mhz;
}
