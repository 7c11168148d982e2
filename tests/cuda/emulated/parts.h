/* Runs a forward kernel with one CTA per row block, and again with its keys in parts, which the kernel of
   fwd_add_parts.cuh adds. Include after the kernel; K_HALF: it is one for 16 bits. */
#ifndef EMULATED_PARTS_H
#define EMULATED_PARTS_H

#include "fwd/cuda/fwd_row_block.cuh"
#if K_HALF
#include "fwd/cuda/fwd_softmax.cuh"
typedef float part_type;
#else
#include "core/device/finish_row.cuh"
typedef real part_type;
#endif

#include <algorithm>
#include <random>
#include <vector>

/* The kernel that adds parts is one line of fwd_kernels.def, too. */
#pragma push_macro("K_NAME")
#pragma push_macro("K_VARIANT")
#pragma push_macro("K_BM")
#pragma push_macro("K_BN")
#pragma push_macro("K_WARPS")
#undef K_NAME
#undef K_VARIANT
#undef K_BM
#undef K_BN
#undef K_WARPS
#define K_NAME add_parts
#define K_VARIANT FATTNI_VARIANT_ADD
#define K_BM 4
#define K_BN 4
#define K_WARPS 4
namespace adding {
#include "fwd/cuda/fwd_add_parts.cuh"
}
#pragma pop_macro("K_NAME")
#pragma pop_macro("K_VARIANT")
#pragma pop_macro("K_BM")
#pragma pop_macro("K_BN")
#pragma pop_macro("K_WARPS")

static fattni_fwd_split_args split_args;
/* A kernel that takes the first member alone has no parts. */
static int has_parts(void (*)(fattni_fwd_split_args)) { return 1; }
static int has_parts(void (*)(fattni_attention_args)) { return 0; }
static void call_kernel(void (*kernel)(fattni_fwd_split_args)) { kernel(split_args); }
static void call_kernel(void (*kernel)(fattni_attention_args)) { kernel(split_args.a); }
static void run_kernel(void) { call_kernel(K_NAME); }
static void run_adder(void) { adding::add_parts(split_args); }

/* CTAs run in another order than that of their numbers. least_part 0: keys are not split. Gives the most parts. */
static int run_forward(const fattni_attention_args *a, int least_part) {
    const int blocks = (a->Sq + K_BM - 1) / K_BM, keys = fattni_fwd_most_keys(a, a->Sk, K_BM, K_BN);
    memset(&split_args, 0, sizeof split_args);
    split_args.a = *a, split_args.parts = 1, split_args.least_part = least_part;
    split_args.BM = K_BM, split_args.BN = K_BN;
    split_args.a.at_once = least_part == 0 ? 2 : 0;
    std::vector<part_type> results;
    if (least_part > 0) {
        const int ragged = a->cu_seqlens_q.p || a->seqlens_q.p || a->seqlens_k.p;
        split_args.parts = fattni_fwd_most_parts(keys, blocks * a->Hq, least_part, K_BN, ragged);
        split_args.rows = min(a->Sq, K_BM), split_args.width = (a->Dv + 7) / 8 * 8;
        split_args.step = (split_args.rows * (split_args.width + 2) + 7) / 8 * 8;
        results.assign((size_t)(a->B * split_args.parts * a->Hq * blocks * split_args.step), (part_type)NAN);
        split_args.results = results.data();
    }
    std::vector<int> order((size_t)(a->B * split_args.parts * a->Hq * blocks));
    for (size_t n = 0; n < order.size(); ++n) order[n] = (int)n;
    if (least_part > 0) std::shuffle(order.begin(), order.end(), std::minstd_rand(7));
    for (int n : order) machine_run(n, 1, 32 * K_WARPS, (unsigned)n, run_kernel);
    for (int n = 0; n < (a->Sq + 3) / 4 * a->Hq * a->B && least_part > 0; ++n)
        machine_run(n, 1, 32 * 4, (unsigned)n, run_adder);
    return split_args.parts;
}

#endif
