#include "json.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

bool json_open(json *j, const char *path, bool append) {
    *j = (json){0};
    return output_open(&j->to, path, append ? OUTPUT_APPEND : OUTPUT_REPLACE);
}

static void check(json *j, bool written) {
    if (!written && !j->to.error) j->to.error = errno ? errno : EIO;
}

static void put(json *j, const char *text) {
    if (j->to.file) check(j, fputs(text, j->to.file) >= 0);
}

/* Bytes of the UTF-8 character that begins at c; 0: none does. */
static int character(const unsigned char *c) {
    const int n = c[0] < 0x80   ? 1
                  : c[0] < 0xc2 ? 0
                  : c[0] < 0xe0 ? 2
                  : c[0] < 0xf0 ? 3
                  : c[0] < 0xf5 ? 4
                                : 0;
    for (int i = 1; i < n; ++i)
        if ((c[i] & 0xc0) != 0x80) return 0; /* the end is 0, too */
    const bool longer = (c[0] == 0xe0 && c[1] < 0xa0) || (c[0] == 0xf0 && c[1] < 0x90);
    const bool beyond = (c[0] == 0xed && c[1] >= 0xa0) || (c[0] == 0xf4 && c[1] >= 0x90);
    return longer || beyond ? 0 : n;
}

static void put_string(json *j, const char *text) {
    put(j, "\"");
    for (const unsigned char *c = (const unsigned char *)text; j->to.file && *c;) {
        char escaped[8] = "\\ufffd";
        const int n = character(c);
        if (*c == '"' || *c == '\\')
            snprintf(escaped, sizeof escaped, "\\%c", *c);
        else if (*c < 0x20)
            snprintf(escaped, sizeof escaped, "\\u%04x", *c);
        else if (n > 0)
            snprintf(escaped, sizeof escaped, "%.*s", n, (const char *)c);
        put(j, escaped);
        c += n > 0 ? n : 1;
    }
    put(j, "\"");
}

static void put_key(json *j, const char *key) {
    if (!j->first) put(j, ", ");
    j->first = false;
    put_string(j, key);
    put(j, ": ");
}

void json_begin(json *j) {
    j->first = true;
    put(j, "{");
}

void json_text(json *j, const char *key, const char *value) {
    put_key(j, key);
    put_string(j, value);
}

void json_int(json *j, const char *key, int64_t value) {
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)value);
    put_key(j, key);
    put(j, text);
}

void json_real(json *j, const char *key, double value) {
    char text[40] = "null";
    for (int digits = 6; isfinite(value) && digits <= 17; ++digits) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtod(text, NULL) == value) break;
    }
    put_key(j, key);
    put(j, text);
}

void json_bool(json *j, const char *key, bool value) {
    put_key(j, key);
    put(j, value ? "true" : "false");
}

bool json_end(json *j) {
    put(j, "}\n");
    if (j->to.file) check(j, fflush(j->to.file) == 0);
    return j->to.error == 0;
}

bool json_failed(const json *j) { return j->to.error != 0; }

bool json_close(json *j) { return output_close(&j->to); }
