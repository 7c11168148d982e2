#!/bin/bash
# plots.sh [RESULTS [RANKS]]: TFLOP/s against N, forward and backward, from a table of peers.py into
# bench/hopper_forward.svg and bench/hopper_backward.svg; errors against the number of ranks and efficiency against N,
# from tables of ranks.c into bench/ranks_errors.svg and bench/ranks_speed.svg. Needs gnuplot.
set -euo pipefail
cd "$(dirname "$0")"
table=${1:-results/hopper_h200.txt}
ranks=${2:-results/ranks_h200.txt}
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

# ---- ranks ----

# One block per form: ranks, errors of o, dq, dk, dv in 1e-4 (bf16, causal).
awk '/^(ring|all-gather|ulysses) +bf16 +causal/ {
    if ($1 != last) { if (last) printf "\n\n"; last = $1 }
    print $5, $(NF - 3), $(NF - 2), $(NF - 1), $NF
}' "$ranks" > "$data"
gnuplot <<GNUPLOT
set terminal svg size 960,320 font "sans-serif,12" background "white"
set output "ranks_errors.svg"
set multiplot layout 1,2 title "relative error against F64, bf16, causal, N 1500" font ",14"
set logscale x 2
set xtics (1, 2, 4)
set xrange [0.9:4.5]
set yrange [0:0.003]
set format y "%.4f"
set grid ytics lc "#dddddd"
set key bottom left
set style data linespoints
set xlabel "ranks"
do for [c = 2:3] {
    set title (c == 2 ? "o" : "dq")
    plot "$data" index 0 using 1:(column(c) * 1e-4) title "ring" lc "#c0392b" lw 2 pt 7, \
         "" index 1 using 1:(column(c) * 1e-4) title "all-gather" lc "#2c3e50" lw 2 pt 5, \
         "" index 2 using 1:(column(c) * 1e-4) title "Ulysses" lc "#2980b9" lw 2 pt 9
}
unset multiplot
GNUPLOT

# One block per shape and form: N, efficiency.
: > "$data"
for shape in '16/16 x 128' '32/8 x 128' '32/4 x 128' '12/12 x 64' '32/8 x 64' '32/4 x 64'; do
    for form in ring all-gather ulysses saved; do
        awk -F '|' -v shape="$shape" -v form="$form" '
            /by NCCL/ { exit }
            index($0, shape) == 1 { split($1, word, " "); if (word[5] == form) print word[4], $6 + 0 }' \
            <(sed -n '/== speed/,$p' "$ranks") | sort -n >> "$data"
        printf '\n\n' >> "$data"
    done
done
gnuplot <<GNUPLOT
set terminal svg size 960,560 font "sans-serif,12" background "white"
set output "ranks_speed.svg"
set multiplot layout 2,3 title "two H200 beside one: forward and backward, bf16, causal; 1 = twice as fast" font ",14"
set logscale x 2
set xtics ("8k" 8192, "" 16384, "32k" 32768, "" 65536, "128k" 131072, "" 262144)
set xrange [7000:300000]
set yrange [0.3:1.05]
set grid ytics lc "#dddddd"
set key bottom right
set style data linespoints
do for [panel = 0:5] {
    if (panel > 0) { unset key }
    heads = word("16/16 32/8 32/4 12/12 32/8 32/4", panel + 1)
    set title sprintf("%s heads, head\\\\_dim %s", heads, panel < 3 ? "128" : "64")
    plot "$data" index (4 * panel) using 1:2 title "ring" lc "#c0392b" lw 2 pt 7, \
         "" index (4 * panel + 1) using 1:2 title "all-gather" lc "#2c3e50" lw 2 pt 5, \
         "" index (4 * panel + 2) using 1:2 title "Ulysses" lc "#2980b9" lw 2 pt 9, \
         "" index (4 * panel + 3) using 1:2 title "Ulysses, saved" lc "#27ae60" lw 2 pt 11
}
unset multiplot
GNUPLOT
