/* Shared libraries that are looked for while a program runs, never linked. */
#ifndef FATTNI_CORE_CUDA_LIBRARY_H
#define FATTNI_CORE_CUDA_LIBRARY_H

#include <stddef.h>

/* The file of a major version, a number: "libcublas.so.13". */
#define FATTNI_LIBRARY_FILE(name, version) FATTNI_LIBRARY_FILE_(name, version)
#define FATTNI_LIBRARY_FILE_(name, version) name ".so." #version

typedef struct fattni_symbol {
    const char *name;
    void *to; /* the address of a function pointer */
} fattni_symbol;

/* Opens `file`, as dlopen finds it, and sets the pointers. NULL: it was not found, *missing is NULL; or it lacks a
   function, whose name *missing is. It stays in memory until the process ends, even after dlclose: CUDA's libraries
   keep threads, and state in the driver. */
void *fattni_library_open(const char *file, const fattni_symbol *wanted, size_t count, const char **missing);

#endif
