#!/bin/sh
# Each public header on its own: C11 and C++17, gcc and (where there is one) clang, every warning an
# error, no implicit padding, nothing included but <stddef.h>, <stdint.h> and its own kind.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
headers=$FATTN_SOURCE/include/fattn
warnings='-Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wpadded -Wundef -Werror'

foreign=$(grep -Hn '^ *# *include' "$headers"/*.h | grep -vE '<(stddef\.h|stdint\.h|fattn/[a-z0-9_]+\.h)>' || true)
if [ -n "$foreign" ]; then
    printf 'foreign includes in public headers:\n%s\n' "$foreign"
    exit 1
fi

compilers='gcc,-std=c11,c g++,-std=c++17,cc'
if command -v clang > /dev/null; then
    compilers="$compilers clang,-std=c11,c clang++,-std=c++17,cc"
else
    echo 'no clang here: gcc and g++ only'
fi
count=0
for header in "$headers"/*.h; do
    name=$(basename "$header")
    for entry in $compilers; do
        IFS=, read -r compiler standard extension <<END
$entry
END
        source=$work/one.$extension
        {
            [ "$name" = dlpack.h ] && echo '#include <dlpack/dlpack.h>'
            [ "$name" = mpi.h ] && echo 'typedef struct communicator *MPI_Comm;' # all that it uses of <mpi.h>
            # Twice: guards. A declaration that the compiler must understand after it.
            printf '#include <fattn/%s>\n#include <fattn/%s>\nint fattn_test_of_a_header;\n' "$name" "$name"
        } > "$source"
        # shellcheck disable=SC2086
        "$compiler" $standard $warnings -I"$FATTN_SOURCE/include" -isystem "$FATTN_SOURCE/tests/package" \
            -fsyntax-only "$source"
        count=$((count + 1))
    done
done
if [ -f /usr/include/dlpack/dlpack.h ]; then # Debian's libdlpack-dev: DLPack 0.6
    printf '#include <dlpack/dlpack.h>\n#include <fattn/dlpack.h>\n' > "$work/one.c"
    # shellcheck disable=SC2086
    gcc -std=c11 $warnings -I"$FATTN_SOURCE/include" -fsyntax-only "$work/one.c"
    count=$((count + 1))
fi
echo "$count compilations"

# C++ sees C names.
cat > "$work/link.cc" <<END
#include <fattn/fattn.h>
int main() { return fattn_version() == FATTN_VERSION ? 0 : 1; }
END
g++ -std=c++17 -I"$FATTN_SOURCE/include" "$work/link.cc" -o "$work/link" \
    -L"$FATTN_BUILD/lib" -lfattn -Wl,-rpath,"$FATTN_BUILD/lib"
"$work/link"
