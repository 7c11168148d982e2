# The program from the outside: exit codes, error messages, help of every command, full disks, bad files.
set -u
fattn=$FATTN_BUILD/bin/fattn
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
failed=0

# expect CODE TEXT WORD...: `fattn WORD...` exits with CODE; what it prints has TEXT in it.
expect() {
    code=$1 text=$2
    shift 2
    "$fattn" "$@" > out.txt 2>&1
    got=$?
    if [ $got != "$code" ] || ! grep -qF -e "$text" out.txt; then
        echo "FAIL: fattn $*: exit code $got, expected $code and \"$text\" in:"
        cat out.txt
        failed=1
    fi
}

# full TEXT WORD...: the same with standard output on a full disk: exit code 1, TEXT on stderr.
full() {
    text=$1
    shift
    "$fattn" "$@" > /dev/full 2> out.txt
    got=$?
    if [ $got != 1 ] || ! grep -qF -e "$text" out.txt; then
        echo "FAIL: fattn $* > /dev/full: exit code $got, stderr:"
        cat out.txt
        failed=1
    fi
}

expect 2 'usage: fattn COMMAND'
expect 0 'usage: fattn COMMAND' --help
expect 0 'fattn 0.' --version
expect 2 'unknown command "fly"' fly
commands=$("$fattn" --help | sed -n 's/^  \([a-z]*\) .*/\1/p')
for command in $commands; do
    expect 0 "usage: fattn $command" "$command" --help
    expect 2 "fattn $command: unknown option --nonsense" "$command" --nonsense
    full 'cannot write to standard output' "$command" --help
done

expect 0 'kernels for B 1, H 8, N 77, d 32, causal' info --n 77 --d 32 --causal
expect 0 'fattn_bwd_cpu' info
expect 2 '--arch: "60"' info --arch 60
expect 2 '--arch: "76" is not one of 75|80|86|87|89|90|100|103|120|121' info --arch 76
if "$fattn" info --arch 76 2> out.txt | grep -q .; then
    echo 'FAIL: fattn info --arch 76 prints on standard output'
    failed=1
fi
if "$fattn" info --arch 89 2>&1 | grep -q 'built without CUDA'; then
    expect 1 'it supports the CPU only' info --arch 89
else
    expect 0 'plans for sm_89, 99 KiB of shared memory' info --arch 89
fi
expect 2 '--d: "257" is not a whole number from 1 to 256' info --d 257
expect 2 'unexpected "more"' info more
full 'cannot write to standard output' info
for command in tokens bench check eval convert; do
    expect 2 "fattn $command: operand 1 is empty" "$command" ''
done
expect 2 'fattn convert: operand 2 is empty' convert none.bin ''

# An OpenBLAS that does not know the CPU is many times slower.
if grep -q ' avx2 ' /proc/cpuinfo; then
    export OPENBLAS_CORETYPE=Prescott
    expect 0 'OpenBLAS does not know this CPU' info
    expect 0 'OpenBLAS does not know this CPU' bench attention --n 16 --repeat 1 --algorithm auto
    unset OPENBLAS_CORETYPE
    # Of such a CPU itself the program tells it.
    if "$fattn" info 2>&1 | grep -q 'OpenBLAS'; then
        echo 'FAIL: fattn info leaves OpenBLAS with kernels that are slow on this CPU'
        failed=1
    fi
fi

exit $failed
