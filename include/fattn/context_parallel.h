/* fattn/context_parallel.h - attention over a sequence whose rows are spread over the ranks of a communicator.

   A sequence of N rows (of a packed batch: of all its sequences) is cut into chunks. Zigzag: 2 size chunks, rank r has
   number r and number 2 size - 1 - r, one after the other, so that every rank has the same work under a causal mask.
   Contiguous: size chunks, rank r has number r. A chunk has ceil(N / chunks) rows, but at least 17; the last ones have
   what is left, maybe none; less than 17 rows are added to the chunk before. q, k, v, o, lse and the gradients of a
   rank are of its rows; B and the heads are whole.

   Three forms compute the same function; t = N / size rows on a rank:
   RING        k and v go around the ranks (Liu et al., arXiv 2310.01889; zigzag: Zhu 2024), dk and dv with them, in
               F32; parts are merged by L in F32. Memory t; moves while kernels run. Least wait for long sequences.
   ALL_GATHER  every rank has all k and v during a call (Llama 3, arXiv 2407.21783): memory N. dk and dv are summed in
               F32 in the order of fattn_comm_all_reduce.
   ULYSSES     ranks exchange rows for heads (Jacobs et al., arXiv 2309.14509): each computes Hq / size heads of the
               whole sequence, with the kernels and in the memory of one device. size must divide Hkv.
   AUTO        ULYSSES where it can, but ALL_GATHER on a GPU that a rank's key heads do not fill: N Hkv / size below 256
               for each SM of the rank that has the fewest. Where size does not divide Hkv ALL_GATHER for packed
               batches, for DETERMINISTIC, and where t is too short for a ring to hide its transfers: below
               4096 Hkv / Hq rows; else RING. A ring is never the choice where another form can be: a rank has no mean
               of all keys, so that dq of 16-bit keys with means is as far off as without centring (NUMERICS.md,
               section 1).

   Bits. With FATTN_DETERMINISTIC o, lse, dq, dk and dv of ULYSSES and of ALL_GATHER do not depend on the number of
   ranks, nor on the layout; packed batches: of ULYSSES. ULYSSES gives those of fattn_attention_fwd and _bwd on one
   device. ALL_GATHER gives them, too, but in 16 bits and TF32 where the keys have a mean: there it does not centre them
   (NUMERICS.md, section 1). Two cases are excepted, where kernels choose by the size of their call, and a rank's call
   has fewer rows, heads or keys than that of one device:
   - Keys that a GPU splits: F32, TF32, F64, and before Hopper 16 bits. A forward call of few row blocks, over all
     heads, adds parts of its keys (at most 64 blocks and more than 256 keys, of TF32 512; in 16 bits 32 and 1024:
     fwd/README.md, "Small grids"). Where a rank's call is one, o, lse and all gradients depend on the number of ranks,
     those of ALL_GATHER also on the layout.
   - F16 from N = 8192 on, where P is rounded (CUDA, 16-bit products of a CPU): dk and dv of ALL_GATHER. P is scaled by
     a power of two that follows from the keys of a call, here those of a chunk (NUMERICS.md, section 1).
   A RING gives the same bits in every run, others for another number of ranks. */
#ifndef FATTN_CONTEXT_PARALLEL_H
#define FATTN_CONTEXT_PARALLEL_H

#include <fattn/comm.h>
#include <fattn/tape.h>

typedef struct fattn_cp fattn_cp;

typedef enum fattn_cp_form { FATTN_CP_AUTO = 0, FATTN_CP_RING, FATTN_CP_ALL_GATHER, FATTN_CP_ULYSSES } fattn_cp_form;
typedef enum fattn_cp_layout { FATTN_CP_ZIGZAG = 0, FATTN_CP_CONTIGUOUS } fattn_cp_layout;

typedef struct fattn_cp_options {
    uint32_t struct_size;
    int32_t form, layout;
    int32_t n_sequences;       /* packed: of cu_seqlens; else 0 */
    int64_t rows;              /* N: 0..2^29, of each sequence of the batch */
    const int32_t *cu_seqlens; /* [n_sequences + 1], host: 0 = first <= second <= ... <= last = N; NULL = not packed;
                                  copied. B of the tensors is 1 then */
    int32_t save;              /* 1: fattn_op_attention_cp has io.saved, see below; else 0 */
    int32_t reserved;          /* 0 */
} fattn_cp_options;

/* Collective: the ranks must agree on the options, else FATTN_E_COMM on all; their GPUs may differ. comm and its
   context are borrowed. ARG, ABI, NOMEM. */
FATTN_API FATTN_CHECKED fattn_status fattn_cp_create(fattn_comm *comm, const fattn_cp_options *opt, fattn_cp **out);
FATTN_API void fattn_cp_destroy(fattn_cp *cp); /* NULL is allowed */

/* Rows of this rank. */
FATTN_API int64_t fattn_cp_rows(const fattn_cp *cp);
/* positions[i] = place in its sequence of row i of this rank, for RoPE and position tables. Host; [fattn_cp_rows]. */
FATTN_API void fattn_cp_positions(const fattn_cp *cp, int32_t *positions);
/* This rank's rows of `whole` along dim, which has N there: a copy, local has fattn_cp_rows. Not collective. ctx is the
   communicator's; `whole` may be in host memory. */
FATTN_API FATTN_CHECKED fattn_status fattn_cp_take(fattn_cp *cp, const fattn_tensor *whole, int dim,
                                                   const fattn_tensor *local);
/* The opposite: every rank gets all rows. Collective. `whole` on the device; any strides in both. */
FATTN_API FATTN_CHECKED fattn_status fattn_cp_gather(fattn_cp *cp, const fattn_tensor *local, int dim,
                                                     const fattn_tensor *whole);

/* As fattn_attention_fwd and _bwd, of this rank's rows: io has q, k, v, o, lse, for backward also d_o and any of d_lse,
   dq, dk, dv; alibi, sink and d_sink [Hq], whole on every rank; rng_step. d_sink is this rank's share: the gradient is
   the sum over the ranks. Everything else in io but saved must be NULL or 0: memory comes from the context and is kept
   by cp; a call of the same shapes as before allocates nothing. Collective: shapes, dtypes, flags and params must
   agree; each rank checks its own, and what is sent must have the length that is expected, else FATTN_E_COMM on all.
   Masks, windows, ALiBi and dropout are those of the whole sequence: the same dropout bits as on one device.
   params: q_pos0, k_pos0 and max_seqlen are 0; FATTN_MERGE, FATTN_EXACT_DELTA, FATTN_FP8 and STANDARD are UNSUPPORTED,
   as are bias and padded lengths (pack them). Errors: those of attention; UNSUPPORTED: ULYSSES, when size does not
   divide Hkv. */
FATTN_API FATTN_CHECKED fattn_status fattn_cp_fwd(fattn_cp *cp, const fattn_attention_params *p,
                                                  const fattn_attention_io *io);
FATTN_API FATTN_CHECKED fattn_status fattn_cp_bwd(fattn_cp *cp, const fattn_attention_params *p,
                                                  const fattn_attention_io *io);
/* io.saved, which may be NULL, but on all ranks or on none; 256-byte aligned. ULYSSES leaves in it what forward moved:
   q, k, v, o and lse of this rank's heads and all rows, as many bytes as those of its rows. Backward with the same
   saved moves d_o and d_lse alone, and reads nothing of the tensors that are there; the bits are the same. WORKSPACE:
   it has fewer bytes. Other forms leave it as it is.
   *bytes: of saved for a call with this io and these params; 0 where nothing would be saved. Not collective. */
FATTN_API FATTN_CHECKED fattn_status fattn_cp_saved(fattn_cp *cp, const fattn_attention_params *p,
                                                    const fattn_attention_io *io, size_t *bytes);
/* The form that a call with these heads and params takes: of AUTO, the choice. */
FATTN_API fattn_cp_form fattn_cp_form_of(const fattn_cp *cp, int64_t Hq, int64_t Hkv, const fattn_attention_params *p);

/* fattn_op_attention_ex over cp, which must outlive the tape's graph. x: q, k, v, alibi, sink, rng_step; the rest
   absent. Every rank records the same ops, one without rows, too; backward is collective, too. The gradient of a sink
   is this rank's share. With options.save the tape keeps what fattn_cp_saved says until backward. */
FATTN_API fattn_var fattn_op_attention_cp(fattn_tape *t, fattn_cp *cp, const fattn_attention_vars *x,
                                          const fattn_attention_params *p, fattn_var *lse);

#endif
