/* Atomically written files: overwriting, giving up, a full disk. */
#define _XOPEN_SOURCE 700 /* mkdtemp, symlink, setrlimit */
#include <criterion/criterion.h>
#include <criterion/redirect.h>

#include "cli/train/durable.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
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
    durable_stream stream;
    unsigned char *const bytes = malloc(size);
    memset(bytes, value, size);
    snprintf(inner, sizeof inner, "%s/inner", folder);
    const bool ok = durable_begin(&stream, inner, "file") && durable_append(&stream, bytes, size / 3) &&
                    durable_append(&stream, bytes, size - size / 3);
    free(bytes);
    return durable_end(&stream, ok) && ok;
}

static void assert_holds(int value, size_t size) {
    unsigned char bytes[2 * SIZE];
    FILE *const f = fopen(path, "rb");
    cr_assert_not_null(f);
    const size_t n = fread(bytes, 1, sizeof bytes, f);
    fclose(f);
    cr_assert_eq(n, size);
    for (size_t i = 0; i < n; ++i) cr_assert_eq(bytes[i], value);
}

Test(durable, comes_back_and_is_replaced) {
    cr_assert(put(1, SIZE));
    assert_holds(1, SIZE);
    cr_assert(put(2, 10));
    assert_holds(2, 10);
}

/* What was begun and is not wanted leaves the file before, and nothing else. */
Test(durable, given_up) {
    char inner[4096], command[4300];
    durable_stream stream;
    cr_assert(put(3, SIZE));
    snprintf(inner, sizeof inner, "%s/inner", folder);
    cr_assert(durable_begin(&stream, inner, "file") && durable_append(&stream, inner, 10));
    cr_assert(durable_end(&stream, false));
    assert_holds(3, SIZE);
    snprintf(command, sizeof command, "test \"$(ls -A '%s')\" = file", inner);
    cr_assert_eq(system(command), 0);
}

/* A limit on file sizes acts like a full disk and needs no root. */
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
    char command[4300];
    snprintf(command, sizeof command, "test \"$(ls -A '%s/inner')\" = file", folder);
    cr_assert_eq(system(command), 0, "nothing is left behind");
}

/* Links exist with the names that a temporary file may get: they and their target are kept. */
Test(durable, existing_names_are_not_overwritten) {
    char name[4200], victim[4200], byte;
    cr_assert(put(6, SIZE));
    snprintf(victim, sizeof victim, "%s/victim", folder);
    FILE *f = fopen(victim, "wb");
    cr_assert(f && fputc('v', f) == 'v' && fclose(f) == 0);
    for (int n = 0; n < 3; ++n) {
        snprintf(name, sizeof name, "%s/inner/unfinished-%ld-%d.tmp", folder, (long)getpid(), n);
        cr_assert_eq(symlink(victim, name), 0);
    }
    cr_assert(put(7, SIZE));
    assert_holds(7, SIZE);
    f = fopen(victim, "rb");
    cr_assert(f && fread(&byte, 1, 1, f) == 1 && byte == 'v' && fclose(f) == 0);
    cr_assert_eq(readlink(name, &byte, 1), 1, "the link stays");
}

/* ---- the lock ---- */

static char inner[4096];
static void make_inner(void) {
    make_folder();
    snprintf(inner, sizeof inner, "%s/inner", folder);
    cr_redirect_stderr();
}
TestSuite(lock, .init = make_inner, .fini = remove_folder);

/* In another process, which ends without releasing the lock. */
static bool another_can_hold(void) {
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        durable_lock l = {0};
        _exit(durable_hold(&l, inner) ? 0 : 1);
    }
    int status = -1;
    cr_assert_eq(waitpid(child, &status, 0), child);
    return status == 0;
}

Test(lock, one_process_at_a_time_until_it_ends) {
    durable_lock l = {0};
    cr_assert(another_can_hold());
    cr_assert(durable_hold(&l, inner), "the lock of an ended process is free");
    cr_assert(durable_hold(&l, inner), "again");
    cr_assert_not(another_can_hold());
    fflush(stderr);
    char text[512] = "", who[32];
    cr_assert_gt(fread(text, 1, sizeof text - 1, cr_get_redirected_stderr()), 0);
    snprintf(who, sizeof who, "process %ld", (long)getpid());
    cr_assert(strstr(text, who) && strstr(text, inner), "%s", text);
    durable_release(&l);
    durable_release(&l);
    cr_assert_neq(access(l.path, F_OK), 0, "nothing is left behind");
    cr_assert(another_can_hold());
}

/* The folder is removed and created again by another process, which then has the lock. */
Test(lock, a_removed_folder_is_taken_again_unless_another_has_it) {
    durable_lock l = {0}, fresh = {0};
    cr_assert(durable_hold(&l, inner));
    cr_assert_eq(remove(l.path), 0);
    cr_assert_eq(rmdir(inner), 0);
    cr_assert(durable_hold(&l, inner));
    cr_assert_not(another_can_hold());
    cr_assert_eq(remove(l.path), 0);
    int ends[2];
    cr_assert_eq(pipe(ends), 0);
    const pid_t child = fork();
    if (child == 0) {
        const char held = durable_hold(&fresh, inner) ? 'y' : 'n';
        _exit(write(ends[1], &held, 1) == 1 ? pause() : 1);
    }
    char held = 0;
    cr_assert(read(ends[0], &held, 1) == 1 && held == 'y');
    cr_assert_not(durable_hold(&l, inner));
    cr_assert_not(l.held);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    cr_assert(durable_hold(&l, inner));
    durable_release(&l);
}
