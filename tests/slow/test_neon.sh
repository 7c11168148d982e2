#!/bin/sh
# The CPU's tiles as NEON code: cross-compiled and run under qemu, with the replacement of Criterion that is
# also used with the thread sanitizer, and a plain BLAS.
set -eu
cc=aarch64-linux-gnu-gcc
for tool in $cc qemu-aarch64; do
    command -v $tool > /dev/null || { echo "$tool is not installed"; exit 77; }
done
cd "$FATTN_SOURCE"
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
mkdir "$out/include"
ln -s /usr/include/Random123 "$out/include/"
for header in cblas.h openblas_config.h; do # of any architecture's OpenBLAS
    cp "$(find /usr/include -path '*openblas*' -name $header | head -n 1)" "$out/include/"
done

flags="-O2 -std=gnu11 -ffp-contract=off -fopenmp -Iinclude -I. -Itests/support -Itests/tsan -isystem $out/include"
for file in $(find core fwd bwd -name "*.c") tests/support/attention.c tests/support/cases.c tests/support/tiles.c \
    tests/support/ref_*.c tests/slow/plain_blas.c; do
    case $file in
    *cuda* | */mpi/* | */onednn.c) continue ;; # of libraries that are there for this machine alone
    esac
    $cc $flags -DTSAN_NO_MAIN -c "$file" -o "$out/$(echo "$file" | tr / -).o"
done
aarch64-linux-gnu-objdump -d "$out/core-cpu-tile_baseline.c.o" | grep -q 'fmla.*v[0-9]*\.4s' ||
    { echo "no vector multiply-add in the tiles"; exit 1; }

# run FILE [TEST]: its tests, or that one, each in a process of its own
run() {
    $cc $flags "$1" "$out"/*.o -lm -o "$out/program"
    grep -o '^Test([a-z0-9_]*, [a-z0-9_]*' "$1" | sed 's/Test(//; s/,//' | grep -w -- "${2:-.*}" |
        while read -r suite name; do
            status=0
            qemu-aarch64 -L /usr/aarch64-linux-gnu "$out/program" "$suite" "$name" || status=$?
            case $status in
            0) echo "passed: $suite::$name" ;;
            3) echo "not on this architecture: $suite::$name" ;;
            *) echo "FAILED: $suite::$name"; exit 1 ;;
            esac
        done
}
run tests/unit/test_cpu_tile.c
run tests/attention/test_tiles.c each_feature
run tests/attention/test_tiles.c slices_of_qkv
run tests/attention/test_tiles_extremes.c sinks_at_the_ends
run tests/attention/test_tiles_extremes.c very_negative_logits
run tests/attention/test_tiles_extremes.c a_row_s_bits_are_its_own
