/* Rows that see no key, at the beginning of each head of a causal call with more rows than keys: O = 0, L = -inf. Their
   row blocks are no tiles of fwd_sm90.cuh, which includes this where its types are known: the warps of the producer's
   warpgroup that have nothing else to do write them. O has a tensor map: its rows lie at multiples of 16 bytes. */
#ifndef FATTNI_FWD_CUDA_SM90_FWD_SM90_KEYLESS_H
#define FATTNI_FWD_CUDA_SM90_FWD_SM90_KEYLESS_H

enum { KEYLESS_CHUNKS = DV / 8, KEYLESS_ROWS = 32 / KEYLESS_CHUNKS }; /* of a row; a warp's at a time */

/* By warps 1 to 3 of all CTAs, `warp` 0 to 2. */
DEVICE void end_keyless_rows(const fattni_fwd_sm90_args *p, int warp) {
    const fattni_attention_args *const a = &p->a;
    const int lane = (int)threadIdx.x % 32, c = lane % KEYLESS_CHUNKS * 8, units = p->keyless * p->schedule.planes;
    if (lane >= KEYLESS_ROWS * KEYLESS_CHUNKS) return;
    for (int unit = (int)blockIdx.x * 3 + warp; unit < units; unit += (int)gridDim.x * 3) {
        const int plane = unit / p->keyless, b = plane / a->Hq, h = plane % a->Hq;
        const int64_t i0 = unit % p->keyless * BM + lane / KEYLESS_CHUNKS;
        uint16_t *o = (uint16_t *)a->o.p + b * a->o.b + h * a->o.h + i0 * a->o.row + c;
        float *lse = (float *)a->lse.p + b * a->lse.b + h * a->lse.h + i0 * a->lse.row;
        char *rest = (char *)a->o_rest.p + b * a->o_rest.b + h * a->o_rest.h + i0 * a->o_rest.row + c;
#pragma unroll 1
        for (int i = 0; i < BM; i += KEYLESS_ROWS) {
            if (i + lane / KEYLESS_CHUNKS >= BM) break;
            if (c == 0) *lse = -INFINITY;
            if (c + 8 <= a->Dv)
                *(uint4 *)o = make_uint4(0, 0, 0, 0);
            else
                for (int d = c; d < a->Dv; ++d) o[d - c] = 0;
            if (a->o_rest.p && c < a->Dv) *(uint64_t *)rest = 0;
            o += KEYLESS_ROWS * a->o.row, lse += KEYLESS_ROWS * a->lse.row, rest += KEYLESS_ROWS * a->o_rest.row;
        }
    }
}

#endif
