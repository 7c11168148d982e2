/* Names of the functions of elements: host and device. */
#ifndef FATTNI_AUTOGRAD_OPS_ELEMENTWISE_ELEMENTWISE_H
#define FATTNI_AUTOGRAD_OPS_ELEMENTWISE_ELEMENTWISE_H

/* What is done with each element: d is operand 0, x, y and z follow. On the device one kernel does all
   (op_each.cu). */
enum fattni_element {
    FATTNI_FILL,      /* d (+)= value */
    FATTNI_PUT,       /* d (+)= x */
    FATTNI_ADD,       /* d (+)= x + y */
    FATTNI_MUL,       /* d (+)= x y */
    FATTNI_GELU,      /* d (+)= gelu(x) */
    FATTNI_GELU_BACK, /* d (+)= y gelu'(x) */
    FATTNI_SILU,
    FATTNI_SILU_BACK,
    FATTNI_SCALE, /* d (+)= value x */
    FATTNI_RELU,
    FATTNI_RELU_BACK,
    FATTNI_TANH,
    FATTNI_TANH_BACK,
    FATTNI_SWIGLU,      /* d (+)= y silu(x) */
    FATTNI_SWIGLU_BACK, /* d (+)= z y silu'(x) */
    FATTNI_GEGLU,
    FATTNI_GEGLU_BACK
};

#endif
