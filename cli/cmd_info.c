/* fattn info: what this build is and what it would run here. */
#include "cli.h"

#include <fattn/fattn.h>

#include <stdio.h>

struct options {
    bool unused;
};
static const struct options defaults = {false};
static const cli_option table[] = {{NULL}};

static int run(const void *options, int n_operands, char *const *operands) {
    (void)options, (void)n_operands, (void)operands;
    const int v = fattn_version();
    printf("fattn %d.%d.%d\n", v / 10000, v / 100 % 100, v % 100);
    return CLI_OK;
}

const cli_command cmd_info = {
    .name = "info",
    .summary = "Version, build, devices, instruction sets and kernels",
    .options = table,
    .defaults = &defaults,
    .size = sizeof defaults,
    .run = run,
};
