/* Tiles with F16 products by AMX-FP16; the rest with AVX-512. Empty where the compiler does not know AMX. */
#include "core/cpu/tile.h"

#ifdef FATTNI_HAVE_NARROW_PRODUCTS
#define ISA amxfp16
#define ROW_BYTES 128
#define OPERAND FATTN_F16
#define NARROW_PRODUCT "core/cpu/product_amx.inc"
#include "core/cpu/tile.inc"
#endif
