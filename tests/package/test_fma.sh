#!/bin/sh
# The tiles for AVX2 and AVX-512 must be contracted to fused multiply-adds, on registers of their own
# width: -std=c11 alone would forbid the first, wrong flags would lose the second.
set -eu
case $(uname -m) in x86_64) ;; *) echo "no x86-64 code in this build"; exit 0 ;; esac
for isa in avx2:ymm avx512:zmm; do
    object=$(find "$FATTN_BUILD" -path "*fattn_core.dir*/tile_${isa%:*}.c.o" | head -n 1)
    [ -n "$object" ] || { echo "no object of tile_${isa%:*}.c below $FATTN_BUILD"; exit 1; }
    for type in ps pd; do
        found=$(objdump -d "$object" | grep -c "vfmadd[0-9]*$type.*%${isa#*:}" || true)
        echo "${isa%:*}: $found vfmadd...$type on ${isa#*:} registers"
        [ "$found" -ge 100 ] || exit 1
    done
done
