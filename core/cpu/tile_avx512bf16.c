/* Tiles with BF16 products by AVX512-BF16; the rest with AVX-512. Empty where the compiler does not know it. */
#include "core/cpu/tile.h"

#ifdef FATTNI_HAVE_NARROW_PRODUCTS
#define ISA avx512bf16
#define ROW_BYTES 128
#define OPERAND FATTN_BF16
#define NARROW_PRODUCT "core/cpu/product_avx512bf16.inc"
#include "core/cpu/tile.inc"
#endif
