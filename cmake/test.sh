#!/bin/bash
# test.sh JOBS PRESET...: configure, build and test each preset; counts and times at the end.
set -euo pipefail
jobs=$1
shift
summary=
for preset in "$@"; do
    begin=$SECONDS
    test -f "build/$preset/Makefile" || test -f "build/$preset/build.ninja" || cmake --preset "$preset"
    cmake --build --preset "$preset" -j "$jobs"
    built=$((SECONDS - begin))
    status=0
    log=build/$preset/Testing/Temporary/LastTest.log
    mkdir -p "${log%/*}"
    : > "$log" # ctest replaces it when it ends: not to count an earlier run's
    ctest --preset "$preset" -j "$jobs" || status=$?
    read -r passed inside < <(awk '
        /^Test Passed\./ { passed += 1 }
        /Synthesis: Tested:/ { sub(/.*Tested: */, ""); inside += $1 }
        END { print passed + 0, inside + 0 }' "$log")
    summary+="$preset: $passed ctest entries passed, with $inside Criterion tests inside;"
    summary+=" built in $built s, tested in $((SECONDS - begin - built)) s"$'\n'
    if [ $status != 0 ]; then
        printf '\n%s%s: FAILED\n' "$summary" "$preset"
        exit $status
    fi
done
printf '\n%stotal: %d min %d s\n' "$summary" $((SECONDS / 60)) $((SECONDS % 60))
