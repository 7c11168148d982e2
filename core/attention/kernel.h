/* Dispatch: each pass has one table of kernels; the first row that does not refuse wins. */
#ifndef FATTNI_CORE_ATTENTION_KERNEL_H
#define FATTNI_CORE_ATTENTION_KERNEL_H

#include "core/attention/problem.h"

typedef struct fattni_kernel_plan {
    size_t workspace, saved; /* bytes */
    bool deterministic;
    char name[48];
} fattni_kernel_plan;

typedef struct fattni_kernel {
    const char *family;  /* "fattn_fwd_cpu": file and prefix of the plan's name */
    fattn_device device;
    uint32_t algorithms; /* bit a set: answers to fattn_algorithm a */
    /* NULL: takes it. Else why not, as the end of a sentence ("has no ALiBi"). Pure. */
    const char *(*refuses)(const fattn_ctx *ctx, const fattni_problem *p);
    /* Pure, and the bytes suffice wherever the tensors lie. */
    void (*plan)(const fattn_ctx *ctx, const fattni_problem *p, fattni_kernel_plan *out);
    fattn_status (*run)(fattn_ctx *ctx, const fattni_problem *p);
    uint32_t dtypes; /* bit t: answers to q of fattn_dtype t; 0: to every one */
} fattni_kernel;

/* fwd_table.c and bwd_table.c: the rows in order of preference, then NULL. A row is defined in its
   kernel's own file and named after it: fattni_fwd_cpu in fwd_cpu.c. */
extern const fattni_kernel *const fattni_fwd_table[];
extern const fattni_kernel *const fattni_bwd_table[];

/* FATTN_E_UNSUPPORTED with the reason of the last row that answers to the algorithm and the dtype. */
fattn_status fattni_pick(fattn_ctx *ctx, const fattni_kernel *const *table, const fattni_problem *p,
                         const fattni_kernel **out);

/* Validate, pick, check workspace, saved and overlaps, run: both entry points. */
fattn_status fattni_run(fattn_ctx *ctx, const fattn_attention_params *params,
                        const fattn_attention_io *io, enum fattni_pass pass,
                        const fattni_kernel *const *table);

#endif
