#!/bin/bash
# plots.sh [RESULTS]: TFLOP/s against N, forward and backward, from a table of peers.py into
# bench/hopper_forward.svg and bench/hopper_backward.svg. Needs gnuplot.
set -euo pipefail
cd "$(dirname "$0")"
table=${1:-results/hopper_h200.txt}
data=$(mktemp)
trap 'rm -f "$data"' EXIT

# One block per head_dim and mask: N, forward and backward of ours, cuDNN, FlashAttention-2 and -3.
awk '/^d[0-9]+ +(full|causal) / {
    if ($1 $2 != last) { if (last) printf "\n\n"; last = $1 $2 }
    n = split($0, half, "|")
    for (k = 1; k <= 2; ++k) {
        split(half[k], word, " ")
        for (w in word) if (word[w] ~ /^(ours|cudnn|fa2|fa3)$/) speed[k, word[w]] = word[w + 1]
    }
    line = $3
    for (k = 1; k <= 2; ++k)
        line = line " " speed[k, "ours"] " " speed[k, "cudnn"] " " speed[k, "fa2"] " " speed[k, "fa3"]
    print line
}' "$table" > "$data"

draw() { # NAME TITLE FIRST_COLUMN
    gnuplot <<GNUPLOT
set terminal svg size 960,560 font "sans-serif,12" background "white"
set output "hopper_$1.svg"
set multiplot layout 2,3 title "$2, bf16, 16384 tokens, H200: TFLOP/s against N" font ",14"
set logscale x 2
set xtics (512, "1k" 1024, "2k" 2048, "4k" 4096, "8k" 8192, "16k" 16384)
set xrange [440:19000]
set yrange [0:850]
set grid ytics lc "#dddddd"
set key top left reverse Left samplen 1 maxrows 2 width -5 font ",10"
set style data linespoints
do for [panel = 0:5] {
    index = 2 * (panel % 3) + panel / 3
    if (panel > 0) { unset key }
    set title sprintf("head\\\\_dim %s, %s", word("64 128 256", panel % 3 + 1), panel < 3 ? "full" : "causal")
    plot "$data" index index using 1:$3 title "fattn" lc "#c0392b" lw 2 pt 7, \
         "" index index using 1:$(($3 + 1)) title "cuDNN 9.19" lc "#2c3e50" lw 2 pt 5, \
         "" index index using 1:$(($3 + 2)) title "FlashAttention-2" lc "#7f8c8d" lw 2 pt 9, \
         "" index index using 1:$(($3 + 3)) title "FlashAttention-3" lc "#2980b9" lw 2 pt 11
}
unset multiplot
GNUPLOT
}
draw forward Forward 2
draw backward Backward 6
