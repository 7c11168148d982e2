/* Files that are whole or absent: writing over, damage, a full disk. */
#define _XOPEN_SOURCE 700 /* mkdtemp, symlink, setrlimit */
#include <criterion/criterion.h>
#include <criterion/redirect.h>

#include "durable.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

enum { SIZE = 1000 };
static char folder[] = "/tmp/fattn-durable-XXXXXX";
static char path[4096];

static void make_folder(void) {
    cr_assert_not_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/inner/file", folder);
}
static void remove_folder(void) {
    char command[4200];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    cr_assert_eq(system(command), 0);
}
TestSuite(durable, .init = make_folder, .fini = remove_folder);

static bool put(int value, size_t size) {
    char inner[4096];
    unsigned char *bytes = malloc(size + DURABLE_SEAL);
    memset(bytes, value, size + DURABLE_SEAL);
    snprintf(inner, sizeof inner, "%s/inner", folder);
    const bool ok = durable_write(inner, "file", bytes, size + DURABLE_SEAL);
    free(bytes);
    return ok;
}

static void assert_holds(int value, size_t size) {
    size_t n;
    unsigned char *bytes = durable_read(path, &n);
    cr_assert_not_null(bytes);
    cr_assert_eq(n, size);
    for (size_t i = 0; i < n; ++i)
        cr_assert_eq(bytes[i], value);
    free(bytes);
}

Test(durable, comes_back_and_is_replaced) {
    cr_assert(put(1, SIZE));
    assert_holds(1, SIZE);
    cr_assert(put(2, 10));
    assert_holds(2, 10);
}

Test(durable, every_damaged_byte_and_every_lost_end_is_seen) {
    cr_redirect_stderr(); /* 230 sentences */
    cr_assert(put(3, 100));
    unsigned char bytes[100 + DURABLE_SEAL];
    FILE *f = fopen(path, "rb");
    cr_assert(f && fread(bytes, 1, sizeof bytes, f) == sizeof bytes && fclose(f) == 0);
    size_t n;
    for (size_t i = 0; i < 2 * sizeof bytes; ++i) {
        const bool cut = i >= sizeof bytes;
        const size_t at = i % sizeof bytes;
        if (!cut) bytes[at] ^= 0x10;
        f = fopen(path, "wb");
        cr_assert(f && fwrite(bytes, 1, cut ? at : sizeof bytes, f) == (cut ? at : sizeof bytes));
        cr_assert_eq(fclose(f), 0);
        if (!cut) bytes[at] ^= 0x10;
        cr_assert_null(durable_read(path, &n), "%s byte %zu", cut ? "cut at" : "damaged", at);
    }
    cr_assert_null(durable_read(folder, &n), "a folder");
    cr_assert_null(durable_read("/dev/zero", &n), "a device");
    cr_assert_null(durable_read("/nonexistent", &n));
}

/* A limit on file sizes is a full disk that needs no root. */
Test(durable, a_full_disk_keeps_the_file_before) {
    cr_assert(put(4, SIZE));
    signal(SIGXFSZ, SIG_IGN);
    struct rlimit limit;
    getrlimit(RLIMIT_FSIZE, &limit);
    const rlim_t before = limit.rlim_cur;
    limit.rlim_cur = 4096;
    setrlimit(RLIMIT_FSIZE, &limit);
    const bool ok = put(5, 100 * SIZE);
    limit.rlim_cur = before;
    setrlimit(RLIMIT_FSIZE, &limit);
    cr_assert_not(ok);
    assert_holds(4, SIZE);
    char temporary[4200];
    snprintf(temporary, sizeof temporary, "%s/inner/unfinished.tmp", folder);
    cr_assert_neq(access(temporary, F_OK), 0, "nothing is left behind");
}
