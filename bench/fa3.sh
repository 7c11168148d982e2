#!/bin/sh
# Builds libfa3.so, FlashAttention-3's kernels behind bench/fa3.cu:
#
#     bench/fa3.sh FLASH_ATTENTION CUTLASS FOLDER [REGEX]
#
# The first two are checkouts of their repository and of the CUTLASS commit it names. The folder keeps 42 objects,
# each of which takes minutes. With REGEX only objects whose names (such as bwd_128_128_bf16_4) match are compiled; the
# library has all that are there. An object that is newer than its source is not compiled again.
set -eu
attention=$1 cutlass=$2 folder=$3 wanted=${4:-.}
here=$(dirname "$0")
mkdir -p "$folder"

compile() { # NAME SOURCE FLAGS...
    object=$folder/$1.o source=$2
    shift 2
    if [ -e "$object" ] && [ "$object" -nt "$source" ]; then return; fi
    nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a --use_fast_math --expt-relaxed-constexpr \
        --expt-extended-lambda -DNDEBUG -DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED -DCUTLASS_ENABLE_GDC_FOR_SM90 \
        -I"$attention/hopper" -I"$cutlass/include" -Xcompiler -fPIC,-fno-gnu-unique "$@" -c "$source" \
        -o "$object.part"
    mv "$object.part" "$object"
}

kinds() { # HEAD_DIM HEAD_DIM_V DTYPE KINDS
    for kind in $4; do
        name=${pass}_$1_$2_$3_$kind
        if echo "$name" | grep -Eq -e "$wanted"; then
            compile "$name" "$here/fa3.cu" -DPASS=$pass -DHEAD_DIM=$1 -DHEAD_DIM_V=$2 -DDTYPE=$3 -DKIND=$kind
        fi
    done
}

compile prepare "$attention/hopper/flash_prepare_scheduler.cu"
# Packed forward (4, 5) is left out: called this way it ended with an illegal address on an H100.
for pass in bwd fwd; do
    packed="4 5"
    if [ $pass = fwd ]; then packed=; fi
    split=
    if [ $pass = fwd ]; then split=8; fi
    kinds 128 128 bf16 "2 1 0 3 $packed $split"
    kinds 64 64 bf16 "2 1 0 3 $packed $split"
    kinds 192 128 bf16 "0 ${packed%5}"
    for d in 256 192 96; do kinds $d $d bf16 "0 1"; done
    for d in 64 128; do kinds $d $d f16 "0"; done
done

# The same template has another body in each object, by the constants of its kind: only the C function stays global
# (unique symbols could not be made local).
rm -rf "$folder/local"
mkdir "$folder/local"
for object in "$folder"/[bf]wd_*.o; do
    name=$(basename "$object" .o)
    ld -r --force-group-allocation "$object" -o "$folder/local/$name.o"
    objcopy --keep-global-symbol="fa3_$name" "$folder/local/$name.o"
done
nvcc -shared -o "$folder/libfa3.so" "$folder/prepare.o" "$folder"/local/*.o
