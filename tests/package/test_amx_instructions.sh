#!/bin/sh
# TDPFP16PS is written by its bytes (core/cpu/product_amx.inc), for which the tests on CPUs without it have a model. The
# disassembler must find it in tile_amxfp16.c with the operands that TDPBF16PS has in tile_amx.c, as many times.
set -eu
case $(uname -m) in x86_64) ;; *) echo "no x86-64 code in this build"; exit 0 ;; esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# products TABLE INSTRUCTION: operands, one line each.
products() {
    object=$(find "$FATTN_BUILD" -path "*fattn_core.dir*/tile_$1.c.o" | head -n 1)
    [ -n "$object" ] || { echo "no object of tile_$1.c below $FATTN_BUILD"; exit 1; }
    objdump -d --no-show-raw-insn "$object" | sed -n "s/.*[[:space:]]$2 *//p" | sort > "$work/$1"
    echo "$1: $(wc -l < "$work/$1") $2"
}
printf '\304\342\143\134\312' > "$work/code"
objdump -D -b binary -m i386:x86-64 "$work/code" | grep -q 'tdpfp16ps %tmm3,%tmm2,%tmm1' ||
    { echo "objdump does not know TDPFP16PS"; exit 77; }
products amx tdpbf16ps
products amxfp16 tdpfp16ps
diff "$work/amx" "$work/amxfp16"
! objdump -d "$object" | grep -e tdpbf16ps -e '(bad)'
