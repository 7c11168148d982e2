#!/bin/sh
# README.md tells the truth: its training step compiles and trains, its make targets, presets, files
# and public names exist.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$FATTN_SOURCE"
status=0
complain() {
    echo "$1"
    status=1
}

# The first ```c block, and a main for it.
sed -n '/^```c$/,/^```$/p' README.md | sed '/^```/d' > "$work/step.c"
lines=$(wc -l < "$work/step.c")
[ "$lines" -le 50 ] && [ "$lines" -ge 30 ] || complain "the training step has $lines lines"
cat tests/package/readme_main.c >> "$work/step.c"
gcc -std=c11 -O1 -Wall -Wextra -Werror -Wno-missing-prototypes -Iinclude "$work/step.c" -o "$work/step" \
    -L"$FATTN_BUILD/lib" -lfattn -Wl,-rpath,"$FATTN_BUILD/lib"
"$work/step" || complain 'the training step does not train'

for text in README.md CONTRIBUTING.md STYLE.md; do
    for target in $(grep -oE '(^|`)make [a-z-]+' $text | sed 's/.*make //' | sort -u); do
        grep -qE "^$target:" Makefile || complain "$text: make $target: no such target"
    done
    for preset in $(grep -oE -- '(cmake|ctest|--build) --preset [a-z-]+' $text | sed 's/.* //' | sort -u); do
        grep -q "\"name\": \"$preset\"" CMakePresets.json || complain "$text: no preset $preset"
    done
    # Paths in backquotes, but for patterns (<name>) and generated ones.
    for path in $(grep -oE '`[A-Za-z_.]+/[A-Za-z0-9_./-]*`' $text | tr -d '`' | sort -u); do
        case $path in
        build/*) continue ;;
        fattn/*) path=include/$path ;;
        esac
        [ -e "$path" ] || complain "$text: $path does not exist"
    done
    for name in $(grep -oE '\bfattn_(op_)?[a-z]+_[a-z_]+\(' $text | tr -d '(' | sort -u); do
        grep -qw "$name" include/fattn/*.h || complain "$text: $name is not in the headers"
    done
    for link in $(grep -oE '\]\([A-Za-z.]+\)' $text | tr -d '()]'); do
        [ -e "$link" ] || complain "$text: link to $link"
    done
done
for command in $(grep -oE '`fattn [a-z]+`' README.md | tr -d '`' | sed 's/fattn //' | sort -u); do
    "$FATTN_BUILD/bin/fattn" "$command" --help > "$work/help" || complain "README.md: fattn $command"
done
for op in $(sed -n '/^Autograd, F32/,/own op/p' README.md | grep -oE '\b[a-z_]+,' | tr -d ,); do
    grep -q "fattn_op_$op(" include/fattn/tape.h || complain "README.md: no op $op"
done
exit $status
