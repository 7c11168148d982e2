#!/bin/sh
# Installs, then moves what was installed: the program runs, and a project outside the tree finds the
# libraries by find_package and by pkg-config, builds and runs. Then once more with static libraries, which are built
# with flags of a user that change every file. With MPI, where it was built, on two ranks.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "$FATTN_SOURCE/tests/package/consumer" "$work/project"

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe # Open MPI 5

# consume PREFIX: both ways, in PREFIX's name only.
consume() {
    cmake -S "$work/project" -B "$1-cmake" -DCMAKE_PREFIX_PATH="$1" > "$work/log" || {
        cat "$work/log"
        return 1
    }
    grep -q "fattn_DIR:PATH=$1/" "$1-cmake/CMakeCache.txt"
    cmake --build "$1-cmake" > "$work/log" || {
        cat "$work/log"
        return 1
    }
    "$1-cmake/attend"
    "$1-cmake/store" "$work/cmake.h5"

    PKG_CONFIG_PATH=$(dirname "$(find "$1" -name fattn.pc)")
    export PKG_CONFIG_PATH
    library=$(pkg-config --variable=libdir fattn)
    # shellcheck disable=SC2046
    {
        cc -std=c11 "$work/project/attend.c" -o "$1-attend" $(pkg-config $2 --cflags --libs fattn) -lm
        cc -std=c11 "$work/project/store.c" -o "$1-store" $(pkg-config $2 --cflags --libs fattn-fixture)
    }
    LD_LIBRARY_PATH=$library "$1-attend"
    LD_LIBRARY_PATH=$library "$1-store" "$work/pkg-config.h5"
    [ "$(pkg-config --modversion fattn)" = 0.1.0 ]
    if pkg-config --exists fattn-mpi; then
        mpirun -n 2 "$1-cmake/ranks"
        # shellcheck disable=SC2046
        mpicc -std=c11 "$work/project/ranks.c" -o "$1-ranks" $(pkg-config $2 --cflags --libs fattn-mpi)
        LD_LIBRARY_PATH=$library mpirun -n 2 "$1-ranks"
    fi
}

cmake --install "$FATTN_BUILD" --prefix "$work/before" > /dev/null
mv "$work/before" "$work/shared"
"$work/shared/bin/fattn" info > /dev/null
consume "$work/shared" ''
readelf -d "$work/shared-attend" | grep -q 'NEEDED.*libfattn\.so\.0\.1\]'

cmake -S "$FATTN_SOURCE" -B "$work/static-build" -DBUILD_SHARED_LIBS=OFF -DFATTN_BUILD_TESTS=OFF \
    -DFATTN_BUILD_CLI=OFF -DFATTN_CUDA=off "-DCMAKE_C_FLAGS=-march=native -ffast-math" \
    -DCMAKE_BUILD_TYPE=Debug > /dev/null
cmake --build "$work/static-build" -j 2 > /dev/null
cmake --install "$work/static-build" --prefix "$work/elsewhere" > /dev/null
mv "$work/elsewhere" "$work/static"
consume "$work/static" --static
if readelf -d "$work/static-attend" | grep 'NEEDED.*libfattn'; then
    echo 'the static consumer needs the shared library'
    exit 1
fi
echo 'all consumers built and run'
