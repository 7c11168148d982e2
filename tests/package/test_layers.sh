#!/bin/sh
# The house's rules (README.md, "Folders"): includes are written from the root, a folder includes only what its
# row allows, no folder has more than 25 files, no two headers have one guard, and no external name of the library
# is defined twice.
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
core/tensor        core/base
core/attention     core/base core/tensor
core/cpu           core/base core/tensor core/attention
core/cuda          core/base core/tensor core/attention
core/ptx           -
core/device        core/ptx core/tensor core/attention core/cuda
core/materialized  core/*
fwd                core/attention
fwd/ref            core/attention
fwd/cpu            core/base core/attention core/cpu
fwd/cuda           core/*
fwd/materialized   core/* fwd/cpu fwd/cuda
bwd                core/attention
bwd/ref            core/attention
bwd/cpu            core/base core/attention core/cpu
bwd/cuda           core/*
bwd/materialized   core/* bwd/cpu bwd/cuda
autograd_c/fixture core/base core/tensor
autograd_c/optim   core/* autograd_c/*
autograd_c/tape    core/* autograd_c/*
autograd_c/ops     core/* autograd_c/*
cli/base           -
cli/output         cli/base
cli/measure        cli/base cli/output
cli/train          cli/base cli/output core/tensor
cli/commands       cli/base cli/output cli/measure cli/train
END
# Not as they should be: the device's part of memory, contexts and tensors is called by name.
cat > "$work/exceptions" <<'END'
core/base/alloc.c core/cuda/launch.h
core/base/context.c core/cpu/gemm_cpu.h
core/base/context.c core/cuda/device.h
core/tensor/tensor.c core/cuda/tensor.h
END

# FILE INCLUDED for every include in quotes; generated headers (*.def) have no folder.
while read -r file; do
    sed -nE 's/^ *# *(include|define +BODY) +"([^"]*)".*/\2/p' "$file" | grep -v '\.def$' | sed "s|^|$file |"
done < "$work/sources" > "$work/includes"

awk -v rules="$work/rules" -v exceptions="$work/exceptions" '
function folder(path) { sub(/\/[^\/]*$/, "", path); return path }
function row(path) { # the rule of the folder or of the one above
    while (!(path in allowed) && path ~ /\//) path = folder(path)
    return path
}
BEGIN {
    while ((getline line < rules) > 0) { split(line, w, " +"); key = w[1]; sub(/^[^ ]+ +/, "", line); allowed[key] = line }
    while ((getline line < exceptions) > 0) excused[line] = 1
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
    if (good) next
    if ($0 in excused) { used[$0] = 1; next }
    print $1 ": may not include " $2; bad = 1
}
END {
    for (e in excused) if (!(e in used)) { print "no longer an exception: " e; bad = 1 }
    exit bad
}' "$work/includes" || status=1

sed 's|/[^/]*$||' "$work/files" | sort | uniq -c | awk '$1 > 25 { print $2 " has " $1 " files"; bad = 1 } END { exit bad }' ||
    status=1

grep -E '\.(h|cuh)$' "$work/sources" | xargs grep -hE '^#ifndef [A-Z0-9_]+_H$' | sort | uniq -d > "$work/twice"
if [ -s "$work/twice" ]; then
    echo 'guards of two headers:'
    cat "$work/twice"
    status=1
fi

nm --defined-only --extern-only "$FATTN_BUILD/lib/libfattn_internal.a" 2> /dev/null |
    awk '$2 ~ /[TDRBC]/ { print $3 }' | sort > "$work/names"
grep -q '^fattni_' "$work/names" || { echo 'libfattn_internal.a defines nothing: this test looks at the wrong file'; exit 1; }
if uniq -d < "$work/names" | grep .; then
    echo 'these names are defined twice'
    status=1
fi
sed 's|/[^/]*$||' "$work/files" | sort | uniq -c
exit $status
