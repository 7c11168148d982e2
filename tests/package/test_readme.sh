#!/bin/sh
# Checks README.md: its attention call computes attention and its gradients, its training step trains, its
# make targets, presets, files, links and public names exist.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$FATTN_SOURCE"
status=0
complain() {
    echo "$1"
    status=1
}

# block N FILE: the N-th ```c block; build NAME FLAG...: $work/NAME from $work/NAME.c.
block() {
    awk -v wanted="$1" '/^```c$/ { inside = ++n == wanted; next } /^```$/ { inside = 0 } inside' README.md > "$2"
}
build() {
    name=$1
    shift
    gcc -std=c11 -O1 -Wall -Wextra -Werror -Wno-missing-prototypes -Iinclude "$@" "$work/$name.c" -o "$work/$name" \
        -L"$FATTN_BUILD/lib" -lfattn -lm -Wl,-rpath,"$FATTN_BUILD/lib"
}
[ "$(grep -c '^```c$' README.md)" -eq 2 ] || complain 'README.md: not two blocks of C'

# The first one is a program; then with a main that gives it inputs and looks at its results.
block 1 "$work/call.c"
lines=$(wc -l < "$work/call.c")
[ "$lines" -le 50 ] && [ "$lines" -ge 25 ] || complain "the attention call has $lines lines"
build call
"$work/call" || complain 'the attention call fails'
cat "$work/call.c" tests/package/readme_main.c > "$work/checked_call.c"
build checked_call -Dmain=readme_call -DREADME_CALL
"$work/checked_call" || complain 'the attention call is not attention'

# The second one, and a main for it.
block 2 "$work/step.c"
lines=$(wc -l < "$work/step.c")
[ "$lines" -le 50 ] && [ "$lines" -ge 30 ] || complain "the training step has $lines lines"
cat tests/package/readme_main.c >> "$work/step.c"
build step
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
    for link in $(grep -oE '\]\([A-Za-z][A-Za-z0-9_./-]*\)' $text | tr -d '()]'); do
        [ -e "$link" ] || complain "$text: link to $link"
    done
done
for name in $(grep -oE '\b(fattn|FATTN)_[A-Za-z0-9_]*[A-Za-z0-9]\b' README.md | sort -u); do
    grep -qw "$name" include/fattn/*.h CMakeLists.txt cmake/*.cmake || complain "README.md: $name does not exist"
done
for command in $(grep -oE '`fattn [a-z]+`' README.md | tr -d '`' | sed 's/fattn //' | sort -u); do
    "$FATTN_BUILD/bin/fattn" "$command" --help > "$work/help" || complain "README.md: fattn $command"
done
sed -n '/^| ops |/,/^| your own/p' README.md | sed '1,2d;$d' | cut -d '|' -f 2 | grep -oE '[a-z_]+' |
    sort -u > "$work/ops"
grep -oE '\bfattn_op_[a-z_]+\(' include/fattn/tape.h | sed 's/^fattn_op_//; s/($//' |
    grep -vxE 'custom|attention_ex' | sort -u > "$work/declared"
[ "$(wc -l < "$work/declared")" -ge 30 ] || complain 'include/fattn/tape.h: too few ops found'
diff "$work/declared" "$work/ops" || complain "README.md: the ops in the table are not tape.h's"
exit $status
