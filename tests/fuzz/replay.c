/* Runs a fuzz target without a fuzzer: fuzz_<target> SEEDS, a text file of one input per line, in
   hexadecimal ("-": empty; "#": a comment), and with each of them some that differ in a few bytes. */
#include "fuzz.h"

#include <string.h>

enum { LONGEST = 4096, VARIANTS = 2 };

static int digit(char c) {
    const char *const digits = "0123456789abcdef", *const at = c ? strchr(digits, c) : NULL;
    return at ? (int)(at - digits) : -1;
}

/* Bytes of the line; -1 when it is no input. */
static int parse(const char *line, uint8_t bytes[LONGEST]) {
    int size = 0;
    for (; size < LONGEST && digit(line[0]) >= 0 && digit(line[1]) >= 0; line += 2)
        bytes[size++] = (uint8_t)(digit(line[0]) << 4 | digit(line[1]));
    if (line[0] == '-' && size == 0) ++line;
    return line[0] == '\n' ? size : -1;
}

/* In memory of exactly its size, so that sanitizers find reads past the end. */
static void run(const uint8_t *bytes, size_t size) {
    uint8_t *const copy = malloc(size ? size : 1);
    FUZZ_CHECK(copy, "no memory");
    memcpy(copy, bytes, size);
    LLVMFuzzerTestOneInput(copy, size);
    free(copy);
}

static void run_variants(uint8_t *bytes, int size) {
    uint64_t state = 0x9E3779B97F4A7C15u ^ (uint64_t)size; /* Knuth's linear congruential numbers */
    for (int n = 0; n < VARIANTS && size > 0; ++n) {
        uint8_t variant[LONGEST];
        memcpy(variant, bytes, (size_t)size);
        for (int edit = 0; edit <= n % 4; ++edit) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            variant[(state >> 33) % (uint64_t)size] ^= (uint8_t)(1 + (state >> 25) % 255);
        }
        run(variant, (size_t)size);
    }
}

int main(int count, char **arguments) {
    FILE *const file = count == 2 ? fopen(arguments[1], "r") : NULL;
    FUZZ_CHECK(file, "the argument must be a readable file of seeds");
    static char line[2 * LONGEST + 2];
    int inputs = 0;
    for (int number = 1; fgets(line, sizeof line, file); ++number) {
        uint8_t bytes[LONGEST];
        if (line[0] == '#') continue;
        const int size = parse(line, bytes);
        FUZZ_CHECK(size >= 0, "%s:%d is no hexadecimal input", arguments[1], number);
        run(bytes, (size_t)size);
        run_variants(bytes, size);
        ++inputs;
    }
    fclose(file);
    FUZZ_CHECK(inputs > 0, "%s has no input", arguments[1]);
    printf("%d seeds, %d variants of each\n", inputs, VARIANTS);
    return 0;
}
