/* Shared by all commands of `fattn`: options from a table, errors, exit codes, interrupts.

   A command is a cli_command with a struct for its options and a table that maps each option to a field.
   main parses, prints --help from the same table, and calls run. */
#ifndef FATTNI_CLI_BASE_CLI_H
#define FATTNI_CLI_BASE_CLI_H

#include <fattn/context.h>

#include <stdbool.h>

enum cli_exit { CLI_OK = 0, CLI_FAILURE = 1, CLI_USAGE = 2, CLI_INTERRUPTED = 130 };

enum { CLI_LIST_MAX = 32 };
typedef struct cli_list {
    int count;
    int64_t at[CLI_LIST_MAX];
} cli_list;

/* The field of the options struct:
   FLAG    bool; takes no value
   INT     int64_t in [min, max]
   REAL    double in [min, max]; finite
   TEXT    const char *, not empty; default NULL = none
   CHOICE  int, index into choices
   INTS    cli_list, each in [min, max]: "512,1000" or, doubling, "512..8192" */
typedef enum cli_type { CLI_FLAG, CLI_INT, CLI_REAL, CLI_TEXT, CLI_CHOICE, CLI_INTS } cli_type;

typedef struct cli_option {
    const char *name; /* without dashes; NULL ends the table */
    cli_type type;
    size_t offset;       /* offsetof(struct, field) */
    const char *value;   /* what --help calls the value: "N", "FILE" */
    double min, max;     /* inclusive; exact up to 2^53 */
    const char *choices; /* "recall|text" */
    const char *help;    /* "learning rate": lower case, no full stop; default and range are added */
} cli_option;

typedef struct cli_command {
    const char *name;     /* "check" */
    const char *operands; /* "[CASE...]", none of them empty; NULL: takes none */
    const char *summary;  /* one line for `fattn --help` */
    const char *details;  /* further text of `fattn check --help`, lines of at most 80 columns */
    const cli_option *options;
    const void *defaults;                                                   /* initial value of the options struct */
    size_t size;                                                            /* its bytes */
    int (*run)(const void *options, int n_operands, char *const *operands); /* enum cli_exit */
} cli_command;

/* One line per command file; main.c lists them. */
extern const cli_command cmd_info, cmd_check, cmd_memory, cmd_bench, cmd_train, cmd_tokens, cmd_convert, cmd_eval,
    cmd_sample;

/* Finds the command, parses, runs; returns the exit code. A failed write to standard output is a failure,
   even if the command did not check it. */
int cli_main(const cli_command *const *commands, int argc, char **argv);

/* Whether a field's value is in the option's range; a CHOICE must be one of them, a REAL finite. */
bool cli_in_range(const cli_option *o, const void *field);

/* The value of an INT, REAL or CHOICE as text, cut to fit; returns `text`. */
const char *cli_value_text(const cli_option *o, const void *field, char *text, size_t size);

/* Prints "fattn check: <error message>" on standard error; returns `code`. */
int cli_fail(int code, const char *format, ...) FATTN_PRINTF(2, 3);
/* Writes out what has been printed on standard output. False when that fails, which is reported at the end. */
bool cli_flush(void);
/* f(arg) is called before each error message that is printed from now on, as to end a line; NULL: nothing is. */
void cli_before_messages(void (*f)(void *arg), void *arg);
/* The same for a library call that returned s: what, the context's error message, the status' name. */
int cli_status(const fattn_ctx *ctx, fattn_status s, const char *what);
/* From now on the calling thread prints no error messages: the last one, of a code that is not CLI_OK, is kept in `to`.
   NULL: it prints them again. For threads and processes of which another one reports failures. */
void cli_keep_messages(char *to, size_t bytes);
bool cli_keeps_messages(void);

/* From now on Ctrl-C and SIGTERM only set a flag, for commands that must finish their work; a second one
   ends the process. Commands that do not call this end at the first. */
void cli_catch_interrupts(void);
bool cli_interrupted(void);
void cli_release_interrupts(void); /* from now on they end the process again */

/* Creates the folders above path. False with errno when that fails. */
bool cli_make_parents(const char *path);

#endif
