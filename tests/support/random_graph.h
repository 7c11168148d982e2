/* Random graphs of the tape's ops: which ops, what is a view of what, used how often and in which order, follows from a
   seed. Three inputs are differentiated, one of which lends its elements as the weights of all ops. */
#ifndef TEST_RANDOM_GRAPH_H
#define TEST_RANDOM_GRAPH_H

#include <fattn/fattn.h>

/* Asserts that the graph's gradients in dtype, F64 or F32, are the differences in F64, at 16 coordinates of each
   input. */
void random_graph_check(fattn_ctx *ctx, uint64_t seed, fattn_dtype dtype);
/* Asserts that those in F16 or BF16 are the ones in F64 but for roundings: four times what roundings of the inputs
   change, and those on the way, which are measured in F32, and four units. */
void random_graph_check_16_bits(fattn_ctx *ctx, uint64_t seed, fattn_dtype dtype);
/* Asserts that gradients that are stored (FATTN_PARAM_ONE_PASS), over NaN, equal those that are added to zeros. */
void random_graph_check_one_pass(fattn_ctx *ctx, uint64_t seed, fattn_dtype dtype);

#endif
