/* The CPU's backward tiles against the oracle: dQ, dK, dV, on every instruction set. */
#include "tiles.h"

#include <criterion/criterion.h>
#include <stdio.h>

enum { WALK = 62 }; /* twice through all shapes */

static void walk(int first, fattn_dtype dtype) {
    char name[32];
    for (int n = first; n < first + WALK; ++n) {
        attention_case c = tiles_case(n, dtype);
        snprintf(name, sizeof name, "walk %d", n);
        c.name = name;
        tiles_check_backward(&c);
    }
}
Test(bwd_tiles, shapes_f64) { walk(0, FATTN_F64); }
Test(bwd_tiles, shapes_f32) { walk(WALK, FATTN_F32); }

Test(bwd_tiles, features) {
    for (int n = 0; n < 3 * attention_feature_count; ++n) {
        static const enum layout layouts[] = {LAYOUT_BHSD, LAYOUT_BSHD, LAYOUT_PITCH};
        attention_case c = attention_features[n / 3];
        c.layout = layouts[n % 3];
        tiles_check_backward(&c);
        c.dtype = FATTN_F32;
        tiles_check_backward(&c);
    }
}

/* Alone and mixed, on sizes that cross tiles. */
static void enlarged(const attention_case *small, int n, fattn_dtype dtype) {
    char name[64];
    attention_case c = tiles_enlarge(small, n);
    snprintf(name, sizeof name, "%s, large %d", small->name, n);
    c.name = name;
    c.dtype = dtype;
    tiles_check_backward(&c);
}

Test(bwd_tiles, large_features_f64) {
    for (int n = 0; n < attention_feature_count; ++n) enlarged(&attention_features[n], n, FATTN_F64);
}
Test(bwd_tiles, large_features_f32) {
    for (int n = 0; n < attention_feature_count; ++n)
        enlarged(&attention_features[n], n + 1, FATTN_F32);
}
Test(bwd_tiles, large_mixes) {
    for (int n = 0; n < 60; ++n) {
        const attention_case c = attention_mix(n);
        enlarged(&c, n, n % 3 ? FATTN_F64 : FATTN_F32);
    }
}

Test(bwd_tiles, slices_of_qkv) {
    static const int64_t D[] = {64, 16, 33};
    for (int n = 0; n < 6; ++n)
        tiles_check_backward(&(attention_case){.name = "slices", .B = 2, .Hq = 3, .Sq = 101, .Sk = 101,
                                              .D = D[n / 2], .dtype = n % 2 ? FATTN_F32 : FATTN_F64,
                                              .layout = LAYOUT_QKV, .flags = FATTN_CAUSAL});
}
