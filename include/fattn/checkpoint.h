/* fattn/checkpoint.h - parameters and an optimizer's state in a file, to go on training from or to compute with. In
   libfattn_fixture, so that libfattn needs no HDF5.

   A checkpoint is an HDF5 file; the files of `fattn train` are such checkpoints, with more in them:

     /params/<name>                    a parameter in F32, F64 for F64; of 16 bits its F32 master, if it has one
     /adam/m/<name>, /adam/v/<name>    AdamW's moments
     /sgd/momentum/<name>              SGD's, with momentum
     /state                            attributes step, adam_step: 64-bit integers

   and behind it, where HDF5 does not look, 16 bytes: "fattnck1" and the FNV-1a hash of all bytes before.

   HDF5's default build is not thread-safe: serialise these calls and those of fixture.h. */
#ifndef FATTN_CHECKPOINT_H
#define FATTN_CHECKPOINT_H

#include <fattn/optim.h>

typedef struct fattn_checkpoint {
    uint32_t struct_size;
    int32_t n;
    fattn_param *const *params; /* [n], each with a name of its own: 1 to 63 characters out of A-Z a-z 0-9 _ - . that do
                                   not begin with a dot */
    fattn_adamw *adamw;         /* made for the same params in this order; NULL: none */
    fattn_sgd *sgd;             /* the same; not both */
    int64_t step;               /* the caller's count of steps, 0 or more: written by save, set by load */
} fattn_checkpoint;

/* Writes all of c: to a new file beside path, fsync, rename, so that a crash at any time leaves an older file at path
   as it is. ctx is that of the params; waits for its work. ABI, ARG, SHAPE, DTYPE, DEVICE: c is not as described; IO:
   the file cannot be written; NOMEM. Frozen params have no optimizer state. */
FATTN_API FATTN_CHECKED fattn_status fattn_checkpoint_save(fattn_ctx *ctx, const char *path, const fattn_checkpoint *c);
/* Reads params' values, the state of the optimizer that is given, and step. Names and shapes must be the file's;
   numbers are converted to the params' dtypes, so that a run may go on in another one or on another device. What else
   the file has stays there: without an optimizer, its moments. IO: no such file, not a checkpoint, damaged, or
   something is missing in it or has another shape; nothing has been changed then, unlike after NOMEM or a failure of
   the device. Learning rates and gradients are not in a file. */
FATTN_API FATTN_CHECKED fattn_status fattn_checkpoint_load(fattn_ctx *ctx, const char *path, fattn_checkpoint *c);

#endif
