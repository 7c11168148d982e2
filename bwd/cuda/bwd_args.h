/* The arguments of backward kernels: those of both passes, gradients, and the call's workspace. */
#ifndef FATTNI_BWD_CUDA_BWD_ARGS_H
#define FATTNI_BWD_CUDA_BWD_ARGS_H

#include "core/cuda/divider.h"
#include "core/cuda/sm90_args.h"

typedef struct fattni_bwd_args {
    fattni_attention_args a;
    fattni_view d_o, d_lse, given_delta, dq, dk, dv, d_bias;
    fattni_line d_sink;
    int64_t d_bias_n[4];                     /* elements of d_bias that are stored */
    int32_t d_o_f32, dq_f32, dk_f32, dv_f32; /* F32 beside 16-bit q, k, v */
    int32_t vector_gradients;                /* dq, dk, dv allow 16-byte accesses */
    /* Workspace. Rows are padded to the row block, one range of them per (sequence, head). */
    float *delta, *lse2, *dq_accumulator; /* delta of F64 kernels is double */
    /* lse2 = lse_factor (L - lse_shift): the factor is log2(e), or -1/scale (FATTNI_BEGINS_WITH_L). In F16 P and dS are
       computed e^lse_shift times too large, a power of two that keeps long rows in the normal range. The scales of the
       gradients divide by it again; else they are scale, keep_scale or 1. */
    float lse_factor, lse_shift;
    float dq_scale, dk_scale, dv_scale, dbias_scale;
    /* bwd_huge_common.cuh. huge: whether there are huge rows, tasks claimed, row blocks done; huge_blocks: per row
       block of huge_block rows whether it has any; per row m and log l; per row block its part of dsink. */
    int32_t *huge, *huge_blocks;
    void *huge_max, *huge_log_sum, *huge_sink;
    int32_t huge_block;
    /* bwd_key_mean.cu: per (sequence, key head) key_mean_pitch floats, and whether they are used; per padded row the
       factor of the mean in dQ. NULL: without. */
    float *key_mean, *dq_of_mean;
    int32_t *key_mean_used;
    void *counters; /* what must be zero before preprocess: bwd_key_mean.cu zeroes it, too, in chunks of 16 bytes */
    int64_t counter_chunks;
    int32_t key_mean_pitch, key_mean_f32; /* f32: K is F32 */
    void *sink_parts;                     /* of dsink, per (head, sequence, row block); float or double */
    int32_t *dq_semaphore;                /* FATTN_DETERMINISTIC: bwd_dq_semaphore.cuh; else NULL */
    fattni_view d_o_copy;                 /* an F32 d_o, rounded to the 16-bit dtype; else p NULL */
    int32_t padded_rows, row_block;       /* row_block: BM of the backward kernel */
    /* Fragment order of the dQ accumulator of a row block: threads that add, rows of a warp, and of how many threads
       (dq_group) the float4s of a tile follow each other. */
    int32_t dq_threads, dq_warp_rows, dq_group, D_padded;
} fattni_bwd_args;

/* RING: head groups that have dQ accumulators at a time. LAG: postprocess of a head group comes so many head groups
   later. ROWS_AT_ONCE: most rows of a PREPROCESS or POSTPROCESS work item, a multiple of every row block. */
enum { FATTNI_RING = 5, FATTNI_LAG = 2 };
#define FATTNI_ROWS_AT_ONCE(D) ((D) > 128 ? 256 : (D) > 64 ? 512 : 1024)
/* Rows of O and dO that 128 threads of such a work item load at a time (sm90/bwd_sm90_rows.cuh). */
#define FATTNI_ROWS_OF_UNIT(D) ((D) == 64 ? 64 : (D) == 128 ? 32 : 16)
/* A call with at most so many key blocks per head, those of a cluster counted as one, is short. */
enum { FATTNI_SHORT_BLOCKS = 8 };

/* Most heads of a PREPROCESS or POSTPROCESS work item. */
enum { FATTNI_WORK_ITEM_HEADS = 8 };
/* Key heads of which a SEARCH work item of a cluster finds the means: one for each warp. */
enum { FATTNI_SEARCH_WARPS = 32 };

/* Most rows of a head whose dQ SHORT kernels have in shared memory (sm90/bwd_sm90_short.cuh). */
enum { FATTNI_SHORT_KEYS = 512 };

/* Kernels whose S starts with -L / scale instead of 0 (bwd_sm90.cuh says why). `plain`: FULL, CAUSAL, BANDED or
   BY_HEADS. */
#define FATTNI_BEGINS_WITH_L(plain, cluster, BM) ((plain) && (cluster) == 1 && (BM) == 64)

/* Most key blocks of a head of packed sequences. */
#define FATTNI_PACKED_BLOCKS(rows_k, BN, B) ((rows_k) / (BN) + (B))

/* Of Hopper's kernels. schedule.next_tile counts work items (bwd_sm90_scheduler.cuh). */
typedef struct fattni_bwd_sm90_args {
    CUtensorMap q, k, v, d_o;     /* {d, row, head, batch}, boxes of 64 columns */
    CUtensorMap bias;             /* BIASED: {column, row, head, batch}, boxes of 64 columns and a row block */
    CUtensorMap dk, dv;           /* BY_HEADS: boxes of 64 columns and 16 rows */
    CUtensorMap o_rows, d_o_rows; /* where there are PREPROCESS work items: boxes of 64 columns and a unit of rows */
    fattni_bwd_args bwd;
    fattni_sm90_schedule schedule;
    fattni_map_step q_step, k_step, v_step, o_step, d_o_step, bias_step, dk_step, dv_step;
    /* FATTNI_COUNTERS for each head group, 0 at the start, where the kernel also does the work of bwd_preprocess.cu and
       bwd_postprocess.cu; else NULL: then all work items are MAINLOOP. */
    int32_t *progress;
    int32_t items, head_groups;
    /* Work items of a head group's rows, for each of both kinds; into how many a head is divided; heads in one. */
    int32_t row_items, row_chunks, row_heads, rows_at_once; /* the last: of an item, a multiple of the row block */
    fattni_divider by_chunks, by_heads;                     /* row_chunks and Hq */
    int32_t rows_beside; /* of row_items, before and after a main loop: none where there is one head group */
    int32_t group_items, last_items; /* of a head group's main loop; of the last one's */
    int32_t finds_means;             /* whether the kernel finds means of keys itself */
    int32_t search_items;            /* in clusters: work items that do, before all others */
    /* Tasks from number `whole` on, which is 0 or of the last head group, are divided: most_parts work items for each
       key block, of at most part_blocks row blocks and all heads of the group or, where it is not 0, of at most
       part_heads heads. dK and dV of all but a task's last part, and how many of them are stored; per divided task.
       most_parts 1: there are none. */
    int32_t whole, most_parts, part_blocks, part_heads;
    int32_t by_rows; /* a task has each row block of all its heads before the next one */
    int32_t turns;   /* tasks of every second wave begin with the first rows (bwd_sm90_common.cuh, task) */
    float *part_sums;
    int32_t *parts_stored;
} fattni_bwd_sm90_args;

/* Work items of rows of a head group's `heads`, of at most `rows` rows: how many heads one has, and how many there
   are. */
static inline int32_t fattni_heads_of_rows(const fattni_bwd_sm90_args *s, int32_t rows) {
    const int32_t heads = rows / s->bwd.padded_rows;
    return heads < 1 ? 1 : heads < FATTNI_WORK_ITEM_HEADS ? heads : FATTNI_WORK_ITEM_HEADS;
}
static inline int32_t fattni_items_of_rows(const fattni_bwd_sm90_args *s, int32_t heads, int32_t rows) {
    const int32_t each = fattni_heads_of_rows(s, rows);
    return (s->bwd.padded_rows + rows - 1) / rows * ((heads + each - 1) / each);
}

/* Divides a backward call whose schedule, finds_means, padded_rows and row_block are set into work items, one for
   each `cluster` of `ctas` CTAs; schedule.tiles are those of the main loop. Nothing runs beside the rows of the first
   and the last head group, and little beside those of the next to them: of few head groups all CTAs share these rows,
   each has one work item of both at most. The counters follow next_tile and one for SEARCH in memory. */
enum { FATTNI_COUNTERS = 4, FATTNI_FEW_GROUPS = 4 };
static inline void fattni_schedule_backward(fattni_bwd_sm90_args *s, int32_t cluster, int32_t ctas) {
    const fattni_attention_args *const a = &s->bwd.a;
    const int32_t head_group = s->schedule.head_group, heads = head_group * a->group;
    int32_t rows = FATTNI_ROWS_AT_ONCE(s->bwd.D_padded);
    s->progress = s->schedule.next_tile + 2;
    s->head_groups = (s->schedule.planes + head_group - 1) / head_group;
    for (int32_t n = s->bwd.row_block; n < rows && s->head_groups <= FATTNI_FEW_GROUPS; n += s->bwd.row_block)
        if ((s->head_groups > 1 ? 2 : 1) * fattni_items_of_rows(s, heads, n) <= ctas) rows = n;
    s->rows_at_once = rows;
    s->row_chunks = (s->bwd.padded_rows + rows - 1) / rows;
    s->by_chunks = fattni_divider_of(s->row_chunks), s->by_heads = fattni_divider_of(a->Hq);
    s->row_heads = fattni_heads_of_rows(s, rows);
    s->row_items = (fattni_items_of_rows(s, heads, rows) + cluster - 1) / cluster;
    s->rows_beside = s->head_groups > 1 ? s->row_items : 0;
    s->search_items =
        s->finds_means && cluster > 1 ? (s->schedule.planes + FATTNI_SEARCH_WARPS - 1) / FATTNI_SEARCH_WARPS : 0;
    s->group_items = head_group * s->schedule.blocks * (s->whole == 0 ? s->most_parts : 1);
    s->last_items = s->schedule.tiles - (s->head_groups - 1) * s->group_items;
    s->items = s->search_items + (1 + (s->head_groups < FATTNI_LAG ? s->head_groups : FATTNI_LAG)) * s->row_items +
               s->head_groups * 2 * s->rows_beside + s->schedule.tiles;
}

#endif
