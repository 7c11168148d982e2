/* Parsing of commands: values, error messages, help, exit codes. */
#include <criterion/criterion.h>
#include <criterion/redirect.h>

#include "cli/base/cli.h"

#include <stdio.h>
#include <string.h>

typedef struct options {
    bool flag;
    int64_t count;
    double rate;
    const char *file;
    int choice;
    cli_list sizes;
    int64_t seed;
} options;

static const options defaults = {.count = 7, .rate = 0.5, .choice = 1, .sizes = {2, {512, 1024}}};
#define FIELD(name) offsetof(options, name)
static const cli_option table[] = {{"flag", CLI_FLAG, FIELD(flag), NULL, 0, 0, NULL, "a flag"},
                                   {"count", CLI_INT, FIELD(count), "N", 1, 100, NULL, "a count"},
                                   {"rate", CLI_REAL, FIELD(rate), "R", 0, 1, NULL, "a rate"},
                                   {"file", CLI_TEXT, FIELD(file), "FILE", 0, 0, NULL, "a file"},
                                   {"choice", CLI_CHOICE, FIELD(choice), "C", 0, 0, "red|green|blue", "a colour"},
                                   {"sizes", CLI_INTS, FIELD(sizes), "N,...", 1, 1e6, NULL, "sizes"},
                                   {"seed", CLI_INT, FIELD(seed), "N", 0, 9e15, NULL, "a number"},
                                   {0}};

static options seen; /* the options that run received; each test has its own process */
static int n_seen;
static char operand_seen[64];

static int run(const void *o, int n_operands, char *const *operands) {
    seen = *(const options *)o;
    n_seen = n_operands;
    if (n_operands > 0) snprintf(operand_seen, sizeof operand_seen, "%s", operands[n_operands - 1]);
    return seen.count == 99 ? cli_fail(CLI_FAILURE, "count is %d", 99) : CLI_OK;
}

static const cli_command plain = {.name = "plain",
                                  .summary = "A command",
                                  .options = table,
                                  .defaults = &defaults,
                                  .size = sizeof defaults,
                                  .run = run};
static const cli_command with_operands = {.name = "with",
                                          .operands = "[CASE...]",
                                          .summary = "Another",
                                          .options = table,
                                          .defaults = &defaults,
                                          .size = sizeof defaults,
                                          .run = run};
static const cli_command *const commands[] = {&plain, &with_operands, NULL};

/* Runs "fattn WORDS"; words are separated by single spaces. */
static int fattn(const char *words) {
    static char line[256]; /* `seen` points into it afterwards */
    char *argv[16] = {"fattn"};
    int argc = 1;
    snprintf(line, sizeof line, "%s", words);
    for (char *word = strtok(line, " "); word; word = strtok(NULL, " ")) argv[argc++] = word;
    return cli_main(commands, argc, argv);
}

static void expect_text(FILE *f, const char *part) {
    char text[4096] = "";
    const size_t n = fread(text, 1, sizeof text - 1, f);
    text[n] = 0;
    cr_assert(strstr(text, part), "\"%s\" is not in:\n%s", part, text);
}

Test(options, defaults_reach_the_command) {
    cr_assert_eq(fattn("plain"), CLI_OK);
    cr_assert_eq(memcmp(&seen, &defaults, sizeof seen), 0);
    cr_assert_eq(n_seen, 0);
}

Test(options, every_type_both_spellings) {
    cr_assert_eq(fattn("plain --flag --count 3 --rate=0.25 --file a/b --choice blue "
                       "--sizes 5,100..800,7"),
                 CLI_OK);
    cr_assert(seen.flag);
    cr_assert_eq(seen.count, 3);
    cr_assert_eq(seen.rate, 0.25);
    cr_assert_str_eq(seen.file, "a/b");
    cr_assert_eq(seen.choice, 2);
    static const int64_t sizes[] = {5, 100, 200, 400, 800, 7};
    cr_assert_eq(seen.sizes.count, 6);
    cr_assert_eq(memcmp(seen.sizes.at, sizes, sizeof sizes), 0);
}

Test(options, a_range_includes_its_end) {
    cr_assert_eq(fattn("plain --sizes 3..20"), CLI_OK);
    static const int64_t sizes[] = {3, 6, 12, 20};
    cr_assert_eq(seen.sizes.count, 4);
    cr_assert_eq(memcmp(seen.sizes.at, sizes, sizeof sizes), 0);
    cr_assert_eq(fattn("plain --sizes 1000000..1000000"), CLI_OK);
    cr_assert_eq(seen.sizes.count, 1);
}

Test(options, operands) {
    cr_assert_eq(fattn("with one --count 2 two -- --three"), CLI_OK);
    cr_assert_eq(n_seen, 3);
    cr_assert_str_eq(operand_seen, "--three");
    cr_assert_eq(seen.count, 2);
}

Test(options, wrong_values_are_named) {
    static const struct {
        const char *words, *message;
    } wrong[] = {
        {"plain --count 0", "fattn plain: --count: \"0\" is not a whole number from 1 to 100"},
        {"plain --count 101", "\"101\" is not"},
        {"plain --count 3x", "\"3x\" is not"},
        {"plain --count=", "\"\" is not"},
        {"plain --count 99999999999999999999", "is not a whole number"},
        {"plain --count", "--count needs a value: a whole number from 1 to 100"},
        {"plain --rate 1.5", "--rate: \"1.5\" is not a number from 0 to 1"},
        {"plain --rate nan", "\"nan\" is not"},
        {"plain --rate inf", "\"inf\" is not"},
        {"plain --choice pink", "--choice: \"pink\" is not one of red|green|blue"},
        {"plain --choice re", "\"re\" is not"},
        {"plain --sizes 5,", "--sizes: \"5,\" is not"},
        {"plain --sizes 9..5", "\"9..5\" is not"},
        {"plain --sizes 1;2", "\"1;2\" is not"},
        {"plain --sizes 1..1000000,1..1000000", "is not"},
        {"plain --flag=1", "--flag takes no value, not \"1\""},
        {"plain --file=", "--file: \"\" is not"},
        {"plain --seed -1", "--seed: \"-1\" is not a whole number, at least 0"},
        {"plain --seed x", "\"x\" is not a whole number, at least 0"},
        {"plain --seed 9000000000000001", "is not a whole number from 0 to 9000000000000000"},
        {"plain --seed 18446744073709551615", "is not a whole number from 0 to 9000000000000000"},
        {"plain --other 1", "unknown option --other; see fattn plain --help"},
        {"plain -c", "unknown option -c"},
        {"plain extra", "unexpected \"extra\""},
        {"nothing", "fattn: unknown command \"nothing\"; see fattn --help"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; ++i) {
        FILE *old = stderr, *file = tmpfile();
        stderr = file;
        const int code = fattn(wrong[i].words);
        stderr = old;
        cr_assert_eq(code, CLI_USAGE, "%s gives %d", wrong[i].words, code);
        rewind(file);
        expect_text(file, wrong[i].message);
        fclose(file);
    }
}

Test(options, an_empty_operand_is_named, .init = cr_redirect_stderr) {
    cr_assert_eq(cli_main(commands, 4, (char *[]){"fattn", "with", "one", "", NULL}), CLI_USAGE);
    cr_assert_eq(cli_main(commands, 4, (char *[]){"fattn", "with", "--", "", NULL}), CLI_USAGE);
    cr_assert_eq(n_seen, 0);
    fflush(stderr);
    expect_text(cr_get_redirected_stderr(), "fattn with: operand 2 is empty; see fattn with --help\n"
                                            "fattn with: operand 1 is empty; see fattn with --help\n");
}

Test(options, help_names_every_option, .init = cr_redirect_stdout) {
    cr_assert_eq(fattn("plain --count 5 --help"), CLI_OK);
    fflush(stdout);
    FILE *f = cr_get_redirected_stdout();
    char text[4096] = "";
    cr_assert_gt(fread(text, 1, sizeof text - 1, f), 0);
    for (const cli_option *o = table; o->name; ++o) {
        char dashed[32];
        snprintf(dashed, sizeof dashed, "--%s", o->name);
        cr_assert(strstr(text, dashed), "%s", dashed);
        cr_assert(strstr(text, o->help), "%s", o->help);
    }
    cr_assert(strstr(text, "[7]"), "the default, not what came before --help");
    cr_assert(strstr(text, "[green]"));
    cr_assert(strstr(text, "[512,1024]"));
    cr_assert(strstr(text, "from 1 to 100"));
}

Test(options, no_command_is_wrong_usage, .init = cr_redirect_stdout) {
    cr_assert_eq(fattn(""), CLI_USAGE);
    cr_assert_eq(fattn("--help"), CLI_OK);
    cr_assert_eq(fattn("--version"), CLI_OK);
}

Test(options, a_failure_has_the_commands_name, .init = cr_redirect_stderr) {
    cr_assert_eq(fattn("plain --count 99"), CLI_FAILURE);
    fflush(stderr);
    expect_text(cr_get_redirected_stderr(), "fattn plain: count is 99");
}
