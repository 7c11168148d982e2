/* The argument of Hopper's forward kernels; the others take fattni_attention_args. */
#ifndef FATTNI_FWD_CUDA_FWD_ARGS_H
#define FATTNI_FWD_CUDA_FWD_ARGS_H

#include "core/cuda/kernel.h"
#include "core/cuda/divider.h"
#include "core/cuda/sm90_args.h"

/* Rows of one load of Q: those of one consumer warpgroup above head_dim 128 and, beside a bias in shared memory, 64. */
#define FATTNI_FWD_SM90_Q_ROWS(variant, D, BM)                                                                         \
    ((D) > 128 || ((variant) == FATTNI_VARIANT_BIASED && (D) > 64) ? 64 : (BM))

/* Whether shared memory has room for O. Kernels for plain masks then store it by its tensor map alone. */
#define FATTNI_FWD_SM90_STAGES_O(DV, BN) ((DV) <= 128 || (BN) <= 64)

/* FATTN_FP8: columns of a panel of Q and K, and keys of a panel of V^T. */
#define FATTNI_FWD_F8_COLUMNS(D) ((D) < 128 ? (D) : 128)
#define FATTNI_FWD_F8_KEYS(BN) ((BN) % 128 == 0 ? 128 : (BN) % 64 == 0 ? 64 : 32)

/* FATTN_FP8: scales of the copies (include/fattn/fp8.h), all F32. */
typedef struct fattni_f8_args {
    fattni_view q_scale, q_shift; /* per row */
    fattni_view k_scale;          /* per key head */
    fattni_view v_scale, v_mean;  /* per channel of a key head */
} fattni_f8_args;

/* What a part of a row's keys gives, beside O. */
typedef struct fattni_part_row {
    float m, l;  /* what P is relative to, in units of log2; the sum of P */
    float shift; /* what scores are relative to, before the scale (shift_row) */
    float alignment;
} fattni_part_row;

/* What tells a tile from its number, without divisions. */
typedef struct fattni_fwd_order {
    fattni_divider group, planes, last_planes; /* tiles of a head group; its planes, and those of the last one */
    fattni_divider parts, heads;               /* parts of a row block, at most; 1: none is divided */
    int32_t last;                              /* the last head group */
} fattni_fwd_order;

typedef struct fattni_fwd_sm90_args {
    CUtensorMap q, k, v, o; /* {d, row, head, batch}, boxes of 64 columns; o: of the 16 rows of a warp */
    CUtensorMap bias;       /* BIASED: {column, row, head, batch}, boxes of 64 columns and 64 rows */
    fattni_attention_args a;
    fattni_sm90_schedule schedule;
    fattni_fwd_order order;
    fattni_map_step q_step, k_step, v_step, o_step, bias_step;
    int32_t o_by_tma; /* whether O has a map */
    int32_t keyless;  /* causal: a head's first row blocks that see no key, which are no tiles (fwd_sm90_keyless.cuh) */
    float scale_log2; /* scale times log2 e: read from constant memory, it takes no register */
    uint32_t zero;    /* 0, which the compiler does not know (fwd_sm90.cuh) */
    fattni_f8_args f8; /* zero for other kernels */
    /* Row blocks whose keys are divided (fwd_sm90_parts.cuh). */
    fattni_divider part_blocks; /* key blocks of a part, at most */
    float *part_sums;           /* [row blocks of all heads, parts - 1, BM, DV]: O, in the order of registers */
    fattni_part_row *part_rows; /* [row blocks, parts, BM] */
    int32_t *parts_stored;      /* [row blocks]; 0 at the start */
} fattni_fwd_sm90_args;

/* Row blocks at a head's beginning of whose rows, i' + diagonal < 0, none sees a key; one block is left at least. */
FATTNI_DIVIDER int fattni_fwd_keyless(int diagonal, int BM, int blocks) {
    const int keyless = diagonal < 0 ? -diagonal / BM : 0;
    return keyless < blocks ? keyless : blocks - 1;
}

/* in_groups: all but full kernels, which take a plane after the other. last_group: planes of the last head group, at
   least; up to 1: what is left. */
FATTNI_DIVIDER fattni_fwd_order fattni_fwd_order_of(const fattni_sm90_schedule *s, int heads, int parts, int in_groups,
                                                    int last_group) {
    const int each = in_groups ? s->head_group : 1, kept = in_groups && last_group > 1 ? last_group : 1,
              last = kept < s->planes ? (s->planes - kept) / each : 0;
    fattni_fwd_order x;
    x.group = fattni_divider_of(each * s->blocks * parts);
    x.planes = fattni_divider_of(each), x.last_planes = fattni_divider_of(s->planes - last * each);
    x.parts = fattni_divider_of(parts), x.heads = fattni_divider_of(heads);
    x.last = last;
    return x;
}

#endif
