/* Dispatch: each pass has one table of kernels; the first row that supports a call runs it. A call is validated
   once and looked up once: the result of the lookup is its plan, which is passed to run. */
#ifndef FATTNI_CORE_ATTENTION_KERNEL_H
#define FATTNI_CORE_ATTENTION_KERNEL_H

#include "core/attention/problem.h"

typedef struct fattni_kernel_plan {
    size_t workspace, saved; /* bytes */
    bool deterministic;
    char name[64];         /* as in fattn_attention_plan */
    const void *choice[3]; /* private to the row: the kernel instances that it will launch, */
    int64_t parts[2];      /* and how it divides their work */
} fattni_kernel_plan;

typedef struct fattni_kernel {
    const char *family; /* "fattn_fwd_cpu": file and prefix of the plan's name */
    fattn_device device;
    uint32_t algorithms; /* bit a set: implements fattn_algorithm a */
    /* NULL if the row supports the call, whose plan it fills in (zero before). Else why not, as the end of an error
       message ("has no ALiBi"). Pure; the workspace suffices for tensors at any addresses. */
    const char *(*plan)(const fattn_ctx *ctx, const fattni_problem *p, fattni_kernel_plan *out);
    fattn_status (*run)(fattn_ctx *ctx, const fattni_problem *p, const fattni_kernel_plan *plan);
    uint32_t dtypes; /* bit t: supports q of fattn_dtype t; 0: all */
    bool fp8;        /* forward: runs calls with FATTN_FP8, and no others */
    bool unified;    /* forward: knows FATTN_UNIFIED_MAX */
} fattni_kernel;

/* fwd_table.c and bwd_table.c: the rows in order of preference, then NULL. A row is defined in its
   kernel's own file and named after it: fattni_fwd_cpu in fwd_cpu.c. */
extern const fattni_kernel *const fattni_fwd_table[];
extern const fattni_kernel *const fattni_bwd_table[];

/* FATTN_E_UNSUPPORTED with the reason of the last row for this algorithm and dtype. */
fattn_status fattni_pick(fattn_ctx *ctx, const fattni_kernel *const *table, const fattni_problem *p,
                         const fattni_kernel **out, fattni_kernel_plan *plan);

/* A call whose arguments have been checked and whose kernel is chosen. */
typedef struct fattni_call {
    fattni_problem p;
    const fattni_kernel *kernel;
    fattni_kernel_plan plan;
    /* Backward with FATTN_FP8_RENEW: the forward call that comes first; its memory is in plan.workspace. Else NULL. */
    const fattni_kernel *renewal;
    fattni_kernel_plan renewal_plan;
} fattni_call;

/* Validate and pick. */
fattn_status fattni_prepare(fattn_ctx *ctx, const fattn_attention_params *params, const fattn_attention_io *io,
                            enum fattni_pass pass, const fattni_kernel *const *table, fattni_call *out);
/* A query: plans both passes from one io; backward's workspace covers every d_o that a call may pass. */
fattn_status fattni_prepare_both(fattn_ctx *ctx, const fattn_attention_params *params, const fattn_attention_io *io,
                                 fattni_call *fwd, fattni_call *bwd);
/* Checks workspace, saved and overlaps, and runs. The call may come from a query, if its addresses have been filled in
   since, with the same alignment to 16 bytes as in the query, and its lengths have been checked. */
fattn_status fattni_run(fattn_ctx *ctx, const fattni_call *call);

#endif
