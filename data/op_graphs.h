/* The cases of ops.h5 and block.h5, computed by the tape: for their generator and their test. */
#ifndef OP_GRAPHS_H
#define OP_GRAPHS_H

#include <fattn/fattn.h>
#include <fattn/fixture.h>

#include <stdbool.h>

enum { OP_INPUTS = 12, OP_OUTPUTS = 2 };

/* /cases/<name>: attribute "op", which names the graph, and the op's numbers as attributes;
   datasets in0 in1 ..., d_out0 .... The tape points into it: do not copy. */
typedef struct op_case {
    fattn_ctx *ctx, *on; /* of the file; of the tape, its values and gradients */
    fattn_fixture *file;
    const char *name;
    char path[96];
    int graph, n_out;
    fattn_dtype dtype;
    fattn_tape *tape;
    fattn_param in[OP_INPUTS];      /* value in dtype, or I32; value.dtype 0: absent. grad in dtype,
                                        without memory for inputs without a gradient */
    fattn_tensor out[OP_OUTPUTS];   /* F64, row-major, on the host: after a run */
    fattn_tensor d_out[OP_OUTPUTS]; /* F64: the upstream gradient; dtype 0: the file has none */
} op_case;

/* IO: no such case, or not as described above. */
fattn_status op_case_load(fattn_ctx *ctx, fattn_fixture *file, const char *name, fattn_dtype dtype, op_case *out);
/* The same for a tape on another context's device. */
fattn_status op_case_load_on(fattn_ctx *ctx, fattn_ctx *on, fattn_fixture *file, const char *name, fattn_dtype dtype,
                             op_case *out);
/* Forward, and with `gradients` backward from sum d_out*out. Can be called repeatedly. */
fattn_status op_case_run(op_case *c, bool gradients);
void op_case_free(op_case *c);

#endif
