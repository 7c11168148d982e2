#include "cli/output/json.h"

#include "cli/base/cli.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

bool json_open(json *j, const char *path, bool append) {
    *j = (json){.replaces = !append};
    return output_open(&j->to, path, append ? OUTPUT_APPEND : OUTPUT_LATER);
}

/* What follows a key of a line; NULL: it has none. ", " and the key's quotes cannot occur inside a string, where quotes
   are escaped. */
static const char *value_of(const char *line, const char *key) {
    const char *const at = strstr(line, key);
    return at ? at + strlen(key) : NULL;
}

/* Bytes of the log up to the first line that has a later step or is incomplete. own: there are losses of steps up to
   there, and all of them are these. */
static int64_t length_until(FILE *file, int64_t step, const double *losses, bool *own) {
    char *line = NULL;
    size_t capacity = 0;
    int64_t length = 0, same = 0, others = 0;
    for (ssize_t n; (n = getline(&line, &capacity, file)) > 0 && line[n - 1] == '\n'; length += n) {
        const char *const number = value_of(line, ", \"step\": "), *const loss = value_of(line, ", \"loss\": ");
        const int64_t at = number ? strtoll(number, NULL, 10) : 0;
        if (at > step) break;
        if (loss && at > 0 && strtod(loss, NULL) == losses[at - 1])
            same += 1;
        else if (loss)
            others += 1;
    }
    free(line);
    *own = same > 0 && others == 0;
    return length;
}

bool json_resume(json *j, const char *path, int64_t step, const double *losses, json_cut cut) {
    struct stat status;
    bool own;
    if (!json_open(j, path, true)) return false;
    if (!j->to.file || output_is_stdout(j->to.path)) return true; /* what standard output holds is not read */
    if (fstat(fileno(j->to.file), &status) != 0 || !S_ISREG(status.st_mode)) return true;
    FILE *const old = input_open(path);
    if (!old) return false;
    const int64_t length = length_until(old, step, losses, &own);
    const bool whole = length >= status.st_size, may_cut = cut == JSON_CUT_ANY || (cut == JSON_CUT_OWN && own);
    fclose(old);
    if (!whole && !may_cut)
        cli_fail(CLI_FAILURE,
                 "%s has lines after step %lld that are not known to be this run's: give another file with --json, or "
                 "cut it there with --overwrite",
                 path, (long long)step);
    if (!whole && may_cut && ftruncate(fileno(j->to.file), length) != 0) j->to.error = errno;
    return whole || (may_cut && !j->to.error);
}

static void check(json *j, bool written) {
    if (!written && !j->to.error) j->to.error = errno ? errno : EIO;
}

static void put(json *j, const char *text) {
    if (j->to.file) check(j, fputs(text, j->to.file) >= 0);
}

/* Bytes of the UTF-8 character that begins at c; 0: it is not UTF-8. */
static int character(const unsigned char *c) {
    const int n = c[0] < 0x80 ? 1 : c[0] < 0xc2 ? 0 : c[0] < 0xe0 ? 2 : c[0] < 0xf0 ? 3 : c[0] < 0xf5 ? 4 : 0;
    for (int i = 1; i < n; ++i)
        if ((c[i] & 0xc0) != 0x80) return 0; /* also at the terminating 0 */
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
    if (j->replaces && j->to.file) output_restart(&j->to);
    j->replaces = false;
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
