#!/bin/sh
# Sources are as clang-format 14 writes them by .clang-format, and no line of code has more than 120 characters.
set -eu
cd "$FATTN_SOURCE"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
status=0

find include core fwd bwd autograd_c cli data examples tests bench cmake -type f |
    grep -E '\.(c|h|cu|cuh|inc|cpp|def|in|py|sh|cmake)$' | grep -v '^tests/package/dlpack/' > "$work/files"
grep -E '\.(c|h|cu|cuh|inc|cpp)$' "$work/files" > "$work/sources"
[ "$(wc -l < "$work/sources")" -gt 400 ] || { echo 'too few sources: this test looks at the wrong folder'; exit 1; }

while read -r file; do
    LC_ALL=C.UTF-8 awk -v file="$file" '
        length > 120 { print file ":" NR ": " length " characters"; bad = 1 }
        END { exit bad }' "$file" || status=1
done < "$work/files"

if ! command -v clang-format-14 > /dev/null; then
    echo 'clang-format-14 is not installed: only the length of lines was checked'
    [ $status = 0 ] && exit 77 || exit 1
fi
if ! xargs clang-format-14 --dry-run -Werror < "$work/sources" 2> "$work/log"; then
    grep -oE '^[^ ]*: error' "$work/log" | cut -d: -f1 | sort | uniq -c
    echo 'these files are not formatted: clang-format-14 -i FILE'
    status=1
fi
exit $status
