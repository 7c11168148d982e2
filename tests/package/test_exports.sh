#!/bin/sh
# The shared libraries export what the public headers declare, as tests/golden/exports.txt has it,
# and nothing else. libfattn needs neither HDF5, MPI nor Criterion.
set -eu
export LC_ALL=C
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# declared HEADER...: names of the functions marked FATTN_API.
declared() {
    printf '#include <fattn/%s>\n' "$@" | gcc -E -P -I"$FATTN_SOURCE/include" - | tr '\n' ' ' |
        sed 's/;/;\n/g' | grep 'visibility("default")' |
        sed 's/^[^(]*visibility("default")*//; s/^.*[ *]\(fattn_[a-z0-9_]*\)(.*$/\1/' | sort -u
}
exported() {
    nm -D --defined-only "$1" | awk '$2 ~ /[A-Z]/ { print $3 }' | sort
}
status=0
compare() { # what, expected file, got file
    if ! diff -u "$2" "$3" > "$work/diff"; then
        echo "$1:"
        cat "$work/diff"
        status=1
    fi
}

declared fattn.h > "$work/core"
declared fattn.h fixture.h checkpoint.h | comm -13 "$work/core" - > "$work/fixture"
declared fattn.h mpi.h | comm -13 "$work/core" - > "$work/mpi"
cat "$work/core" "$work/fixture" "$work/mpi" > "$work/all"
compare 'tests/golden/exports.txt against the headers (meant? then change the file, too)' \
    "$FATTN_SOURCE/tests/golden/exports.txt" "$work/all"
exported "$FATTN_BUILD/lib/libfattn.so" > "$work/libfattn"
compare 'libfattn.so against the headers' "$work/core" "$work/libfattn"
exported "$FATTN_BUILD/lib/libfattn_fixture.so" > "$work/libfattn_fixture"
compare 'libfattn_fixture.so against fixture.h and checkpoint.h' "$work/fixture" "$work/libfattn_fixture"

if [ -f "$FATTN_BUILD/lib/libfattn_mpi.so" ]; then
    exported "$FATTN_BUILD/lib/libfattn_mpi.so" > "$work/libfattn_mpi"
    compare 'libfattn_mpi.so against mpi.h' "$work/mpi" "$work/libfattn_mpi"
fi

for library in hdf5 mpi criterion; do
    if readelf -d "$FATTN_BUILD/lib/libfattn.so" | grep "NEEDED.*$library"; then
        echo "libfattn.so needs $library"
        status=1
    fi
done
if ! readelf -d "$FATTN_BUILD/lib/libfattn_fixture.so" | grep -q 'NEEDED.*hdf5'; then
    echo 'libfattn_fixture.so does not need hdf5: the test reads the wrong file'
    status=1
fi

# The library neither prints nor ends the process. The static library has the same objects, without CUDA's
# runtime, which reads the environment.
forbidden='^(abort|exit|_exit|printf|puts|putchar|fprintf|fputs|__printf_chk|__fprintf_chk|getenv)$'
nm --undefined-only "$FATTN_BUILD/lib/libfattn_internal.a" > "$work/undefined" 2> /dev/null
grep -q ' malloc$\| aligned_alloc$' "$work/undefined" || {
    echo 'libfattn_internal.a allocates nothing: the test reads the wrong file'
    status=1
}
if awk '$1 == "U" { print $2 }' "$work/undefined" | sort -u | grep -E "$forbidden"; then
    echo 'libfattn.so calls functions that a library must not call'
    status=1
fi
exit $status
