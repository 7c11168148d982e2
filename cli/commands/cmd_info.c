/* fattn info: version and build, devices, and the kernels that would run here. */
#include "cli/base/cli.h"
#include "cli/measure/layer.h"
#include "cli/output/progress.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MESSAGE_BYTES = 512 };

struct options {
    int64_t rows, head_dim, threads;
    int arch;
    bool causal;
};

static const struct options defaults = {.rows = 1024, .head_dim = 64, .arch = -1};

/* Those of FATTN_CTX_PLAN_ONLY. */
static const int archs[] = {75, 80, 86, 87, 89, 90, 100, 103, 120, 121};

static const cli_option table[] = {
    {"n", CLI_INT, offsetof(struct options, rows), "N", 0, 1e9, NULL, "kernels: sequence length"},
    {"d", CLI_INT, offsetof(struct options, head_dim), "D", 1, 256, NULL, "kernels: head dimension"},
    {"causal", CLI_FLAG, offsetof(struct options, causal), NULL, 0, 0, NULL, "kernels: causal mask"},
    {"threads", CLI_INT, offsetof(struct options, threads), "T", 0, 1024, NULL, "CPU threads; 0: OpenMP's choice"},
    {"arch", CLI_CHOICE, offsetof(struct options, arch), "CC", 0, 0, "75|80|86|87|89|90|100|103|120|121",
     "kernels of a GPU of this architecture, as 89 for sm_89, which need not be here"},
    {0}};

static void print_build(void) {
    const int v = fattn_version();
    printf("fattn    %d.%d.%d\n", v / 10000, v / 100 % 100, v % 100);
#if defined(__clang__)
    printf("build    clang %s", __clang_version__);
#elif defined(__GNUC__)
    printf("build    gcc %s", __VERSION__);
#else
    printf("build    unknown compiler");
#endif
    printf(", %s\n", FATTN_BUILD_TYPE);
}

static void print_cpu(void) {
    printf("cpu      %ld cores online", sysconf(_SC_NPROCESSORS_ONLN));
    const char *threads = getenv("OMP_NUM_THREADS");
    printf(", OMP_NUM_THREADS %s", threads && *threads ? threads : "not set");
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
#define SAY(feature)                                                                                                   \
    if (__builtin_cpu_supports(feature)) fputs(" " feature, stdout)
    fputs(";", stdout);
    SAY("sse4.2");
    SAY("avx");
    SAY("fma");
    SAY("avx2");
    SAY("avx512f");
    SAY("avx512bw");
    SAY("avx512vl");
    SAY("avx512bf16");
#undef SAY
#endif
    putchar('\n');
}

static void keep(void *user, fattn_log level, const char *text) {
    if (level == FATTN_LOG_ERROR)
        snprintf(user, MESSAGE_BYTES, "%s", text);
    else if (level == FATTN_LOG_WARN)
        printf("warning  %s\n", text);
}

/* A context on the device, or one that plans for `arch`; a GPU is printed. NULL after printing why there is none. why:
   MESSAGE_BYTES bytes that live as long as the context, whose log is written there. */
static fattn_ctx *open_device(fattn_device device, int threads, int arch, char *why) {
    fattn_ctx *ctx;
    const fattn_ctx_options o = {.struct_size = sizeof o,
                                 .flags = arch ? FATTN_CTX_PLAN_ONLY : 0,
                                 .device = device,
                                 .cpu_threads = device == FATTN_CPU ? threads : 0,
                                 .arch_cap = arch,
                                 .log = keep,
                                 .log_user = why};
    const char *const name = device == FATTN_CPU ? "cpu" : "cuda";
    char text[MESSAGE_BYTES];
    fattn_status s = fattn_ctx_create(&o, &ctx);
    if (s == FATTN_OK && device == FATTN_CUDA) s = fattn_ctx_describe(ctx, text, sizeof text);
    if (s == FATTN_OK && device == FATTN_CUDA) printf("%-8s %s\n", name, text);
    if (s == FATTN_OK) return ctx;
    printf("%-8s no: %s\n", name, *why ? why : fattn_status_text(s));
    fattn_ctx_destroy(ctx);
    return NULL;
}

static void print_kernels(fattn_ctx *ctx, const struct options *o) {
    static const char *const names[] = {"auto", "standard", "flash1", "flash2", "auto, fp8"};
    static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_F64, FATTN_BF16, FATTN_F16};
    printf("\n%s kernels for B 1, H 8, N %lld, d %lld%s\n", fattn_ctx_device(ctx) == FATTN_CPU ? "CPU" : "GPU",
           (long long)o->rows, (long long)o->head_dim, o->causal ? ", causal" : "");
    printf("%-10s%-7s%-46s%-46s%10s%11s\n", "algorithm", "dtype", "forward", "backward", "saved", "workspace");
    for (int a = FATTN_ALGO_AUTO; a <= FATTN_ALGO_FLASH2 + 1; ++a) {
        const bool fp8 = a > FATTN_ALGO_FLASH2; /* of auto, which is the last row */
        const uint32_t flags = (o->causal ? FATTN_CAUSAL : 0u) | (fp8 ? FATTN_FP8 : 0u);
        for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; ++d) {
            const layer_shape shape = {dtypes[d], 1, 8, 8, o->rows, o->rows, o->head_dim};
            layer l;
            const fattn_status s = layer_plan(&l, ctx, &shape, fp8 ? FATTN_ALGO_AUTO : (fattn_algorithm)a, flags);
            printf("%-10s%-7s", names[a], fattn_dtype_name(dtypes[d]));
            char saved[32], workspace[32];
            if (s == FATTN_OK)
                printf("%-46s%-46s%10s%11s\n", l.plan.fwd_kernel, l.plan.bwd_kernel,
                       text_of_bytes((double)l.plan.saved_bytes, saved),
                       text_of_bytes((double)l.plan.bwd_workspace, workspace));
            else
                printf("%s\n", s == FATTN_E_UNSUPPORTED && o->arch < 0 ? "not supported" : fattn_ctx_error(ctx));
        }
    }
}

static int run(const void *options, int n_operands, char *const *operands) {
    (void)n_operands, (void)operands;
    const struct options *o = options;
    print_build();
    print_cpu();
    char why[MESSAGE_BYTES] = "";
    fattn_ctx *const cuda = open_device(FATTN_CUDA, 0, o->arch < 0 ? 0 : archs[o->arch], why);
    if (!cuda && o->arch >= 0) return CLI_FAILURE;
    if (cuda) print_kernels(cuda, o);
    fattn_ctx_destroy(cuda);
    if (o->arch >= 0) return CLI_OK;
    fattn_ctx *const cpu = open_device(FATTN_CPU, (int)o->threads, 0, why);
    if (!cpu) return CLI_FAILURE;
    print_kernels(cpu, o);
    fattn_ctx_destroy(cpu);
    return CLI_OK;
}

const cli_command cmd_info = {
    .name = "info",
    .summary = "Version, build, devices, instruction sets and kernels",
    .details = "The kernels are those that the library would choose for the shape that the options\n"
               "give, for each algorithm and data type, and the memory that they would need.\n"
               "fp8: forward on 8-bit copies (FATTN_FP8).",
    .options = table,
    .defaults = &defaults,
    .size = sizeof defaults,
    .run = run,
};
