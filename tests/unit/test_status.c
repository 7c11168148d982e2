/* Status codes, their names and texts, the version. */
#include <criterion/criterion.h>
#include <fattn/fattn.h>

#include <string.h>

Test(status, every_code_has_its_own_name_and_text) {
#define FATTN_X(name, value, text)                                                                                     \
    cr_assert_eq((int)name, value);                                                                                    \
    cr_assert_str_eq(fattn_status_name(name), #name);                                                                  \
    cr_assert_str_eq(fattn_status_text(name), text);
    FATTN_STATUS_MAP(FATTN_X)
#undef FATTN_X
    for (int a = 0; a < FATTN_STATUS_COUNT; ++a)
        for (int b = 0; b < a; ++b)
            cr_assert_str_neq(fattn_status_text((fattn_status)a), fattn_status_text((fattn_status)b));
}

Test(status, unknown_codes_are_named_too) {
    cr_assert_str_eq(fattn_status_name((fattn_status)FATTN_STATUS_COUNT), "FATTN_E_UNKNOWN");
    cr_assert_str_eq(fattn_status_text((fattn_status)-1), "unknown status code");
}

Test(status, the_version_is_the_header_s) {
    cr_assert_eq(fattn_version(), FATTN_VERSION);
    cr_assert_eq(FATTN_VERSION, 100, "0.1.0");
}
