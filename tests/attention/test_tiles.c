/* The CPU's tiles against the reference: O, L and every gradient, in every dtype, on every instruction
   set. */
#include "thinned.h"
#include "tiles.h"

#include <criterion/criterion.h>
#include <stdio.h>

static const fattn_dtype dtypes[4] = {FATTN_F64, FATTN_F32, FATTN_F16, FATTN_BF16};
static const enum layout layouts[4] = {LAYOUT_BHSD, LAYOUT_BSHD, LAYOUT_PITCH, LAYOUT_REVERSED};

/* Once through all shapes, with other head dimensions and masks for each dtype; thinned, each shape for two of them. */
static void walk(int first, fattn_dtype dtype) {
    char name[32];
    for (int n = first + first % THINNED(2); n < first + attention_shape_count; n += THINNED(2)) {
        attention_case c = tiles_case(n, dtype);
        snprintf(name, sizeof name, "walk %d", n);
        c.name = name;
        c.wide = n % 3 == 0;
        tiles_check_backward(&c);
    }
}
Test(tiles, shapes_f64) { walk(0, FATTN_F64); }
Test(tiles, shapes_f32) { walk(31, FATTN_F32); }
Test(tiles, shapes_f16) { walk(62, FATTN_F16); }
Test(tiles, shapes_bf16) { walk(93, FATTN_BF16); }

Test(tiles, each_feature) {
    for (int n = 0; n < 4 * attention_feature_count; n += THINNED(5)) {
        attention_case c = attention_features[n / 4];
        c.dtype = dtypes[n % 4];
        c.layout = layouts[(n + n / 4) % 4];
        c.wide = n / 4 % 2;
        if (n % 3 == 0 && c.bias) c.bias |= BIAS_F32;
        tiles_check_backward(&c);
    }
}

/* On sizes that cross tiles. */
static void large(fattn_dtype dtype, int n, int step) {
    step *= THINNED(2);
    for (int f = n % step; f < attention_feature_count; f += step) {
        char name[64];
        attention_case c = tiles_enlarge(&attention_features[f], f + n);
        snprintf(name, sizeof name, "%s, large", attention_features[f].name);
        c.name = name;
        c.dtype = dtype;
        c.wide = f / 2 % 2;
        tiles_check_backward(&c);
    }
}
Test(tiles, each_large_feature_f64) { large(FATTN_F64, 0, 1); }
Test(tiles, each_large_feature_f32) { large(FATTN_F32, 1, 1); }
Test(tiles, each_large_feature_f16) { large(FATTN_F16, 2, 2); }
Test(tiles, each_large_feature_bf16) { large(FATTN_BF16, 3, 2); }

Test(tiles, slices_of_qkv) {
    static const int64_t D[] = {64, 16, 33};
    for (int n = 0; n < 12; ++n)
        tiles_check_backward(&(attention_case){.name = "slices",
                                               .B = 2,
                                               .Hq = 3,
                                               .Sq = 101,
                                               .Sk = 101,
                                               .D = D[n / 4],
                                               .dtype = dtypes[n % 4],
                                               .layout = LAYOUT_QKV,
                                               .flags = FATTN_CAUSAL});
}
