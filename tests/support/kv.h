/* Calls of fattn_kv_append with memory of their own, and what they must do, said with fattn_op_rope and copies of rows.
   On any device. */
#ifndef TEST_KV_H
#define TEST_KV_H

#include <fattn/fattn.h>

#include <stdbool.h>

enum { KV_SEQUENCES = 8 };

enum kv_layout { KV_HEADS_OUTSIDE, KV_HEADS_INSIDE, KV_PITCH, KV_REVERSED, KV_LAYOUTS };

typedef struct kv_case {
    fattn_dtype dtype;
    int64_t B, Hkv, Hq, S, D, Dv; /* Hq 0: without q */
    int64_t room, page;           /* of a sequence; page 0: no pages */
    float base;
    enum kv_layout layout;
    bool in_place; /* q_rotated is q */
    bool ragged;   /* new_rows is given */
    bool no_after; /* lengths_after is not */
    int32_t lengths[KV_SEQUENCES], rows[KV_SEQUENCES];
} kv_case;

enum kv_tensor {
    KV_K,
    KV_V,
    KV_K_CACHE,
    KV_V_CACHE,
    KV_Q,
    KV_Q_ROTATED,
    KV_LENGTHS,
    KV_NEW_ROWS,
    KV_AFTER,
    KV_TABLE,
    KV_COUNT
};
extern const char *const kv_names[KV_COUNT];

typedef struct kv {
    kv_case c;
    fattn_tensor t[KV_COUNT];
    unsigned char *memory[KV_COUNT]; /* NULL: absent, or another tensor's */
    size_t bytes[KV_COUNT];
    fattn_kv_append_io io; /* points to t */
} kv;

/* Case number n of an endless list. fits: there is room for all new rows. */
kv_case kv_case_of(int n, bool fits);

/* In host memory: inputs are numbers, the rest NaN, unused entries of the table -1. The same for the same case. */
kv *kv_new(const kv_case *c);
/* The same bytes on the context's device, where they are allocated. */
kv *kv_to_device(fattn_ctx *ctx, const kv *x);
/* All bytes of x, which is on the context's device, to a call in host memory. */
void kv_read(fattn_ctx *ctx, const kv *x, kv *to);
void kv_free(kv *x);
void kv_free_on_device(fattn_ctx *ctx, kv *x);

/* What fattn_kv_append must do to x, on the context's device. Rows without room are left out. */
void kv_expect(fattn_ctx *ctx, fattn_tape *tape, kv *x);

/* Name of a tensor whose bytes differ, or NULL. */
const char *kv_difference(const kv *a, const kv *b);

#endif
