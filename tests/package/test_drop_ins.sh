#!/bin/sh
# examples/llm.c and examples/llmq compile without warnings, for tensors in host memory and, with four names of CUDA's
# runtime, for a GPU; a C++ program that declares their functions as llm.c and LLM.Q do links with them and runs; where
# CUDA fails they say so and end the program.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
warnings='-std=c11 -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror'

cat > "$work/cuda_runtime_api.h" <<'END'
typedef enum cudaError { cudaSuccess, cudaErrorInsufficientDriver = 35 } cudaError_t;
cudaError_t cudaGetDevice(int *device);
const char *cudaGetErrorString(cudaError_t error);
END
compilers=gcc
command -v clang > /dev/null && compilers='clang gcc' || echo 'no clang here: gcc only'
for compiler in $compilers; do
    for name in llm.c llmq; do
        for how in "-DFATTN_ATT_ON_CPU -o $work/cpu_$name.o" "-I$work -o $work/gpu_$name.o"; do
            # shellcheck disable=SC2086
            $compiler $warnings -O1 -I"$FATTN_SOURCE/include" -c "$FATTN_SOURCE/examples/$name/fattn_att.c" $how
        done
    done
done

cat > "$work/cuda.c" <<'END'
#include "cuda_runtime_api.h"
cudaError_t cudaGetDevice(int *device) { return *device = -1, cudaErrorInsufficientDriver; }
const char *cudaGetErrorString(cudaError_t error) { return error == cudaErrorInsufficientDriver ? "too old" : "?"; }
END
gcc -c "$work/cuda.c" -o "$work/cuda.o"
for where in cpu gpu; do
    g++ -std=c++17 -Wall -Wextra -Werror "$FATTN_SOURCE/tests/package/drop_ins.cpp" "$work/${where}_llm.c.o" \
        "$work/${where}_llmq.o" "$work/cuda.o" -o "$work/$where" \
        -L"$FATTN_BUILD/lib" -lfattn -Wl,-rpath,"$FATTN_BUILD/lib"
done
OMP_NUM_THREADS=2 "$work/cpu" # more threads need a larger workspace
rc=0
"$work/gpu" 2> "$work/errors" || rc=$?
[ $rc = 1 ] || { echo "without a GPU: exit status $rc"; exit 1; }
grep -qxF '[FATTN ERROR] cudaGetDevice: too old' "$work/errors" || { cat "$work/errors"; exit 1; }
