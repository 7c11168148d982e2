/* FATTN_EXACT_DELTA: what rounding takes off a 16-bit O, so that backward knows O to 16 bits of significand (F16: 19).

   delta = rowsum(dO O) has the error of the rounded O, the same in every dS of a row: it multiplies what the row's P
   averages, of the keys in dQ and so the queries in dK. NUMERICS.md, section 1.

   One signed byte per element of O: the difference of the bits of the exact and the rounded number as F32, in units of
   1/256 of the rounded number's last place. Half a last place is 128 units, stored as 127; where a rounded F16 is
   subnormal the difference may be larger and is cut off there, too. In io.saved, [B,Hq,rows of q,Dv] in the order of
   O's dimensions, rows padded to multiples of 16 bytes; of these, those up to a multiple of 8 are 0. */
#ifndef FATTNI_CORE_ATTENTION_O_REST_H
#define FATTNI_CORE_ATTENTION_O_REST_H

#include <stdint.h>

#ifdef __CUDACC__
#define FATTNI_O_REST static __device__ __forceinline__
#else
#define FATTNI_O_REST static inline
#endif

/* Bits from a unit to F32's last place. */
enum { FATTNI_O_REST_BF16 = 8, FATTNI_O_REST_F16 = 5 };
/* Bytes from row to row. */
#define FATTNI_O_REST_PITCH(Dv) (((Dv) + 15) / 16 * 16)

/* From the bits, as F32, of a number and of what it was rounded to. */
FATTNI_O_REST int32_t fattni_o_rest(uint32_t exact, uint32_t rounded, int bits) {
    const int32_t units = ((int32_t)(exact - rounded) + (1 << (bits - 1))) >> bits;
    return units > 127 ? 127 : units < -128 ? -128 : units;
}
/* And back: the bits of the exact number, nearly. */
FATTNI_O_REST uint32_t fattni_o_exact(uint32_t rounded, int32_t rest, int bits) {
    if ((rounded & 0x7f800000u) == 0x7f800000u) return rounded; /* less than an infinity would be a number */
    return rounded + ((uint32_t)rest << bits);
}

#endif
