#!/bin/sh
# oneDNN is optional: a build with FATTN_ONEDNN=OFF does not contain it, and passes the tests of the ops that use it.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tests='test_gemm_bf16 test_op_bf16 test_op_linear test_op_narrow'

quietly() {
    "$@" > "$work/log" 2>&1 || {
        cat "$work/log"
        exit 1
    }
}
quietly cmake -S "$FATTN_SOURCE" -B "$work/build" -DFATTN_ONEDNN=OFF -DFATTN_CUDA=OFF -DFATTN_BUILD_FIXTURE=OFF \
    -DFATTN_BUILD_CLI=OFF -DCMAKE_BUILD_TYPE=Debug
# shellcheck disable=SC2086
quietly cmake --build "$work/build" -j 2 --target fattn $tests
readelf -d "$work/build/lib/libfattn.so" > "$work/needed"
grep -q 'NEEDED.*openblas' "$work/needed"
if grep 'NEEDED.*dnnl' "$work/needed"; then
    echo 'FATTN_ONEDNN=OFF, but libfattn.so needs oneDNN'
    exit 1
fi
for test in $tests; do
    quietly "$work/build/bin/$test" --jobs=1
    tail -n 1 "$work/log"
done
