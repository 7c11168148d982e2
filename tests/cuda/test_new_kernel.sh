#!/bin/sh
# A new CUDA kernel is one line of a list and one file: adds one to a copy of the tree in that way, builds it, looks for
# its description in the list, and runs it in the emulation. The copy's path has a space.
set -eu
temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
scratch="$temporary/a copy"
mkdir "$scratch"
cd "$FATTN_SOURCE"
cp -r CMakeLists.txt cmake include core fwd bwd autograd_c data tests examples "$scratch"

cp tests/cuda/new_kernel/fwd_simple.cuh "$scratch/fwd/cuda/"
echo 'K(80, simple, f32, 64, general, 128, 32, 4, 1)' >> "$scratch/fwd/cuda/fwd_kernels.def"

name=fwd_simple_f32_d64_general_128x32
build() { "$@" > "$scratch/log" 2>&1 || { cat "$scratch/log"; exit 1; }; }
build cmake -S "$scratch" -B "$scratch/build" -DCMAKE_BUILD_TYPE=Release -DFATTN_BUILD_CLI=OFF \
    -DFATTN_BUILD_FIXTURE=OFF -DFATTN_CUDA=ON -DFATTN_CUDA_KERNELS=ON -DCMAKE_CUDA_COMPILER="$FATTN_NVCC" \
    -DCMAKE_CUDA_ARCHITECTURES=80-real -DFATTN_KERNELS=simple -DFATTN_EMULATED_KERNELS=$name
build cmake --build "$scratch/build" --target emulated_$name cuda_kernel_table
table=$("$(find "$scratch/build" -name cuda_kernel_table -type f)")
echo "$table"
[ "$table" = "fattn_$name 128 0" ] || { echo "expected: fattn_$name 128 0"; exit 1; }
"$(find "$scratch/build" -name "emulated_$name" -type f)"
