/* The integer predicates of masks: ranges against a search over all pairs. */
#include "core/base/internal.h"
#include "core/attention/mask_band.h"

#include <criterion/criterion.h>

static int visible(const fattni_band *m, int64_t i, int64_t j) {
    return i >= 0 && i < m->Sq && j >= 0 && j < m->Sk && m->lo <= j - i && j - i <= m->hi;
}

static void check_blocks(const fattni_band *m) {
    for (int64_t i0 = 0; i0 < m->Sq; ++i0)
        for (int64_t i1 = i0 + 1; i1 <= m->Sq; ++i1) {
            int64_t first = m->Sk, last = -1;
            for (int64_t i = i0; i < i1; ++i)
                for (int64_t j = 0; j < m->Sk; ++j)
                    if (visible(m, i, j)) first = fattni_min(first, j), last = fattni_max(last, j);
            const fattni_range keys = fattni_keys_of(m, i0, i1);
            if (last < 0)
                cr_assert(keys.end <= keys.begin);
            else
                cr_assert(keys.begin == first && keys.end == last + 1);
            cr_assert(keys.begin >= 0 && keys.end <= m->Sk);
            for (int64_t j0 = 0; j0 < m->Sk; ++j0)
                for (int64_t j1 = j0 + 1; j1 <= m->Sk + 2; ++j1) { /* a block may extend past the end */
                    int all = 1;
                    for (int64_t i = i0; i < i1; ++i)
                        for (int64_t j = j0; j < j1; ++j) all = all && visible(m, i, j);
                    cr_assert_eq(fattni_all_visible(m, i0, i1, j0, j1), all);
                }
        }
    for (int64_t j0 = 0; j0 < m->Sk; ++j0)
        for (int64_t j1 = j0 + 1; j1 <= m->Sk; ++j1) {
            int64_t first = m->Sq, last = -1;
            for (int64_t j = j0; j < j1; ++j)
                for (int64_t i = 0; i < m->Sq; ++i)
                    if (visible(m, i, j)) first = fattni_min(first, i), last = fattni_max(last, i);
            const fattni_range rows = fattni_band_rows(m, j0, j1);
            if (last < 0)
                cr_assert(rows.end <= rows.begin);
            else
                cr_assert(rows.begin == first && rows.end == last + 1);
            cr_assert(rows.begin >= 0 && rows.end <= m->Sq);
        }
}

Test(tile, ranges_equal_a_search) {
    static const int64_t sizes[] = {0, 1, 2, 5, 7};
    for (int a = 0; a < 5; ++a)
        for (int b = 0; b < 5; ++b)
            for (int64_t lo = -9; lo <= 9; ++lo)
                for (int64_t hi = lo; hi <= 9; ++hi) {
                    const fattni_band m = {sizes[a], sizes[b], lo == -9 ? -FATTNI_UNBOUNDED : lo,
                                           hi == 9 ? FATTNI_UNBOUNDED : hi};
                    check_blocks(&m);
                    for (int64_t i = 0; i < m.Sq; ++i)
                        for (int64_t j = 0; j < m.Sk + 3; ++j)
                            cr_assert_eq(fattni_visible(&m, i, j), visible(&m, i, j));
                }
}

/* Positions up to 2^31 and unbounded diagonals stay inside 64 bits. */
Test(tile, large_positions) {
    const int64_t far = INT32_MAX;
    const fattni_band open = {far, far, -FATTNI_UNBOUNDED, FATTNI_UNBOUNDED};
    cr_assert(fattni_all_visible(&open, 0, far, 0, far));
    const fattni_band causal = {far, far, -FATTNI_UNBOUNDED, 0};
    cr_assert_eq(fattni_keys_of(&causal, far - 1, far).end, far);
    cr_assert_eq(fattni_band_rows(&causal, far - 1, far).begin, far - 1);
    cr_assert_not(fattni_visible(&causal, far - 2, far - 1));
    const fattni_band unseen = {far, far, far, FATTNI_UNBOUNDED};
    const fattni_range keys = fattni_keys_of(&unseen, 0, far);
    cr_assert(keys.end <= keys.begin);
}
