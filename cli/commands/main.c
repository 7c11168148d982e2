/* The program `fattn`. */
#include "cli/base/cli.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <unistd.h>

static const char core_type[] = "OPENBLAS_CORETYPE";

/* A context's log names the kernels of an OpenBLAS that does not know the CPU. */
static void find_kernels(void *user, fattn_log level, const char *text) {
    const char *const at = strstr(text, core_type);
    if (level == FATTN_LOG_WARN && at && sscanf(at + sizeof core_type, "%31s", (char *)user) != 1) *(char *)user = 0;
}

/* OpenBLAS reads that variable when it is loaded. So the program starts again with it, unless the user has set it;
   where it cannot, commands go on and warn. Started by hand, the dynamic loader is what /proc/self/exe names, and has
   no loader below it. */
static void restart_with_kernels(char **argv) {
    char kernels[32] = "";
    const fattn_ctx_options o = {.struct_size = sizeof o, .log = find_kernels, .log_user = kernels};
    fattn_ctx *ctx;
    if (getenv(core_type) || !getauxval(AT_BASE) || fattn_ctx_create(&o, &ctx)) return;
    fattn_ctx_destroy(ctx);
    char path[4096]; /* by the link itself the process would be called "exe" */
    const ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
    if (!*kernels || length <= 0 || setenv(core_type, kernels, 1)) return;
    path[length] = 0;
    execv(path, argv);
}

int main(int argc, char **argv) {
    restart_with_kernels(argv);
    static const cli_command *const commands[] = {&cmd_train, &cmd_tokens, &cmd_convert, &cmd_eval, &cmd_sample,
                                                  &cmd_check, &cmd_memory, &cmd_bench,   &cmd_info, NULL};
    return cli_main(commands, argc, argv);
}
