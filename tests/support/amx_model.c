/* The model of AMX with BF16 products. Empty where the compiler does not know AMX. */
#include "amx_model.h"

#ifdef FATTNI_HAVE_NARROW_PRODUCTS
#define ISA amx_model
#define OPERAND FATTN_BF16
#include "amx_model.inc"
#endif
