/* fattn check: checks all gradients on this machine, in this build. */
#include "cli/commands/check.h"
#include "cli/base/cli.h"
#include "cli/base/device.h"
#include "cli/output/progress.h"

#include <fnmatch.h>
#include <glob.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct options {
    bool list;
    int device, dtype;
    int64_t threads;
    const char *fixtures, *json;
};
static const struct options defaults = {0};

#define FIELD(name) offsetof(struct options, name)
static const cli_option table[] = {
    {"list", CLI_FLAG, FIELD(list), NULL, 0, 0, NULL, "print the names of the cases, run nothing"},
    {"fixtures", CLI_TEXT, FIELD(fixtures), "DIR", 0, 0, NULL,
     "folder of HDF5 cases; default: ./data, if it has any, or the installed ones"},
    {"device", CLI_CHOICE, FIELD(device), "D", 0, 0, "cpu|cuda", "where to compute"},
    {"dtype", CLI_CHOICE, FIELD(dtype), "T", 0, 0, "f64|f32", "what to compute in"},
    {"threads", CLI_INT, FIELD(threads), "T", 0, 1024, NULL, "CPU threads; 0: OpenMP's choice"},
    {"json", CLI_TEXT, FIELD(json), "FILE", 0, 0, NULL,
     "write one JSON object per case and algorithm; - = standard output"},
    {0}};

const char *const check_way_name[CHECK_WAYS] = {"standard", "flash1", "flash2"};
static const char *const word[] = {[CHECK_SKIPPED] = "skip", [CHECK_OK] = "ok", [CHECK_FAILED] = "FAIL"};

/* The whole name, the part before a slash, or a pattern. */
static bool matches(const char *name, const char *wanted) {
    const size_t length = strlen(wanted);
    const bool part = strncmp(name, wanted, length) == 0 && (name[length] == '/' || !name[length]);
    return part || fnmatch(wanted, name, 0) == 0;
}

bool check_begin(check_run *run, const char *name) {
    bool wanted = run->n_wanted == 0;
    for (int i = 0; i < run->n_wanted; ++i) {
        if (!matches(name, run->wanted[i])) continue;
        wanted = run->found[i] = true;
    }
    if (wanted && run->list) puts(name);
    return wanted && !run->list && !json_failed(&run->log); /* json_close reports it */
}

double check_worst(const fattn_report *r, double unit) {
    return fabs(r->worst_got - r->worst_want) / (fabs(r->worst_want) + unit);
}

void check_sizes(check_result *r, int64_t B, int64_t Hq, int64_t Hkv, int64_t Sq, int64_t Sk, int64_t D, int64_t Dv) {
    snprintf(r->what, sizeof r->what, "%lld, %lld/%lld, %lld x %lld, %lld/%lld", (long long)B, (long long)Hq,
             (long long)Hkv, (long long)Sq, (long long)Sk, (long long)D, (long long)Dv);
}

void check_heading(const char *text) {
    printf("%s\n\n%-4s  %-34s%-36s%8s", text, "", "case", "B, Hq/Hkv, Sq x Sk, D/Dv", "numbers");
    for (int w = 0; w < CHECK_WAYS; ++w) printf("%10s", check_way_name[w]);
    printf("%9s\n", "seconds");
}

static void log_way(json *j, const check_result *r, int w) {
    const check_way *v = &r->way[w];
    json_begin(j);
    json_text(j, "case", r->name);
    json_text(j, "what", r->what);
    json_text(j, "algorithm", check_way_name[w]);
    json_text(j, "state", word[v->state]);
    json_int(j, "checked", v->checked);
    json_real(j, "worst_relative_error", v->state == CHECK_SKIPPED ? NAN : v->worst);
    if (v->state != CHECK_OK) json_text(j, "message", v->message);
    json_end(j);
}

void check_end(check_run *run, const check_result *r) {
    check_state state = CHECK_SKIPPED;
    int64_t checked = 0;
    for (int w = 0; w < CHECK_WAYS; ++w) {
        if (r->way[w].state > state) state = r->way[w].state;
        if (r->way[w].checked > checked) checked = r->way[w].checked;
        run->computed[w] += r->way[w].state != CHECK_SKIPPED;
        log_way(&run->log, r, w);
    }
    run->cases[state] += 1;
    printf("%-4s  %-34s%-36s%8lld", word[state], r->name, r->what, (long long)checked);
    for (int w = 0; w < CHECK_WAYS; ++w) {
        char text[32] = "-";
        if (r->way[w].state != CHECK_SKIPPED) snprintf(text, sizeof text, "%.1e", r->way[w].worst);
        printf("%10s", text);
    }
    printf("%9.2f\n", r->seconds);
    for (int w = 0; w < CHECK_WAYS; ++w) {
        if (r->way[w].state == CHECK_FAILED) printf("      %s: %s\n", check_way_name[w], r->way[w].message);
    }
    cli_flush();
}

static bool has_fixtures(const char *pattern) {
    glob_t found = {0};
    const bool any = glob(pattern, 0, NULL, &found) == 0;
    globfree(&found);
    return any;
}

/* ./data, if fixtures are in it, or share/fattn next to the folder of this program; NULL: neither exists. */
static const char *default_folder(char *buffer, size_t size) {
    if (has_fixtures("data/*.h5")) return "data";
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
    if (!run->list)
        check_heading(
            run->dtype == FATTN_F64
                ? "Analytic gradients against central differences, fp64: largest relative error "
                  "per algorithm,\n|error| / (|x| + 0.01), at most 1e-6."
                : "Analytic gradients in fp32 against central differences in fp64: largest relative "
                  "error per algorithm,\n|error| / (|x| + 1), at most 2^-16 (1.5e-5) times an input's largest "
                  "gradient, or 1.");
    check_gradients(run);
    if (!folder) {
        fprintf(stderr, "fixtures: none (*.h5) in ./data and none installed; see --fixtures\n");
    } else {
        char text[4400];
        snprintf(text, sizeof text,
                 "\nFixtures in %s: O, L and gradients against the fp64 reference, |error| / (|x| + 1),"
                 "\nat most %s times the size of the scores, or |error| / (|x| + unit) where a case has units;"
                 "\nand against its finite differences.",
                 folder, run->dtype == FATTN_F64 ? "1e-12" : "2^-24 (8 + sqrt(terms))");
        if (!run->list) check_heading(text);
        if (!check_fixtures(run, folder)) return CLI_FAILURE;
    }
    for (int i = 0; i < run->n_wanted; ++i) {
        if (!run->found[i])
            return cli_fail(CLI_USAGE, "no case is called \"%s\"; see fattn check --list", run->wanted[i]);
    }
    if (run->list) return CLI_OK;
    const int *n = run->cases, total = n[CHECK_OK] + n[CHECK_FAILED] + n[CHECK_SKIPPED];
    printf("\n%d cases: %d ok, %d failed, %d skipped; computed by", total, n[CHECK_OK], n[CHECK_FAILED],
           n[CHECK_SKIPPED]);
    for (int w = 0; w < CHECK_WAYS; ++w)
        printf(" %s %d%s", check_way_name[w], run->computed[w], w + 1 < CHECK_WAYS ? "," : "");
    printf(" (-: no kernel yet); %.1f s\n", seconds_now() - begin);
    return n[CHECK_FAILED] ? CLI_FAILURE : CLI_OK;
}

static int run(const void *options, int n_operands, char *const *operands) {
    const struct options *o = options;
    check_run run = {
        .dtype = o->dtype ? FATTN_F32 : FATTN_F64, .n_wanted = n_operands, .wanted = operands, .list = o->list};
    char why[2][DEVICE_MESSAGE];
    if (!json_open(&run.log, o->json, false)) return CLI_FAILURE;
    run.found = calloc((size_t)n_operands + 1, sizeof *run.found);
    int code = run.found ? CLI_OK : cli_fail(CLI_FAILURE, "no memory");
    if (!code) code = device_open(ON_CPU, 0, o->threads, why[0], &run.host);
    if (!code && o->device != ON_CPU) code = device_open(o->device, 0, 0, why[1], &run.ctx);
    if (!run.ctx && o->device == ON_CPU) run.ctx = run.host;
    if (!code) code = check_all(&run, o);
    if (run.ctx != run.host) fattn_ctx_destroy(run.ctx);
    fattn_ctx_destroy(run.host);
    free(run.found);
    return json_close(&run.log) ? code : CLI_FAILURE;
}

const cli_command cmd_check = {
    .name = "check",
    .operands = "[CASE...]",
    .summary = "Check gradients: against central differences, and against fixtures",
    .details = "A CASE is a name (--list), the part of one before its slash, or a pattern: '*causal*'.\n"
               "Without any, all cases run, each with every algorithm. A dash: no kernel of this\n"
               "version covers the case; --json says why. Exit code 1 when a case fails.",
    .options = table,
    .defaults = &defaults,
    .size = sizeof defaults,
    .run = run,
};
