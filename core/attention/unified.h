/* FATTN_UNIFIED_MAX: what of a part of the keys is used that was computed as exp(s - unified_max), without maxima.

   A row's sum in F32 is then in (2^-80, 2^64), and its O below 2^100: terms 2^-24 below the largest ones are normal
   numbers, in BF16, too, and all parts together stay finite. Other parts are computed once more, with maxima; so are
   those in which a row sees no key. In F64 exponents are eight times as large. Plain C and C++: device code includes
   it, too. */
#ifndef FATTNI_CORE_ATTENTION_UNIFIED_H
#define FATTNI_CORE_ATTENTION_UNIFIED_H

#define FATTNI_UNIFIED_LEAST_SUM 0x1p-80f
#define FATTNI_UNIFIED_MOST_SUM 0x1p64f
#define FATTNI_UNIFIED_MOST_O 0x1p100f
#define FATTNI_UNIFIED_LEAST_SUM_F64 0x1p-640
#define FATTNI_UNIFIED_MOST_SUM_F64 0x1p512
#define FATTNI_UNIFIED_MOST_O_F64 0x1p800

#endif
