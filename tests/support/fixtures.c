#define _POSIX_C_SOURCE 200809L
#include "fixtures.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void fixture_temporary(char path[FIXTURE_PATH]) {
    strcpy(path, "/tmp/fattn_fixture_XXXXXX");
    const int file = mkstemp(path);
    cr_assert(file >= 0, "no temporary file");
    close(file);
}

unsigned char *fixture_bytes(const char *path, size_t *size) {
    FILE *const file = fopen(path, "rb");
    cr_assert_not_null(file, "%s", path);
    fseek(file, 0, SEEK_END);
    *size = (size_t)ftell(file);
    rewind(file);
    unsigned char *const bytes = calloc(*size + 1, 1);
    cr_assert_eq(fread(bytes, 1, *size, file), *size);
    fclose(file);
    return bytes;
}

void fixture_write_bytes(const char *path, const void *bytes, size_t size) {
    FILE *const file = fopen(path, "wb");
    cr_assert_not_null(file, "%s", path);
    cr_assert_eq(fwrite(bytes, 1, size, file), size);
    cr_assert_eq(fclose(file), 0);
}
