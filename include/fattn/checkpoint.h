/* fattn/checkpoint.h - parameters and an optimizer's state in a file, to go on training from or to compute with. In
   libfattn_fixture, so that libfattn needs no HDF5.

   A checkpoint is an HDF5 file; the files of `fattn train` are such checkpoints, with more in them:

     /params/<name>                    a parameter in F32, F64 for F64; of 16 bits its F32 master, if it has one
     /adam/m/<name>, /adam/v/<name>    AdamW's moments
     /sgd/momentum/<name>              SGD's, with momentum
     /state                            attributes step, adam_step or sgd_step: 64-bit integers; with an optimizer
                                       skipped_steps, with a dynamic loss scale loss_scale, a real number, and
                                       finite_steps, with stochastic rounding rounding_seed

   and behind it, where HDF5 does not look, 16 bytes: "fattnck1" and the FNV-1a hash of all bytes before.

   An AdamW whose state the ranks divide (owners, fattn/optim.h) gives and takes the same files: save and create are
   then collective, and only rank 0 writes, or gets, a file; every rank loads, or reads, by itself. A failure to save
   ends the group of ranks.

   HDF5's default build is not thread-safe: serialise these calls and those of fixture.h. Of ranks that divide the state
   only rank 0 uses HDF5 in save and create; so ranks may be threads, which call them together. */
#ifndef FATTN_CHECKPOINT_H
#define FATTN_CHECKPOINT_H

#include <fattn/optim.h>

typedef struct fattn_checkpoint {
    uint32_t struct_size;
    int32_t n;
    fattn_param *const *params; /* [n], each with a name of its own: 1 to 63 characters out of A-Z a-z 0-9 _ - . that do
                                   not begin with a dot */
    fattn_adamw *adamw;         /* made for exactly these params in this order, else ARG; NULL: none */
    fattn_sgd *sgd;             /* the same; not both */
    int64_t step;               /* the caller's count of steps, 0 or more: written by save, set by load */
} fattn_checkpoint;

/* Writes all of c: to a new file unfinished-<process>-<n>.tmp in path's folder, which must exist, fsync, rename, so
   that a crash at any time leaves an older file at path as it is. ctx is that of the params; waits for its work. ABI,
   ARG, SHAPE, DTYPE, DEVICE: c is not as described; IO: the file cannot be written, or path is a folder, a pipe or
   a device (a link is replaced); NOMEM. Frozen params have no
   optimizer state. */
FATTN_API FATTN_CHECKED fattn_status fattn_checkpoint_save(fattn_ctx *ctx, const char *path, const fattn_checkpoint *c);
/* Reads params' values, the state of the optimizer that is given, and step. Names and shapes must be the file's;
   numbers are converted to the params' dtypes, so that a run may go on in another one or on another device. What else
   the file has stays there: without an optimizer, its moments, without a dynamic loss scale, its scale. A loss scale, a
   number of skipped steps or SGD's count that the file lacks stays as it is. A run may go on with masters or without:
   masters begin as what it has, 16-bit values without them as that rounded to nearest. With stochastic rounding before
   and after, the seed must be the same, and the run goes on to the bits of an uninterrupted one. IO: no such file, not
   a checkpoint, damaged, or something else is missing in it or has another shape; ARG: also when its loss scale or
   finite_steps are beyond the optimizer's options, or its stochastic rounding has another seed. Nothing has been
   changed then, unlike after NOMEM or a failure of the device. Learning rates and gradients are not in a file. */
FATTN_API FATTN_CHECKED fattn_status fattn_checkpoint_load(fattn_ctx *ctx, const char *path, fattn_checkpoint *c);

/* The same in two steps each, for a program that keeps more in the file, such as its options or its place in the data,
   and reads that before it has a model: save is create and write, load is open and read. The file is in memory; what
   happens on the disk after open does not matter. Statuses are those of save and load, and ARG for NULL. */
typedef struct fattn_checkpoint_file fattn_checkpoint_file;
/* A file with all of c in it; *out is NULL on the ranks that get none, and after a failure. */
FATTN_API FATTN_CHECKED fattn_status fattn_checkpoint_create(fattn_ctx *ctx, const fattn_checkpoint *c,
                                                             fattn_checkpoint_file **out);
FATTN_API FATTN_CHECKED fattn_status fattn_checkpoint_write(fattn_ctx *ctx, const fattn_checkpoint_file *f,
                                                            const char *path);
/* Reads the file at path and verifies its hash. Any context will do: it gets the error message. */
FATTN_API FATTN_CHECKED fattn_status fattn_checkpoint_open(fattn_ctx *ctx, const char *path,
                                                           fattn_checkpoint_file **out);
FATTN_API FATTN_CHECKED fattn_status fattn_checkpoint_read(fattn_ctx *ctx, const fattn_checkpoint_file *f,
                                                           fattn_checkpoint *c);
/* HDF5's hid_t of the file until close, for groups and datasets of your own; read-only after open. -1 for NULL. */
FATTN_API int64_t fattn_checkpoint_hdf5(const fattn_checkpoint_file *f);
FATTN_API void fattn_checkpoint_close(fattn_checkpoint_file *f); /* NULL is allowed */

#endif
