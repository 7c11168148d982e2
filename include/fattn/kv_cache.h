/* fattn/kv_cache.h - keys and values that grow: decoding. fattn_attention_fwd reads what fattn_kv_append has written,
   with seqlens_k = lengths_after; in pages when both have the same page_table (attention.h, "Pages"). */
#ifndef FATTN_KV_CACHE_H
#define FATTN_KV_CACHE_H

#include <fattn/tensor.h>

/* Any strides with D contiguous; k, v, caches and q have one dtype: F64, F32, F16 or BF16. D and Dv up to 256. */
typedef struct fattn_kv_append_io {
    uint32_t struct_size;
    float rope_base; /* 0: k and q stay as they are, else both are turned as by fattn_op_rope, D even: row s by the
                        angles of position lengths[b] + s */
    /* The new rows, [B,Hkv,S,D] and [B,Hkv,S,Dv]; required. */
    const fattn_tensor *k, *v;
    /* [B,Hkv,room,D] and [B,Hkv,room,Dv], with page_table [pages,Hkv,page,D] and [pages,Hkv,page,Dv]; written;
       required. */
    const fattn_tensor *k_cache, *v_cache;
    /* [B] I32: keys in the cache before; row s goes to lengths[b] + s; required. */
    const fattn_tensor *lengths;
    /* [B] I32: how many of the S rows count; NULL = all. */
    const fattn_tensor *new_rows;
    /* [B] I32: written: lengths + new_rows; NULL = not wanted. Not lengths itself, since each layer of a model appends
       after the same lengths. */
    const fattn_tensor *lengths_after;
    /* [B,pages of a sequence] I32; NULL = no pages. */
    const fattn_tensor *page_table;
    /* [B,Hq,S,D], both or neither: q turned by the same positions is written to q_rotated, which may be q itself. */
    const fattn_tensor *q, *q_rotated;
} fattn_kv_append_io;

/* Appends rows to a cache of keys and values. With pages, position j of sequence b is row j % page of page_table[b,
   j / page], page is a power of two, 16 or more, and the room of a sequence is the table's second dimension times page.
   Entries and pages of other positions are not touched; no page may get rows of two sequences. Rows s >= new_rows[b]
   are not written and have no effect, those of q included.

   Angles are computed in double, rotations in F64 for F64, else in F32 and rounded once: the bits of fattn_op_rope on
   the same device.

   Enqueue only: no allocation, no synchronisation, no host read of device data. Capturable. Errors: ARG, ABI, SHAPE,
   DTYPE, DEVICE; nothing is written then. Outputs must not overlap inputs or each other: ARG where addresses prove it.
   On the CPU lengths, new_rows or entries that are out of range, and rows for which there is no room, are ARG. A GPU,
   where their values are not known to the host, clamps lengths to 0..room and new_rows to 0..S, leaves out rows without
   room or with an entry that is not in 0..pages-1, and caps lengths_after at the room; more than 2^31-1 new rows, or
   2^21 heads, are UNSUPPORTED there. */
FATTN_API FATTN_CHECKED fattn_status fattn_kv_append(fattn_ctx *ctx, const fattn_kv_append_io *io);

#endif
