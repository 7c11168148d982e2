/* The model of AMX with F16 products. Empty where the compiler does not know AMX. */
#include "amx_model.h"

#ifdef FATTNI_HAVE_NARROW_PRODUCTS
#define ISA amxfp16_model
#define OPERAND FATTN_F16
#include "amx_model.inc"
#endif
