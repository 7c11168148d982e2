/* fattn check: is every gradient right, on this machine, in this build? */
#include "check.h"
#include "cli.h"
#include "progress.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct options {
    bool list;
    int64_t threads;
    const char *fixtures, *json;
};
static const struct options defaults = {0};

#define FIELD(name) offsetof(struct options, name)
static const cli_option table[] = {
    {"list", CLI_FLAG, FIELD(list), NULL, 0, 0, NULL, "print the names of the cases, run nothing"},
    {"fixtures", CLI_TEXT, FIELD(fixtures), "DIR", 0, 0, NULL,
     "folder of HDF5 cases; default: ./data, then the installed ones"},
    {"threads", CLI_INT, FIELD(threads), "T", 0, 1024, NULL, "CPU threads; 0: OpenMP's choice"},
    {"json", CLI_TEXT, FIELD(json), "FILE", 0, 0, NULL, "write one JSON object per case"},
    {0}};

bool check_begin(check_run *run, const char *name) {
    bool wanted = run->n_wanted == 0;
    for (int i = 0; i < run->n_wanted; ++i) {
        if (!strstr(name, run->wanted[i])) continue;
        wanted = run->found[i] = true;
    }
    if (wanted && run->list) puts(name);
    return wanted && !run->list;
}

void check_end(check_run *run, const check_result *r) {
    static const char *const word[] = {"ok", "FAIL", "skip"};
    run->count[r->state] += 1;
    printf("%-5s %-38s %-36s", word[r->state], r->name, r->what);
    if (r->state == CHECK_SKIPPED)
        printf(" %s\n", r->sentence);
    else
        printf(" %6lld numbers  worst %7.1e  %5.2f s\n", (long long)r->checked, r->worst,
               r->seconds);
    if (r->state == CHECK_FAILED) printf("      %s\n", r->sentence);
    fflush(stdout);
    json_begin(&run->log);
    json_text(&run->log, "name", r->name);
    json_text(&run->log, "what", r->what);
    json_text(&run->log, "state", word[r->state]);
    json_int(&run->log, "checked", r->checked);
    json_real(&run->log, "worst_relative_error", r->worst);
    json_real(&run->log, "seconds", r->seconds);
    if (r->state != CHECK_OK) json_text(&run->log, "sentence", r->sentence);
    json_end(&run->log);
}

/* ./data, or share/fattn beside the folder that this program lies in; NULL: neither is there. */
static const char *default_folder(char *buffer, size_t size) {
    if (access("data", R_OK) == 0) return "data";
    const ssize_t length = readlink("/proc/self/exe", buffer, size - 1);
    if (length <= 0) return NULL;
    buffer[length] = 0;
    for (int up = 0; up < 2; ++up) {
        char *slash = strrchr(buffer, '/');
        if (slash) *slash = 0;
    }
    const size_t used = strlen(buffer);
    snprintf(buffer + used, size - used, "/share/fattn");
    return access(buffer, R_OK) == 0 ? buffer : NULL;
}

static int check_all(check_run *run, const struct options *o) {
    const double begin = seconds_now();
    char buffer[4096];
    const char *const folder = o->fixtures ? o->fixtures : default_folder(buffer, sizeof buffer);
    if (!run->list) printf("analytic gradients against central differences, fp64\n");
    check_gradients(run);
    if (!folder) {
        fprintf(stderr, "fixtures: no folder ./data and none installed; see --fixtures\n");
    } else {
        if (!run->list)
            printf("\nfixtures in %s: results and gradients of the fp64 reference, and "
                   "its finite differences\n",
                   folder);
        if (!check_fixtures(run, folder)) return CLI_FAILURE;
    }
    for (int i = 0; i < run->n_wanted; ++i) {
        if (!run->found[i])
            return cli_fail(CLI_USAGE, "no case has \"%s\" in its name; see fattn check --list",
                            run->wanted[i]);
    }
    if (run->list) return CLI_OK;
    const int *n = run->count;
    printf("\n%d ok, %d failed, %d skipped, %.1f s\n", n[CHECK_OK], n[CHECK_FAILED],
           n[CHECK_SKIPPED], seconds_now() - begin);
    return n[CHECK_FAILED] ? CLI_FAILURE : CLI_OK;
}

static int run(const void *options, int n_operands, char *const *operands) {
    const struct options *o = options;
    check_run run = {.n_wanted = n_operands, .wanted = operands, .list = o->list};
    const fattn_ctx_options ctx_options = {.struct_size = sizeof ctx_options,
                                           .cpu_threads = (int)o->threads};
    if (!json_open(&run.log, o->json, false)) return CLI_FAILURE;
    int code = CLI_FAILURE;
    run.found = calloc((size_t)n_operands + 1, sizeof *run.found);
    const fattn_status s = fattn_ctx_create(&ctx_options, &run.ctx);
    if (s != FATTN_OK)
        cli_status(NULL, s, "context");
    else if (!run.found)
        cli_fail(CLI_FAILURE, "no memory");
    else
        code = check_all(&run, o);
    fattn_ctx_destroy(run.ctx);
    free(run.found);
    return json_close(&run.log) ? code : CLI_FAILURE;
}

const cli_command cmd_check = {
    .name = "check",
    .operands = "[CASE...]",
    .summary = "Check gradients: against central differences, and against fixtures",
    .details =
        "Runs the cases whose names have one of the CASEs in them; without any, all. A case that\n"
        "no kernel of this version covers is skipped and says why. Exit code 1 when one fails.",
    .options = table,
    .defaults = &defaults,
    .size = sizeof defaults,
    .run = run,
};
