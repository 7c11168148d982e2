/* Tiles with BF16 products by AMX; the rest with AVX-512. Empty where the compiler does not know them. */
#include "core/cpu/tile.h"

#ifdef FATTNI_HAVE_NARROW_PRODUCTS
#define ISA amx
#define ROW_BYTES 128
#define OPERAND FATTN_BF16
#define NARROW_PRODUCT "core/cpu/product_amx.inc"
#include "core/cpu/tile.inc"
#endif
