/* Huge rows: rows whose L is so large that backward cannot compute P from it.

   Backward computes P = exp(s - L), so an error of L is a relative error of the whole row of P. L is stored
   in F32 (F64): at |L| = 1e9, the result of an additive mask of -1e9 on every key, F32 has steps of 64. For
   rows with |L| > FATTNI_HUGE_L the maximum m and the sum l = sum exp(s - m) are therefore computed again
   from the scores that backward uses, and P = exp((s - m) - log l) sums to 1 for any s. For smaller |L| the
   roundings of L and of L log2(e) leave an error of at most 2^-12.5 in F32.

   In a part of a merged result (FATTN_MERGE) L also covers keys of other calls, and the row's P sums to
   exp(m + log l - L). This factor is applied when L resolves it: a difference of at most |L| 2^-18 (F64
   2^-47), 64 times the rounding of the stored L, counts as rounding. */
#ifndef FATTNI_CORE_ATTENTION_HUGE_H
#define FATTNI_CORE_ATTENTION_HUGE_H

#define FATTNI_HUGE_L 1024.0f
#define FATTNI_HUGE_ROUNDING_F32 3.814697265625e-06f   /* 2^-18 */
#define FATTNI_HUGE_ROUNDING_F64 7.105427357601002e-15 /* 2^-47 */

/* False for NaN, and for the infinite L of rows that contribute nothing. */
#define FATTNI_IS_HUGE(L) (((L) > FATTNI_HUGE_L || (L) < -FATTNI_HUGE_L) && (L) - (L) == 0)

#endif
