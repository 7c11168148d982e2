/* The program `fattn`. */
#include "cli/base/cli.h"

int main(int argc, char **argv) {
    static const cli_command *const commands[] = {&cmd_train, &cmd_tokens, &cmd_convert, &cmd_eval, &cmd_sample,
                                                  &cmd_check, &cmd_memory, &cmd_bench,   &cmd_info, NULL};
    return cli_main(commands, argc, argv);
}
