/* Philox4x32 with ten and with seven rounds against published vectors and the paper; the dropout mask against its
   specification. */
#include "core/tensor/philox.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Random123, tests/kat_vectors, philox4x32-10 and -7: counter, key, results. */
Test(philox, published_vectors) {
    static const struct {
        uint32_t counter[4], key[2], ten[4], seven[4];
    } vectors[] = {{{0, 0, 0, 0},
                    {0, 0},
                    {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
                    {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}},
                   {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
                    {0xffffffff, 0xffffffff},
                    {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
                    {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}},
                   {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
                    {0xa4093822, 0x299f31d0},
                    {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1},
                    {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}}};
    for (int n = 0; n < 3; ++n) {
        fattni_block counter;
        memcpy(counter.w, vectors[n].counter, sizeof counter.w);
        const uint64_t seed = (uint64_t)vectors[n].key[1] << 32 | vectors[n].key[0];
        const fattni_block ten = fattni_philox(seed, counter), seven = fattni_mask_philox(seed, counter);
        for (int i = 0; i < 4; ++i) {
            cr_assert_eq(ten.w[i], vectors[n].ten[i], "%d, word %d", n, i);
            cr_assert_eq(seven.w[i], vectors[n].seven[i], "%d, word %d", n, i);
        }
    }
}

/* Salmon, Moraes, Dror, Shaw 2011, section 3.3, written out. */
static fattni_block philox_by_hand(int rounds, uint64_t seed, fattni_block c) {
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < rounds; ++round) {
        const uint64_t left = (uint64_t)0xD2511F53 * c.w[0], right = (uint64_t)0xCD9E8D57 * c.w[2];
        const fattni_block next = {{(uint32_t)(right >> 32) ^ c.w[1] ^ key0, (uint32_t)right,
                                    (uint32_t)(left >> 32) ^ c.w[3] ^ key1, (uint32_t)left}};
        c = next;
        key0 += 0x9E3779B9;
        key1 += 0xBB67AE85;
    }
    return c;
}

Test(philox, rounds_of_the_paper) {
    fattni_block c = {{1, 2, 3, 4}};
    uint64_t seed = 5;
    for (int n = 0; n < 10000; ++n) {
        const fattni_block want = philox_by_hand(10, seed, c), got = fattni_philox(seed, c);
        cr_assert_arr_eq(got.w, want.w, sizeof got.w, "block %d", n);
        const fattni_block mask = philox_by_hand(7, seed, c), mask_got = fattni_mask_philox(seed, c);
        cr_assert_arr_eq(mask_got.w, mask.w, sizeof mask.w, "block %d of a mask", n);
        seed = (uint64_t)got.w[0] << 32 | got.w[1]; /* wander through the whole space */
        c = got;
        c.w[3] ^= (uint32_t)n;
    }
}

/* The words and the lane by the public specification, implemented separately. */
static uint32_t draw_by_hand(uint64_t seed, uint32_t stream, uint32_t step, uint32_t plane, uint64_t i, uint64_t j) {
    const fattni_block counter = {
        {(uint32_t)(j / 16 * 4 + j % 8 / 2), (uint32_t)(i / 16 * 8 + i % 8), plane, stream + 2654435761u * step}};
    const uint64_t lane = j / 8 % 2 * 4 + i / 8 % 2 * 2 + j % 2;
    const fattni_block r = philox_by_hand(7, seed, counter);
    return lane % 2 ? r.w[lane / 2] >> 16 : r.w[lane / 2] % 65536;
}

/* Whether an element is kept, from the lower 15 bits of its draw, at drop rates up to 1/2 and above. */
static bool kept_by_hand(uint32_t draw, int T) {
    const int bits = (int)(draw % 32768);
    return T > 16384 ? bits < 32768 - T : bits >= T;
}

Test(philox, the_keep_bit_is_a_function_of_the_element) {
    static const int64_t at[] = {0, 1, 7, 8, 9, 15, 16, 17, 1023, 1024, 123456789, 2147483646};
    enum { COUNT = sizeof at / sizeof *at };
    for (int a = 0; a < COUNT; ++a)
        for (int b = 0; b < COUNT; ++b)
            for (uint32_t step = 0; step < 3; ++step) {
                const uint64_t seed = 0x123456789abcdef0u + (uint64_t)a;
                const uint32_t draw = draw_by_hand(seed, 7, step, 11, (uint64_t)at[a], (uint64_t)at[b]);
                const int bits = (int)(draw % 32768);
                const int rates[] = {1, bits, bits + 1, 16384, 16385, 32767 - bits, 32768 - bits, 32767};
                for (int n = 0; n < 8; ++n) {
                    if (rates[n] < 1 || rates[n] > 32767) continue;
                    cr_assert_eq(fattni_keep(seed, 7, step, 11, at[a], at[b], (uint32_t)rates[n]) != 0,
                                 kept_by_hand(draw, rates[n]), "bits %d, T %d", bits, rates[n]);
                }
            }
}

/* Of all draws 32768 - T in 32768 are kept. */
Test(philox, a_rate_is_exact) {
    static const uint32_t rates[] = {1, 2, 3277, 16383, 16384, 16385, 29491, 32766, 32767};
    for (size_t n = 0; n < sizeof rates / sizeof *rates; ++n) {
        uint32_t kept = 0;
        for (uint32_t draw = 0; draw < 65536; ++draw) kept += (uint32_t)fattni_keeps(draw, rates[n]);
        cr_assert_eq(kept, 2 * (32768 - rates[n]), "T %u", rates[n]);
    }
}

/* A 16 x 16 patch: 32 blocks of 8 lanes, no two elements on one draw; one block serves rows
   {r, r+8} by columns {c, c+1, c+8, c+9}, c even. */
Test(philox, a_patch_uses_every_lane_once) {
    int used[32][8] = {{0}};
    for (int64_t i = 0; i < 16; ++i)
        for (int64_t j = 0; j < 16; ++j) {
            const fattni_block c = fattni_dropout_counter(0, 0, 0, i + 32, j + 48);
            const fattni_block corner = fattni_dropout_counter(0, 0, 0, 32 + i % 8, 48 + j % 8 / 2 * 2);
            cr_assert_arr_eq(c.w, corner.w, sizeof c.w);
            const uint32_t across = c.w[0] - 48 / 16 * 4, down = c.w[1] - 32 / 16 * 8;
            cr_assert(across < 4 && down < 8);
            used[down * 4 + across][fattni_dropout_lane(i, j)] += 1;
        }
    for (int block = 0; block < 32; ++block)
        for (int lane = 0; lane < 8; ++lane) cr_assert_eq(used[block][lane], 1);
}

Test(philox, patches_planes_streams_and_steps_do_not_share_blocks) {
    const fattni_block a = fattni_dropout_counter(3, 5, 1, 100, 200);
    const fattni_block others[] = {fattni_dropout_counter(3, 5, 1, 116, 200), fattni_dropout_counter(3, 5, 1, 100, 216),
                                   fattni_dropout_counter(3, 5, 2, 100, 200), fattni_dropout_counter(4, 5, 1, 100, 200),
                                   fattni_dropout_counter(3, 6, 1, 100, 200)};
    for (int n = 0; n < 5; ++n) cr_assert_arr_neq(a.w, others[n].w, sizeof a.w, "%d", n);
}

/* Of n independent draws k are kept: |k - n(1-p)| <= 5 sqrt(n p (1-p)); neighbours in every
   direction are uncorrelated within 5/sqrt(n), too. */
Test(philox, the_keep_rate_is_right_and_neighbours_are_independent) {
    enum { SIDE = 1024, COUNT = SIDE * SIDE };
    uint8_t *keep = malloc(COUNT);
    static const uint32_t thresholds[] = {1, 328, 3277, 16384, 32767};
    for (size_t n = 0; n < sizeof thresholds / sizeof *thresholds; ++n) {
        const double p = thresholds[n] / 32768.0;
        double kept = 0;
        for (int64_t e = 0; e < COUNT; ++e) {
            keep[e] = (uint8_t)fattni_keep(99, 0, 0, 0, e / SIDE, e % SIDE, thresholds[n]);
            kept += keep[e];
        }
        cr_assert_leq(fabs(kept - COUNT * (1 - p)), 5 * sqrt(COUNT * p * (1 - p)), "p %g", p);
        if (thresholds[n] != 16384) continue;
        static const int64_t steps[] = {1, 2, 8, 16, SIDE, 8 * SIDE, 16 * SIDE, SIDE + 1};
        for (size_t s = 0; s < sizeof steps / sizeof *steps; ++s) {
            double sum = 0;
            for (int64_t e = 0; e + steps[s] < COUNT; ++e) sum += (2 * keep[e] - 1) * (2 * keep[e + steps[s]] - 1);
            cr_assert_leq(fabs(sum), 5 * sqrt(COUNT), "step %lld", (long long)steps[s]);
        }
    }
    free(keep);
}
