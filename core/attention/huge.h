/* Rows whose L is too large to be all that backward knows of them.

   Backward has P = exp(s - L), and an error of L is an error of the whole row of P. L is kept in F32
   (F64): at |L| = 1e9, where an additive mask of -1e9 on every key puts it, F32 has steps of 64. Rows
   beyond FATTNI_HUGE_L are therefore taken for huge: their maximum m and sum l = sum exp(s - m) are
   computed again from the very scores that backward uses, and P = exp((s - m) - log l) sums to 1
   whatever s is. Below, the roundings of L and of L log2(e) leave an error of at most 2^-12.5 in F32.

   What O and L cannot tell: when L is not that of the keys at hand but of more, as in a part of a merged
   result (FATTN_MERGE), the row's P sums to exp(m + log l - L). That is honoured as far as L resolves it:
   a difference of at most |L| 2^-18 (F64 2^-47), 64 times what storing L rounds, counts as rounding. */
#ifndef FATTNI_CORE_ATTENTION_HUGE_H
#define FATTNI_CORE_ATTENTION_HUGE_H

#define FATTNI_HUGE_L 1024.0f
#define FATTNI_HUGE_ROUNDING_F32 3.814697265625e-06f    /* 2^-18 */
#define FATTNI_HUGE_ROUNDING_F64 7.105427357601002e-15 /* 2^-47 */

/* Compares as false for NaN, and for the infinite L of rows that do not count. */
#define FATTNI_IS_HUGE(L) \
    (((L) > FATTNI_HUGE_L || (L) < -FATTNI_HUGE_L) && (L) - (L) == 0)

#endif
