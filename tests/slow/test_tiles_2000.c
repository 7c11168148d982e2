/* 2000 random configurations of the CPU's tiles against the reference, and a long sequence. */
#include "tiles.h"

#include <criterion/criterion.h>

Test(tiles_slow, random_2000) { tiles_check_random(200, 2000); }

Test(tiles_slow, of_4224_keys_and_rows) {
    for (int n = 0; n < 3; ++n) {
        const attention_case c = {.name = "4224 x 4224",
                                  .B = 1,
                                  .Hq = 1,
                                  .Sq = 4224,
                                  .Sk = 4224,
                                  .D = 16,
                                  .dtype = (fattn_dtype[]){FATTN_F64, FATTN_F32, FATTN_BF16}[n],
                                  .flags = n == 1 ? FATTN_CAUSAL : 0};
        tiles_check_backward(&c);
    }
}
