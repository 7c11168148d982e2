/* JSON lines, progress lines, plots, folders: the program's output, and detection of failed writes. */
#define _XOPEN_SOURCE 700 /* mkdtemp */
#include <criterion/criterion.h>
#include <criterion/redirect.h>

#include "cli/base/cli.h"
#include "cli/output/json.h"
#include "cli/output/plot.h"
#include "cli/output/progress.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A folder that this test's process removes again with what it made there. */
static char folder[64];
static void make_folder(void) {
    strcpy(folder, "/tmp/fattn_output_XXXXXX");
    cr_assert_not_null(mkdtemp(folder));
}

static const char *in_folder(const char *name) {
    static char path[160];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void remove_folder(void) {
    static const char *const names[] = {"log", "a/b/p.svg", "a/b", "a", "p.svg"};
    for (size_t i = 0; i < sizeof names / sizeof *names; ++i) remove(in_folder(names[i]));
    cr_assert_eq(rmdir(folder), 0);
}

static size_t read_file(const char *path, char *text, size_t size) {
    FILE *f = fopen(path, "r");
    cr_assert_not_null(f);
    const size_t n = fread(text, 1, size - 1, f);
    text[n] = 0;
    fclose(f);
    return n;
}

Test(json, lines, .init = make_folder, .fini = remove_folder) {
    json j;
    cr_assert(json_open(&j, in_folder("log"), false));
    json_begin(&j);
    json_text(&j, "text", "a \"quoted\" \\ line\n");
    json_int(&j, "int", -5);
    json_real(&j, "real", 0.1);
    json_real(&j, "third", 1.0 / 3);
    json_real(&j, "nan", NAN);
    json_bool(&j, "bool", true);
    cr_assert(json_end(&j));
    char text[512];
    read_file(in_folder("log"), text, sizeof text); /* flushed before it is closed */
    cr_assert_str_eq(text, "{\"text\": \"a \\\"quoted\\\" \\\\ line\\u000a\", \"int\": -5, "
                           "\"real\": 0.1, \"third\": 0.3333333333333333, \"nan\": null, "
                           "\"bool\": true}\n");
    cr_assert(json_close(&j));

    cr_assert(json_open(&j, in_folder("log"), true));
    json_begin(&j);
    cr_assert(json_end(&j));
    cr_assert(json_close(&j));
    read_file(in_folder("log"), text, sizeof text);
    cr_assert(strstr(text, "}\n{}\n"), "appended");
}

/* A log that is not appended to replaces the old one with its first line. */
Test(json, keeps_an_existing_file_until_its_first_line, .init = make_folder, .fini = remove_folder) {
    json j;
    char text[64];
    for (int lines = 0; lines <= 2; ++lines) {
        output o;
        cr_assert(output_open(&o, in_folder("log"), OUTPUT_LATER));
        output_restart(&o);
        fputs("a longer line than those that replace it\n", o.file);
        cr_assert(output_close(&o));
        cr_assert(json_open(&j, in_folder("log"), false));
        for (int i = 0; i < lines; ++i) {
            json_begin(&j);
            cr_assert(json_end(&j));
        }
        cr_assert(json_close(&j));
        read_file(in_folder("log"), text, sizeof text);
        cr_assert_str_eq(text, lines == 0   ? "a longer line than those that replace it\n"
                               : lines == 1 ? "{}\n"
                                            : "{}\n{}\n");
    }
}

/* Names of files are bytes; a log is UTF-8. */
Test(json, invalid_utf8_is_replaced, .init = make_folder, .fini = remove_folder) {
    static const char *const cases[][2] = {
        {"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"},
        {"caf\xe9", "caf\\ufffd"},
        {"\xc3", "\\ufffd"},
        {"\xc0\xaf", "\\ufffd\\ufffd"},            /* longer than needed */
        {"\xed\xa0\x80", "\\ufffd\\ufffd\\ufffd"}, /* a surrogate */
        {"\xf4\x90\x80\x80", "\\ufffd\\ufffd\\ufffd\\ufffd"},
        {"\xff\x7f", "\\ufffd\x7f"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
        json j;
        char text[256], want[256];
        cr_assert(json_open(&j, in_folder("log"), false));
        json_begin(&j);
        json_text(&j, "t", cases[i][0]);
        cr_assert(json_end(&j) && json_close(&j));
        read_file(in_folder("log"), text, sizeof text);
        snprintf(want, sizeof want, "{\"t\": \"%s\"}\n", cases[i][1]);
        cr_assert_str_eq(text, want);
    }
}

/* An existing file is kept until something is written; a new file that stays empty is removed. */
Test(output, keeps_an_existing_file_until_it_restarts, .init = make_folder, .fini = remove_folder) {
    output o;
    char text[64];
    cr_assert(output_open(&o, in_folder("log"), OUTPUT_LATER));
    cr_assert(output_close(&o) && output_close(&o));
    cr_assert_neq(access(in_folder("log"), F_OK), 0, "nothing was written");
    cr_assert(output_open(&o, in_folder("log"), OUTPUT_LATER));
    fputs("a longer one", o.file);
    cr_assert(output_close(&o));
    cr_assert(output_open(&o, in_folder("log"), OUTPUT_LATER));
    cr_assert(output_close(&o));
    read_file(in_folder("log"), text, sizeof text);
    cr_assert_str_eq(text, "a longer one");
    cr_assert(output_open(&o, in_folder("log"), OUTPUT_LATER));
    output_restart(&o);
    fputs("short", o.file);
    cr_assert(output_close(&o));
    read_file(in_folder("log"), text, sizeof text);
    cr_assert_str_eq(text, "short");
}

Test(output, dash_is_standard_output, .init = cr_redirect_stdout) {
    cr_redirect_stderr();
    output o;
    cr_assert(output_open(&o, "-", OUTPUT_LATER));
    printf("for people\n");
    output_restart(&o);
    fputs("for programs\n", o.file);
    cr_assert(output_close(&o));
    fflush(stdout);
    fflush(stderr);
    char text[256] = "";
    fread(text, 1, sizeof text - 1, cr_get_redirected_stdout());
    cr_assert_str_eq(text, "for programs\n");
    memset(text, 0, sizeof text);
    fread(text, 1, sizeof text - 1, cr_get_redirected_stderr());
    cr_assert_str_eq(text, "for people\n");
    cr_assert_neq(access("-", F_OK), 0);
}

Test(output, two_are_two_files, .init = make_folder, .fini = remove_folder) {
    cr_redirect_stderr();
    output o;
    char path[160], longer[200];
    strcpy(path, in_folder("log"));
    snprintf(longer, sizeof longer, "%s/./log", folder);
    cr_assert(output_differ(NULL, NULL) && output_differ("-", NULL) && output_differ(NULL, path));
    cr_assert(output_differ(path, "-") && output_differ(path, in_folder("p.svg")));
    cr_assert(output_differ("/dev/null", "/dev/stdout") && output_differ("/dev/null", "/dev/null"));
    cr_assert_not(output_differ("-", "-"));
    cr_assert_not(output_differ(path, path));
    cr_assert_not(output_differ(path, longer), "of one file that is not there yet");
    cr_assert_neq(access(path, F_OK), 0, "nor is it made");
    cr_assert(output_open(&o, path, OUTPUT_LATER));
    cr_assert_not(output_differ(path, longer), "of one file");
    named_output to = {"plot", NULL};
    cr_assert(output_spares(&to, path));
    to.path = longer;
    cr_assert(output_spares(&to, NULL) && output_spares(&to, in_folder("p.svg")));
    cr_assert_not(output_spares(&to, path));
    cr_assert(output_close(&o));
}

Test(json, no_path_is_no_log) {
    json j;
    cr_assert(json_open(&j, NULL, false));
    json_begin(&j);
    json_text(&j, "a", "b");
    cr_assert(json_end(&j));
    cr_assert(json_close(&j));
}

Test(json, full_disk_is_an_error, .init = cr_redirect_stderr) {
    json j;
    cr_assert(json_open(&j, "/dev/full", false));
    json_begin(&j);
    json_int(&j, "a", 1);
    cr_assert_not(json_end(&j));
    cr_assert_not(json_close(&j));
    fflush(stderr);
    char text[256] = "";
    cr_assert_gt(fread(text, 1, sizeof text - 1, cr_get_redirected_stderr()), 0);
    cr_assert(strstr(text, "cannot write /dev/full: No space left"), "%s", text);
}

Test(json, unwritable_path_is_an_error, .init = cr_redirect_stderr) {
    json j;
    cr_assert_not(json_open(&j, "/proc/none/log", false));
    fflush(stderr);
    char text[256] = "";
    cr_assert_gt(fread(text, 1, sizeof text - 1, cr_get_redirected_stderr()), 0);
    cr_assert(strstr(text, "/proc/none/log"), "%s", text);
}

Test(progress, plain_lines_without_a_terminal) {
    FILE *f = tmpfile();
    progress p;
    progress_begin(&p, f, "step", 0, 3);
    for (int step = 1; step <= 3; ++step) progress_update(&p, step, "loss %.1f", 4.0 - step);
    progress_end(&p);
    char text[512] = "";
    rewind(f);
    cr_assert_gt(fread(text, 1, sizeof text - 1, f), 0);
    fclose(f);
    /* The first and the last; between them less than the interval has passed. */
    cr_assert(strstr(text, "step 1/3 loss 3.0 eta "), "%s", text);
    cr_assert_null(strstr(text, "step 2/3"), "%s", text);
    cr_assert(strstr(text, "step 3/3 loss 1.0 time 0:00\n"), "%s", text);
    cr_assert_null(strchr(text, '\r'), "%s", text);
}

Test(progress, texts) {
    char b[32];
    cr_assert_str_eq(text_of_count(950, b), "950");
    cr_assert_str_eq(text_of_count(17234, b), "17.2k");
    cr_assert_str_eq(text_of_count(2.5e6, b), "2.5M");
    cr_assert_str_eq(text_of_bytes(0, b), "0 B");
    cr_assert_str_eq(text_of_bytes(999, b), "999 B");
    cr_assert_str_eq(text_of_bytes(1536, b), "1.50 KiB");
    cr_assert_str_eq(text_of_bytes(41.04 * 1048576, b), "41.0 MiB");
    cr_assert_str_eq(text_of_bytes(300e9, b), "279 GiB");
    cr_assert_str_eq(text_of_seconds(0.2, b), "0:00");
    cr_assert_str_eq(text_of_seconds(58.6, b), "0:59");
    cr_assert_str_eq(text_of_seconds(3723, b), "1:02:03");
}

static const double xs[] = {512, 1024, 2048, 4096}, ys[] = {1e6, 4e6, NAN, 6.4e7};

static plot example(const plot_series *series, const plot_level *level) {
    return (plot){.title = "A < B & C",
                  .x = {"N", PLOT_LOG2, PLOT_NUMBER, 0, 0},
                  .y = {"bytes", PLOT_LOG2, PLOT_BYTES, 0, 0},
                  .series = series,
                  .n_series = 1,
                  .levels = level,
                  .n_levels = 1};
}

static bool write_plot(const plot *p, const char *path) {
    output o;
    return output_open(&o, path, OUTPUT_LATER) && plot_write(p, &o);
}

Test(plot, is_an_svg_file, .init = make_folder, .fini = remove_folder) {
    const plot_series series = {"curve", xs, ys, 4, PLOT_MARKED, 0};
    const plot_level level = {"limit", 2e6};
    const plot p = example(&series, &level);
    cr_assert(write_plot(&p, in_folder("a/b/p.svg")));
    char text[16384];
    read_file(in_folder("a/b/p.svg"), text, sizeof text);
    cr_assert_eq(strncmp(text, "<svg ", 5), 0);
    cr_assert(strstr(text, "A &lt; B &amp; C"));
    cr_assert(strstr(text, ">512<") && strstr(text, ">4096<"), "ticks");
    cr_assert(strstr(text, ">1 MiB<") && strstr(text, ">64 MiB<"), "ticks in binary units");
    cr_assert(strstr(text, ">limit<") && strstr(text, ">curve<"));
    cr_assert_null(strstr(text, "nan"), "a gap, not a coordinate");
    int marks = 0, moves = 0;
    for (const char *c = text; (c = strstr(c, "<circle")); ++c) ++marks;
    cr_assert_eq(marks, 3 + 1, "three points and the legend's, not %d", marks);
    const char *path = strstr(text, "class=\"curve c0\" d=\"M");
    cr_assert_not_null(path);
    for (path += strlen("class=\"curve c0\" d=\""); *path != '"'; ++path) moves += *path == 'M';
    cr_assert_eq(moves, 2, "the gap splits the curve");
}

Test(plot, without_points_the_file_is_valid, .init = make_folder, .fini = remove_folder) {
    const plot_series series = {"curve", xs, ys, 0, PLOT_LINE, 0};
    plot p = example(&series, NULL);
    p.n_levels = 0;
    cr_assert(write_plot(&p, in_folder("p.svg")));
    char text[16384];
    read_file(in_folder("p.svg"), text, sizeof text);
    cr_assert_null(strstr(text, "nan"));
    cr_assert_null(strstr(text, "inf"));
    cr_assert(strstr(text, "</svg>"));
}

Test(plot, full_disk_is_an_error, .init = cr_redirect_stderr) {
    const plot_series series = {"curve", xs, ys, 4, PLOT_LINE, 0};
    const plot_level level = {"limit", 2e6};
    const plot p = example(&series, &level);
    cr_assert_not(write_plot(&p, "/dev/full"));
    fflush(stderr);
    char text[256] = "";
    cr_assert_gt(fread(text, 1, sizeof text - 1, cr_get_redirected_stderr()), 0);
    cr_assert(strstr(text, "cannot write /dev/full"), "%s", text);
}
