/* 200 random configurations of the CPU's tiles against the reference (fewer under sanitizers); tests/slow has 2000
   others. */
#include "thinned.h"
#include "tiles.h"

#include <criterion/criterion.h>

Test(tiles_random, first_200) { tiles_check_random(0, 200 / THINNED(4)); }
