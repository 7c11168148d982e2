/* Commands, their options and --help, errors, interrupts. */
#include "cli/base/cli.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char speaker[64];        /* "fattn", or "fattn check" once the command is known */
static atomic_bool interrupted; /* lock-free: a signal handler sets it, any thread reads it */

/* Where the calling thread's error messages go; NULL: to standard error. */
static _Thread_local char *kept;
static _Thread_local size_t kept_bytes;

static int unwritten; /* errno of the first write to standard output that failed; 0: none */

static void (*before)(void *); /* a message is printed */
static void *before_arg;

/* What could not be written is dropped: a later call would not know the reason any more. */
bool cli_flush(void) {
    const bool ok = fflush(stdout) == 0;
    if (!ok && !unwritten) unwritten = errno;
    return ok;
}

int cli_fail(int code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    if (kept) {
        if (code) vsnprintf(kept, kept_bytes, format, arguments);
    } else {
        if (before) before(before_arg);
        cli_flush();
        fprintf(stderr, "%s: ", speaker);
        vfprintf(stderr, format, arguments);
        fputc('\n', stderr);
    }
    va_end(arguments);
    return code;
}

void cli_before_messages(void (*f)(void *), void *arg) {
    before = f;
    before_arg = arg;
}

void cli_keep_messages(char *to, size_t bytes) {
    kept = to;
    kept_bytes = bytes;
}

bool cli_keeps_messages(void) { return kept != NULL; }

int cli_status(const fattn_ctx *ctx, fattn_status s, const char *what) {
    const char *message = ctx ? fattn_ctx_error(ctx) : "";
    return cli_fail(CLI_FAILURE, "%s: %s (%s)", what, *message ? message : fattn_status_text(s), fattn_status_name(s));
}

static void note_interrupt(int number) {
    signal(number, SIG_DFL); /* a second one ends the process */
    atomic_store(&interrupted, true);
}

void cli_catch_interrupts(void) {
    struct sigaction action = {.sa_handler = note_interrupt, .sa_flags = SA_RESTART};
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

bool cli_interrupted(void) { return atomic_load(&interrupted); }

void cli_release_interrupts(void) {
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
}

bool cli_make_parents(const char *path) {
    char folder[PATH_MAX];
    const size_t length = strlen(path);
    if (length >= sizeof folder) {
        errno = ENAMETOOLONG;
        return false;
    }
    memcpy(folder, path, length + 1);
    for (char *slash = strchr(folder + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        if (mkdir(folder, 0777) != 0 && errno != EEXIST) return false;
        *slash = '/';
    }
    return true;
}

/* ---- values ---- */

/* "recall|text": copies choice number index; false past the last. */
static bool choice_at(const char *choices, int index, char *out, size_t size) {
    for (const char *c = choices; c; --index) {
        const char *end = strchr(c, '|');
        const size_t length = end ? (size_t)(end - c) : strlen(c);
        if (index == 0) {
            snprintf(out, size, "%.*s", (int)length, c);
            return true;
        }
        c = end ? end + 1 : NULL;
    }
    return false;
}

/* A whole number at the start of text, in the option's range; the rest of text, or NULL. */
static const char *take_int(const cli_option *o, const char *text, int64_t *out) {
    char *end;
    errno = 0;
    const long long v = strtoll(text, &end, 10);
    if (end == text || errno || (double)v < o->min || (double)v > o->max) return NULL;
    *out = v;
    return end;
}

/* "64", "512,1000,4096", "512..8192" (doubling, the end included). */
static bool take_ints(const cli_option *o, const char *text, cli_list *list) {
    list->count = 0;
    do {
        int64_t first, last;
        text = take_int(o, text, &first);
        if (!text) return false;
        last = first;
        if (strncmp(text, "..", 2) == 0) {
            text = take_int(o, text + 2, &last);
            if (!text || first < 1 || last < first) return false;
        }
        for (int64_t v = first; v <= last; v = v < last && v > last / 2 ? last : 2 * v) {
            if (list->count == CLI_LIST_MAX) return false;
            list->at[list->count++] = v;
            if (v == last) break;
        }
    } while (*text++ == ',');
    return text[-1] == 0;
}

static bool take_value(const cli_option *o, const char *text, void *field) {
    switch (o->type) {
    case CLI_FLAG: *(bool *)field = true; return true;
    case CLI_INT: {
        const char *rest = take_int(o, text, field);
        return rest && *rest == 0;
    }
    case CLI_REAL: {
        char *end;
        const double v = strtod(text, &end);
        if (end == text || *end || !isfinite(v) || v < o->min || v > o->max) return false;
        *(double *)field = v;
        return true;
    }
    case CLI_TEXT: *(const char **)field = text; return *text != 0;
    case CLI_CHOICE: {
        char choice[64];
        for (int i = 0; choice_at(o->choices, i, choice, sizeof choice); ++i) {
            if (strcmp(choice, text) == 0) {
                *(int *)field = i;
                return true;
            }
        }
        return false;
    }
    case CLI_INTS: return take_ints(o, text, field);
    }
    return false;
}

bool cli_in_range(const cli_option *o, const void *field) {
    char choice[64];
    switch (o->type) {
    case CLI_INT: {
        const double v = (double)*(const int64_t *)field;
        return v >= o->min && v <= o->max;
    }
    case CLI_REAL: return *(const double *)field >= o->min && *(const double *)field <= o->max;
    case CLI_CHOICE: {
        const int v = *(const int *)field;
        return v >= 0 && choice_at(o->choices, v, choice, sizeof choice);
    }
    case CLI_FLAG:
    case CLI_TEXT:
    case CLI_INTS: return true;
    }
    return false;
}

/* "a whole number from 1 to 1024". An upper bound that only keeps numbers exact is left out, unless the text is a
   number above it; NULL: there is no text. */
static const char *expectation(const cli_option *o, const char *text, char *buffer, size_t size) {
    const double unbounded = 9e15;
    const char *kind = o->type == CLI_INTS  ? "whole numbers (512,1000 or 512..8192, doubling)"
                       : o->type == CLI_INT ? "a whole number"
                                            : "a number";
    if (o->type == CLI_TEXT)
        snprintf(buffer, size, "a text of at least one character");
    else if (o->type == CLI_CHOICE)
        snprintf(buffer, size, "one of %s", o->choices);
    else if (o->max >= unbounded && !(text && strtod(text, NULL) > o->max))
        snprintf(buffer, size, "%s, at least %.15g", kind, o->min);
    else
        snprintf(buffer, size, "%s from %.16g to %.16g", kind, o->min, o->max);
    return buffer;
}

const char *cli_value_text(const cli_option *o, const void *field, char *text, size_t size) {
    text[0] = 0;
    if (o->type == CLI_INT) snprintf(text, size, "%lld", (long long)*(const int64_t *)field);
    if (o->type == CLI_REAL) snprintf(text, size, "%.15g", *(const double *)field);
    if (o->type == CLI_CHOICE) choice_at(o->choices, *(const int *)field, text, size);
    return text;
}

/* ---- help ---- */

/* A default outside the option's range means "not given", and is not shown. */
static void print_default(const cli_option *o, const void *field) {
    char choice[64];
    switch (o->type) {
    case CLI_FLAG: break;
    case CLI_INT:
        if ((double)*(const int64_t *)field >= o->min) printf(" [%lld]", (long long)*(const int64_t *)field);
        break;
    case CLI_REAL:
        if (*(const double *)field >= o->min) printf(" [%.6g]", *(const double *)field);
        break;
    case CLI_TEXT:
        if (*(const char *const *)field) printf(" [%s]", *(const char *const *)field);
        break;
    case CLI_CHOICE:
        if (choice_at(o->choices, *(const int *)field, choice, sizeof choice)) printf(" [%s]", choice);
        break;
    case CLI_INTS: {
        const cli_list *list = field;
        for (int i = 0; i < list->count; ++i) printf("%s%lld", i ? "," : " [", (long long)list->at[i]);
        if (list->count) printf("]");
        break;
    }
    }
}

static void print_command_help(const cli_command *c) {
    printf("usage: fattn %s [OPTION]...%s%s\n\n%s.\n", c->name, c->operands ? " " : "", c->operands ? c->operands : "",
           c->summary);
    if (c->details) printf("\n%s\n", c->details);
    printf("\noptions [default]:\n");
    for (const cli_option *o = c->options; o->name; ++o) {
        char left[40], expected[160];
        snprintf(left, sizeof left, "--%s%s%s", o->name, o->value ? " " : "", o->value ? o->value : "");
        printf("  %-22s %s", left, o->help);
        if (o->type == CLI_CHOICE) printf(": %s", o->choices);
        print_default(o, (const char *)c->defaults + o->offset);
        if (o->type == CLI_INT || o->type == CLI_REAL || o->type == CLI_INTS)
            printf("\n  %-22s   %s", "", expectation(o, NULL, expected, sizeof expected));
        putchar('\n');
    }
    printf("  %-22s this text\n", "--help");
}

static void print_help(const cli_command *const *commands) {
    printf("usage: fattn COMMAND [OPTION]...\n\n"
           "FlashAttention training in C: exact attention, forward and backward, without the\n"
           "N x N matrix.\n\ncommands:\n");
    for (; *commands; ++commands) printf("  %-8s %s\n", (*commands)->name, (*commands)->summary);
    printf("\n`fattn COMMAND --help` lists the options of a command; `fattn --version` the version.\n"
           "Exit codes: 0 success, 1 failure, 2 wrong usage, 130 interrupted.\n");
}

/* ---- parsing ---- */

static const cli_option *find_option(const cli_command *c, const char *name, size_t length) {
    for (const cli_option *o = c->options; o->name; ++o) {
        if (strlen(o->name) == length && strncmp(o->name, name, length) == 0) return o;
    }
    return NULL;
}

/* argv[*i] is "--name", "--name=value" or "--name value"; moves *i past the words it used. */
static bool take_option(const cli_command *c, int argc, char **argv, int *i, void *options) {
    const char *word = argv[*i];
    const char *name = word + 2, *equals = strchr(name, '=');
    const size_t length = equals ? (size_t)(equals - name) : strlen(name);
    const cli_option *o = strncmp(word, "--", 2) == 0 ? find_option(c, name, length) : NULL;
    if (!o) {
        cli_fail(CLI_USAGE, "unknown option %s; see fattn %s --help", word, c->name);
        return false;
    }
    if (o->type == CLI_FLAG && equals) {
        cli_fail(CLI_USAGE, "--%s takes no value, not \"%s\"", o->name, equals + 1);
        return false;
    }
    const char *value = equals ? equals + 1 : NULL;
    if (o->type != CLI_FLAG && !value) value = *i + 1 < argc ? argv[++*i] : NULL;
    char expected[160];
    if (o->type != CLI_FLAG && !value) {
        cli_fail(CLI_USAGE, "--%s needs a value: %s", o->name, expectation(o, NULL, expected, sizeof expected));
        return false;
    }
    if (!take_value(o, value, (char *)options + o->offset)) {
        cli_fail(CLI_USAGE, "--%s: \"%s\" is not %s", o->name, value, expectation(o, value, expected, sizeof expected));
        return false;
    }
    return true;
}

/* argv[0] is the command's name. Operands move to argv[1..*n]. */
static int parse(const cli_command *c, int argc, char **argv, void *options, int *n, bool *help) {
    bool only_operands = false;
    *n = 0;
    *help = false;
    for (int i = 1; i < argc; ++i) {
        if (!only_operands && strcmp(argv[i], "--") == 0) {
            only_operands = true;
        } else if (!only_operands && argv[i][0] == '-' && argv[i][1]) {
            *help = strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0;
            if (*help) return CLI_OK;
            if (!take_option(c, argc, argv, &i, options)) return CLI_USAGE;
        } else if (!c->operands) {
            return cli_fail(CLI_USAGE, "unexpected \"%s\"; see fattn %s --help", argv[i], c->name);
        } else if (!argv[i][0]) {
            return cli_fail(CLI_USAGE, "operand %d is empty; see fattn %s --help", *n + 1, c->name);
        } else {
            argv[++*n] = argv[i];
        }
    }
    return CLI_OK;
}

static int run_command(const cli_command *c, int argc, char **argv) {
    snprintf(speaker, sizeof speaker, "fattn %s", c->name);
    void *options = malloc(c->size);
    if (!options) return cli_fail(CLI_FAILURE, "no memory for the options");
    memcpy(options, c->defaults, c->size);
    int n_operands;
    bool help;
    int code = parse(c, argc, argv, options, &n_operands, &help);
    if (code == CLI_OK && help)
        print_command_help(c);
    else if (code == CLI_OK)
        code = c->run(options, n_operands, argv + 1);
    free(options);
    return code;
}

/* If a standard stream is closed, the next file that is opened would get its number, and printed text
   would go into that file. A closed standard output is replaced by a file that cannot be written. */
static void open_standard_streams(void) {
    for (int number = STDIN_FILENO; number <= STDERR_FILENO; ++number)
        if (fcntl(number, F_GETFD) < 0) (void)open("/dev/null", number == STDERR_FILENO ? O_WRONLY : O_RDONLY);
}

int cli_main(const cli_command *const *commands, int argc, char **argv) {
    snprintf(speaker, sizeof speaker, "fattn");
    signal(SIGPIPE, SIG_IGN); /* a closed pipe is a failed write, with an error message */
    signal(SIGXFSZ, SIG_IGN); /* and so is a file larger than the shell's limit */
    open_standard_streams();
    int code = CLI_OK;
    const char *word = argc > 1 ? argv[1] : NULL;
    if (!word) {
        print_help(commands);
        code = CLI_USAGE;
    } else if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0) {
        print_help(commands);
    } else if (strcmp(word, "--version") == 0) {
        const int v = fattn_version();
        printf("fattn %d.%d.%d\n", v / 10000, v / 100 % 100, v % 100);
    } else {
        const cli_command *const *c = commands;
        while (*c && strcmp((*c)->name, word) != 0) ++c;
        code = *c ? run_command(*c, argc - 1, argv + 1)
                  : cli_fail(CLI_USAGE, "unknown command \"%s\"; see fattn --help", word);
    }
    if (!cli_flush() || ferror(stdout)) {
        cli_fail(CLI_FAILURE, "cannot write to standard output%s%s", unwritten ? ": " : "",
                 unwritten ? strerror(unwritten) : "");
        if (code == CLI_OK) code = CLI_FAILURE;
    }
    return code;
}
