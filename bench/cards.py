#!/usr/bin/env python3
"""What cards that were not measured should reach: a model, from the rates of their kernels on an H200.

A card with 163, 99 or 64 KiB of shared memory per block runs the kernels that a table of peers.py --arch-cap 80, 86
or 75 timed (results/cards_h200.txt). Per clock and SM such a kernel does at most what it did on the H200 (its
latencies, shared memory, exponentials), and at most what the card's tensor cores do. sm_75 reads half as much of
shared memory per clock; its loads are not asynchronous, which nothing here counts.

  FLOP/B   FLOP per byte between L2 and the SM: BM forward, 1.25 BN backward (dQ once); below the card's FLOP per byte
           of DRAM the L2 has to hold the keys of all heads that run side by side
  warps    per SM, by registers (tests/golden/kernels-*.txt) and shared memory

    python3 bench/cards.py > bench/results/cards_model.txt
"""
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
N = 4096
H200 = 132 * 1.98e9  # SMs times clock: these kernels stay below its power limit

# name, architecture, cap of its table, SMs, GHz, FLOP per clock and SM with F32 sums, GB/s, KiB and warps per SM:
# NVIDIA's white papers; consumer cards have half the tensor rate with F32 sums.
CARDS = (
    ("A100", 80, 80, 108, 1.41, 2048, 1555, 164, 64),
    ("RTX 3060", 86, 86, 28, 1.78, 512, 360, 100, 48),
    ("RTX 3090", 86, 86, 82, 1.695, 512, 936, 100, 48),
    ("A6000", 86, 86, 84, 1.80, 1024, 768, 100, 48),
    ("RTX 4060", 89, 86, 24, 2.46, 512, 272, 100, 48),
    ("RTX 4090", 89, 86, 128, 2.52, 512, 1008, 100, 48),
    ("L4", 89, 86, 58, 2.04, 1024, 300, 100, 48),
    ("RTX 5090", 120, 86, 170, 2.41, 512, 1792, 100, 48),
    ("T4", 75, 75, 40, 1.59, 1024, 320, 64, 32),
    ("RTX 2080 Ti", 75, 75, 68, 1.545, 512, 616, 64, 32))


def rates():
    """(cap, pass, head_dim) -> FLOP per clock and SM on the H200, full mask."""
    got, cap = {}, None
    for line in (HERE / "results/cards_h200.txt").read_text().splitlines():
        if said := re.search(r"--arch-cap (\d+)", line):
            cap = int(said[1])
        if row := re.match(rf"d(\d+) +full +{N} .*?ours +(\d+).*\| +ours +(\d+)", line):
            for way, rate in (("fwd", row[2]), ("bwd", row[3])):
                got[cap, way, int(row[1])] = float(rate) * 1e12 / H200
    return got


def kernels(program, arch, dtype, d):
    """The names of the forward and backward kernel of a card."""
    text = subprocess.run([program, "info", "--arch", str(arch), "--n", str(N), "--d", str(d)], check=True, text=True,
                          capture_output=True).stdout
    return re.search(rf"^auto +{dtype} +(\S+) +(\S+)", text, re.M).groups()


def main():
    program = sys.argv[1] if len(sys.argv) > 1 else str(HERE.parent / "build/release/bin/fattn")
    golden = sorted((HERE.parent / "tests/golden").glob("kernels-*.txt"))[-1].read_text()
    measured = rates()
    print(f"# A model, not a measurement (bench/cards.py): full masks, N {N}, 16 bits")
    print(f"# {'':12} {'':4}  {'':4} {'':37} FLOP/B of   warps   FLOP/clk/SM         TFLOP/s")
    print(f"# {'card':12} pass  {'d':4} {'kernel':37} L2  (DRAM)  per SM  H200   card  bound expected")
    for card, arch, cap, sms, ghz, tensor, bandwidth, kib, warps in CARDS:
        for d in (64, 128, 256):
            names = kernels(program, arch, "f16" if arch == 75 else "bf16", d)
            for way, name in zip(("fwd", "bwd"), names):
                bm, bn = map(int, name.rsplit("_", 1)[1].split("x"))
                code = max((a for a in (75, 80, 120) if a <= arch))
                line = re.search(rf"^{name} sm_{code} (\d+) .* (\d+) (\d+)$", golden, re.M)
                registers, threads, shared = map(int, line.groups())
                ctas = min(65536 // (-(-registers // 8) * 8 * threads), kib * 1024 // (shared + (arch > 75) * 1024),
                           warps * 32 // threads)
                own = measured[cap, way, d] / (2 if arch == 75 else 1)
                rate = min(own, tensor)
                print(f"{card:14} {way}   {d:<4} {name[6:]:37} {bm if way == 'fwd' else 1.25 * bn:<4g}"
                      f" ({sms * ghz * tensor / bandwidth:.0f})   {ctas * threads // 32:<7} {own:<6.0f} {tensor:<5}"
                      f" {'kernel' if own < tensor else 'tensor'} {rate * sms * ghz / 1e3:5.1f}")


main()
