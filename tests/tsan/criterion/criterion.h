/* The part of Criterion that the tests use, for the thread sanitizer: Criterion's sandbox maps memory at
   addresses that the sanitizer reserves. Each test runs in its own process: the program calls itself with
   the test's name. */
#ifndef TSAN_CRITERION_H
#define TSAN_CRITERION_H
#pragma GCC system_header

#include <math.h>
#include <stdbool.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

struct tsan_case {
    const char *suite, *name;
    void (*run)(void), (*init)(void), (*fini)(void); /* run NULL: a suite's init and fini */
    double timeout;
    struct tsan_case *next;
};
static struct tsan_case *tsan_cases;

#define TSAN_CASE(suite_, name_, run_, ...)                                                                            \
    __attribute__((constructor)) static void suite_##_##name_##_register(void) {                                       \
        static struct tsan_case one = {.suite = #suite_, .name = #name_, .run = run_, __VA_ARGS__};                    \
        one.next = tsan_cases;                                                                                         \
        tsan_cases = &one;                                                                                             \
    }
#define Test(suite, name, ...)                                                                                         \
    static void suite##_##name(void);                                                                                  \
    TSAN_CASE(suite, name, suite##_##name, __VA_ARGS__)                                                                \
    static void suite##_##name(void)
#define TestSuite(suite, ...) TSAN_CASE(suite, its_suite, NULL, __VA_ARGS__) struct tsan_case

#define TSAN_CHECK(condition, text, ...)                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, text);                                        \
            fprintf(stderr, "" __VA_ARGS__);                                                                           \
            fputc('\n', stderr);                                                                                       \
            _Exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)
#define cr_assert(x, ...) TSAN_CHECK(x, #x, __VA_ARGS__)
#define cr_assert_not(x, ...) TSAN_CHECK(!(x), "not " #x, __VA_ARGS__)
#define cr_assert_fail(...) TSAN_CHECK(0, "never here", __VA_ARGS__)
#define cr_assert_eq(a, b, ...) TSAN_CHECK((a) == (b), #a " == " #b, __VA_ARGS__)
#define cr_assert_neq(a, b, ...) TSAN_CHECK((a) != (b), #a " != " #b, __VA_ARGS__)
#define cr_assert_lt(a, b, ...) TSAN_CHECK((a) < (b), #a " < " #b, __VA_ARGS__)
#define cr_assert_leq(a, b, ...) TSAN_CHECK((a) <= (b), #a " <= " #b, __VA_ARGS__)
#define cr_assert_gt(a, b, ...) TSAN_CHECK((a) > (b), #a " > " #b, __VA_ARGS__)
#define cr_assert_geq(a, b, ...) TSAN_CHECK((a) >= (b), #a " >= " #b, __VA_ARGS__)
#define cr_assert_null(x, ...) TSAN_CHECK((x) == NULL, #x " == NULL", __VA_ARGS__)
#define cr_assert_not_null(x, ...) TSAN_CHECK((x) != NULL, #x " != NULL", __VA_ARGS__)
#define cr_assert_float_eq(a, b, e, ...) TSAN_CHECK(fabs((a) - (b)) <= (e), #a " ~ " #b, __VA_ARGS__)
#define cr_assert_arr_eq(a, b, n, ...) TSAN_CHECK(!memcmp(a, b, n), #a " == " #b, __VA_ARGS__)
#define cr_assert_arr_neq(a, b, n, ...) TSAN_CHECK(memcmp(a, b, n), #a " != " #b, __VA_ARGS__)
#define cr_assert_str_eq(a, b, ...) TSAN_CHECK(!strcmp(a, b), #a " == " #b, __VA_ARGS__)
#define cr_assert_str_neq(a, b, ...) TSAN_CHECK(strcmp(a, b), #a " != " #b, __VA_ARGS__)
#define cr_log_info(...) fprintf(stderr, __VA_ARGS__)
#define cr_skip_test(...) (fprintf(stderr, "skipped: " __VA_ARGS__), _Exit(0))

#ifndef TSAN_NO_MAIN
/* Whether there is such a test. */
static bool tsan_run(const char *suite_name, const char *name) {
    bool found = false;
    for (const struct tsan_case *c = tsan_cases; c; c = c->next) {
        if (!c->run || strcmp(c->suite, suite_name) != 0 || strcmp(c->name, name) != 0) continue;
        const struct tsan_case *suite = tsan_cases;
        while (suite && (suite->run || strcmp(suite->suite, suite_name) != 0)) suite = suite->next;
        if (suite && suite->init) suite->init();
        if (c->init) c->init();
        found = true;
        c->run();
        if (c->fini) c->fini();
        if (suite && suite->fini) suite->fini();
    }
    return found;
}

extern char **environ;

static bool tsan_passes(char *program, const struct tsan_case *test) {
    char *const arguments[] = {program, (char *)test->suite, (char *)test->name, NULL};
    pid_t child;
    int status = 1;
    if (posix_spawn(&child, "/proc/self/exe", NULL, NULL, arguments, environ) == 0)
        waitpid(child, &status, 0); /* 66: the sanitizer has reported something */
    if (status) fprintf(stderr, "[FAIL] %s::%s\n", test->suite, test->name);
    return status == 0;
}

int main(int argc, char **argv) {
    if (argc == 3) return tsan_run(argv[1], argv[2]) ? 0 : 3;
    int tested = 0, passing = 0;
    for (const struct tsan_case *c = tsan_cases; c; c = c->next)
        if (c->run) tested += 1, passing += tsan_passes(argv[0], c);
    printf("[====] Synthesis: Tested: %d | Passing: %d | Failing: %d | Crashing: 0\n", tested, passing,
           tested - passing);
    return passing != tested;
}
#endif

#endif
