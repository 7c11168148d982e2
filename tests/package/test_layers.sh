#!/bin/sh
# The rules of README.md, "Folders": includes are paths from the root, a folder includes only what its row
# allows, only one header tests for CUDA, no folder has more than 25 files, no two headers have the same
# guard, no two headers of the tests the same name, and no external name of the library is defined twice.
set -eu
cd "$FATTN_SOURCE"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
status=0

find core fwd bwd autograd_c cli -type f > "$work/files"
grep -E '\.(c|h|cu|cuh|inc)$' "$work/files" > "$work/sources"
[ "$(wc -l < "$work/sources")" -gt 250 ] || { echo 'too few sources: this test looks at the wrong folder'; exit 1; }

# Folder: what its files may include beside <...> and their own folder. "a/*": everything below a.
cat > "$work/rules" <<'END'
core/base          -
core/files         -
core/tensor        core/base
core/attention     core/base core/tensor core/fp8
core/fp8           core/base core/tensor core/attention core/cuda core/device core/ptx
core/kv_cache      core/base core/tensor core/cuda core/device
core/sampling      core/base core/tensor core/cuda core/device core/ptx
core/cpu           core/base core/tensor core/attention core/kv_cache core/sampling core/fp8
core/cuda          core/base core/tensor core/attention core/kv_cache core/sampling core/fp8 core/ptx core/cuda/blas
core/cuda/blas     core/base core/cuda
core/ptx           -
core/device        core/ptx core/tensor core/attention core/cuda
core/comm          core/base core/tensor core/cuda
core/comm/mpi      core/base
core/context_parallel core/base core/tensor core/attention core/comm
core/materialized  core/*
fwd                core/base core/attention
fwd/ref            core/attention
fwd/cpu            core/base core/attention core/cpu core/fp8
fwd/cuda           core/*
fwd/cuda/sm90      core/* fwd/cuda
fwd/cuda/flash1    core/* fwd/cuda
fwd/materialized   core/* fwd/cpu fwd/cuda
bwd                core/base core/attention
bwd/ref            core/attention
bwd/cpu            core/base core/attention core/cpu
bwd/cuda           core/*
bwd/cuda/sm90      core/* bwd/cuda
bwd/cuda/huge      core/* bwd/cuda
bwd/cuda/rows      core/* bwd/cuda
bwd/materialized   core/* bwd/cpu bwd/cuda
autograd_c/fixture core/base core/tensor core/files
autograd_c/optim   core/* autograd_c/*
autograd_c/parallel core/* autograd_c/*
autograd_c/tape    core/* autograd_c/*
autograd_c/ops     core/* autograd_c/*
cli/base           -
cli/output         cli/base
cli/measure        cli/base cli/output
cli/random         core/tensor
cli/ranks          cli/base
cli/tasks          cli/base cli/output cli/random
cli/train          cli/base cli/output cli/random cli/ranks cli/tasks core/files
cli/sample         cli/base cli/random cli/train
cli/llmc           cli/base cli/output cli/random cli/tasks cli/train core/tensor
cli/commands       cli/base cli/output cli/measure cli/ranks cli/tasks cli/train cli/llmc cli/sample
END

# FILE INCLUDED for every include in quotes; generated headers (*.def) have no folder.
while read -r file; do
    sed -nE 's/^ *# *(include|define +BODY) +"([^"]*)".*/\2/p' "$file" | grep -v '\.def$' | sed "s|^|$file |"
done < "$work/sources" > "$work/includes"

awk -v rules="$work/rules" '
function folder(path) { sub(/\/[^\/]*$/, "", path); return path }
function row(path) { # the rule of the folder or of the one above
    while (!(path in allowed) && path ~ /\//) path = folder(path)
    return path
}
BEGIN {
    while ((getline line < rules) > 0) {
        split(line, w, " +"); key = w[1]
        sub(/^[^ ]+ +/, "", line)
        allowed[key] = line
    }
}
{
    from = folder($1); to = folder($2)
    if (system("test -f " $2) != 0) { print $1 ": \"" $2 "\" is no path from the root"; bad = 1; next }
    key = row(from)
    if (!(key in allowed)) { print $1 ": its folder has no rule"; bad = 1; next }
    if (to == from) next
    n = split(allowed[key], w, " +"); good = 0
    for (i = 1; i <= n; ++i) {
        if (w[i] == to) good = 1
        if (w[i] ~ /\*$/ && index(to "/", substr(w[i], 1, length(w[i]) - 1)) == 1) good = 1
    }
    if (!good) { print $1 ": may not include " $2; bad = 1 }
}
END { exit bad }' "$work/includes" || status=1

# Table rows for a GPU are inside FATTNI_WITH_CUDA(...); code that needs more belongs to another folder.
{ cat "$work/files"; find include cli data examples cmake -type f; echo CMakeLists.txt; } | sort -u |
    xargs grep -l 'FATTNI_HAVE_CUDA' > "$work/asking" || true
printf '%s\n' CMakeLists.txt core/base/with_cuda.h > "$work/may_ask"
if ! diff "$work/may_ask" "$work/asking"; then
    echo 'FATTNI_HAVE_CUDA is used in other files than these'
    status=1
fi

sed 's|/[^/]*$||' "$work/files" | sort | uniq -c |
    awk '$1 > 25 { print $2 " has " $1 " files"; bad = 1 } END { exit bad }' || status=1

grep -E '\.(h|cuh)$' "$work/sources" | xargs grep -hE '^#ifndef [A-Z0-9_]+_H$' | sort | uniq -d > "$work/twice"
if [ -s "$work/twice" ]; then
    echo 'guards of two headers:'
    cat "$work/twice"
    status=1
fi

# Tests include each other's headers by name alone: of two with one name the folder of the includer would decide.
find tests -name '*.h' | sed 's|.*/||' | sort | uniq -d > "$work/names_twice"
if [ -s "$work/names_twice" ]; then
    echo 'names of two headers in tests:'
    cat "$work/names_twice"
    status=1
fi

# Kernels that fattni_cuda_start launches wait for the kernel before them; of attention (K_NAME) those that say so in
# their description (Hopper's backward: below), the others are launched otherwise. Some wait only when they have
# computed addresses: they load and store nothing before.
waiting=$(grep -rl '^DESCRIBE_KERNEL_THAT_WAITS(' fwd bwd | grep -v bwd/cuda/sm90/ | tr '\n' ' ')
[ -n "$waiting" ] || { echo 'no attention kernel waits: this test looks for another name'; status=1; }
find autograd_c core fwd bwd -name '*.cu' -o -name '*.inc' -o -name '*.cuh' | xargs awk -v waiting=" $waiting" '
/__global__/ { head = ""; inside = 1 }
inside { head = head $0 }
inside && /\{ *\\?$/ {
    inside = 0; all += 1
    if (head !~ /K_NAME/ || index(waiting, " " FILENAME " ")) next_line = FNR + 1
    next
}
FNR == 1 { early = 0 }
early && /grid_dependency_wait_after\(/ { early = 0; late += 1 }
early && /(load|store)[a-z0-9_]*\(/ { print FILENAME ":" FNR ": before grid_dependency_wait_after()"; bad = 1 }
FNR == next_line && /grid_dependents_start\(\);/ { early = 1; starts += 1; begun += 1; next_line = 0; next }
FNR == next_line && !/begin_grid\(\);/ { print FILENAME ":" FNR ": a kernel without begin_grid()"; bad = 1 }
FNR == next_line { next_line = 0; begun += 1 }
END { if (starts != late) { print "a kernel that starts early does not wait"; bad = 1 }
    if (begun < 50 || all <= begun) { print "kernels were not found: " begun " of " all; bad = 1 } exit bad }' ||
    status=1
# Hopper's backward kernels wait when their mbarriers are there, before all that reads or writes the device's memory.
grep -l __global__ bwd/cuda/sm90/*.cuh | grep -v dbias > "$work/hopper"
[ "$(wc -l < "$work/hopper")" -eq 3 ] || { echo "kernels of Hopper's backward: not three files"; status=1; }
xargs awk 'FNR == 1 { inside = 0 } /__global__/ { inside = 1 }
inside && /grid_dependency_wait\(\);/ { waits[FILENAME] = 1; inside = 0 }
inside && /(search|preprocess|postprocess|produce|consume|run_short|load|store|atomic)[a-z_]*\(/ {
    print FILENAME ":" FNR ": before grid_dependency_wait()"; bad = 1 }
END { for (n = 1; n < ARGC; ++n) if (!waits[ARGV[n]]) { print ARGV[n] ": no grid_dependency_wait()"; bad = 1 }
    exit bad }' < "$work/hopper" || status=1
# Those of huge rows wait in has_tasks, before all that reads or writes the device's memory.
grep -l __global__ bwd/cuda/huge/*.cuh > "$work/huge"
[ -s "$work/huge" ] || { echo 'no kernels of huge rows: this test looks in another folder'; status=1; }
xargs awk 'FNR == 1 { inside = 0 } /__global__/ { inside = 1 } inside && /has_tasks/ { waits[FILENAME] = 1 }
inside && /(args\.|->|run_tasks)/ && !waits[FILENAME] { print FILENAME ":" FNR ": before has_tasks"; bad = 1 }
END { for (n = 1; n < ARGC; ++n) if (!waits[ARGV[n]]) { print ARGV[n] ": no has_tasks"; bad = 1 } exit bad }' \
    < "$work/huge" || status=1

nm --defined-only --extern-only "$FATTN_BUILD/lib/libfattn_internal.a" 2> /dev/null |
    awk '$2 ~ /[TDRBC]/ { print $3 }' | sort > "$work/names"
grep -q '^fattni_' "$work/names" ||
    { echo 'libfattn_internal.a defines nothing: the test reads the wrong file'; exit 1; }
if uniq -d < "$work/names" | grep .; then
    echo 'these names are defined twice'
    status=1
fi
sed 's|/[^/]*$||' "$work/files" | sort | uniq -c
exit $status
