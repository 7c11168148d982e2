#!/usr/bin/env python3
"""Attention over 2, 4 and 8 GPUs: a model, projected from what two GPUs were measured to do.

A rank's kernels and passes over memory take what they took on two GPUs without transfers (results/ranks_h100.txt,
"compute"): in a ring each of P steps as long as one of the two steps of 2 N / P rows; in the other forms 2 / P of the
time for N rows, which is too little where a rank's share no longer fills its GPU. A message takes ALPHA and its bytes
over BETA, fitted to the messages of two ranks by copy engines; what a rank gets from several ranks comes one after the
other. Of a ring's moves that is lost which takes longer than the step over it, of Ulysses' the first group of heads and
the last; all-gather hides nothing. Efficiency is forward and backward together: one GPU's time / (GPUs x time).

    python3 bench/ranks_model.py > bench/results/ranks_model.txt
"""
import math
import pathlib
import re

HERE = pathlib.Path(__file__).resolve().parent
ALPHA, BETA = 22e-6, 393e9  # s, bytes/s
LENGTHS = (8192, 16384, 32768, 65536, 131072)
SMS = 132


def measured():
    """Of code that formed up to 4 groups of heads, of at least 7 tiles for each SM, and copied tensors to messages.
    (Hq, Hkv, d) -> {N: {form: {"one", "whole", "compute": (forward, backward)}}}, s, on two GPUs."""
    text = (HERE / "results/ranks_h100.txt").read_text().split("== beside PyTorch")[0]
    number = r" +([\d.]+)"
    got = {}
    for line in text.splitlines():
        if row := re.match(r"(\d+)/(\d+) x (\d+) +(\d+) (\S+) +\|" + number * 2 + r" \|" + number * 2 + r" \|"
                           + number * 2, line):
            Hq, Hkv, d, N = map(int, row.groups()[:4])
            ms = [1e-3 * float(x) for x in row.groups()[5:11]]
            got.setdefault((Hq, Hkv, d), {}).setdefault(N, {})[row[5]] = {
                "one": ms[0:2], "whole": ms[2:4], "compute": ms[4:6]}
    return got


def at(times, form, what, N, way):
    """By straight lines between the logarithms; below the shortest length in proportion to rows squared."""
    known = sorted(times)
    low = max((n for n in known if n <= N), default=known[0])
    high = min((n for n in known if n >= N), default=known[-1])
    value = lambda n: times[n][form][what][way]
    if low == high:
        return value(low) * (N / low) ** 2
    part = math.log(N / low) / math.log(high / low)
    return math.exp((1 - part) * math.log(value(low)) + part * math.log(value(high)))


def message(size):
    return ALPHA + size / BETA


def ring(model, times, N, P):
    Hq, Hkv, d = model
    t = N / P
    kv, dkv = 2 * t * Hkv * d * 2, 2 * t * Hkv * d * 4
    fwd, bwd = (at(times, "ring", "compute", 2 * t, way) / 2 for way in (0, 1))
    halves = Hkv * t / 128 >= 14 * SMS  # of the own step: one at the beginning, one at the end
    forward = P * fwd + (P - 1) * max(0, message(kv) - fwd)
    first = max(0, message(kv) - (bwd / 2 if halves else 0))
    later = (P - 2) * max(0, message(kv) + message(dkv) - bwd)
    home = max(0, message(dkv) - (bwd / 2 if halves else bwd))
    return forward + P * bwd + first + later + home


def all_gather(model, times, N, P):
    Hq, Hkv, d = model
    t = N / P
    kv, dkv = 2 * t * Hkv * d * 2, 2 * t * Hkv * d * 4
    compute = sum(at(times, "all-gather", "compute", N, way) for way in (0, 1)) * 2 / P
    return compute + 2 * message((P - 1) * kv) + message((P - 1) * dkv)


def ulysses(model, times, N, P):
    Hq, Hkv, d = model
    if Hkv % P:
        return None
    q, kv = N / P * Hq * d * 2, 2 * N / P * Hkv * d * 2  # of all heads; a rank gets (P - 1) / P of it from others
    total = 0
    for way, tiles, there, back in ((0, Hq, q + kv, q), (1, Hkv, 3 * q + kv, q + kv)):
        groups = max(1, min(Hkv // P, 4, int(tiles / P * N / 128 / (7 * SMS))))
        moves = message(there * (P - 1) / P / groups) + message(back * (P - 1) / P / groups)
        total += at(times, "ulysses", "compute", N, way) * 2 / P + moves
    return total


def main():
    print(__doc__.split("\n\n")[1])
    print("\nTwo H100: projected, and measured in brackets; 4 and 8 GPUs: projected only. bf16, causal.\n")
    print(f"{'heads x d':<12} {'N':>7} {'GPUs':>4} | {'ring':>14} {'all-gather':>14} {'ulysses':>14}")
    forms = {"ring": ring, "all-gather": all_gather, "ulysses": ulysses}
    for model, times in measured().items():
        for N in LENGTHS:
            for P in (2, 4, 8):
                if N not in times or (2 * N // P < min(times)):
                    continue
                one = sum(times[N]["ring"]["one"])
                cells = []
                for form, project in forms.items():
                    time = project(model, times, N, P)
                    cell = f"{one / P / time:.2f}" if time else "-"
                    if P == 2:
                        cell += f" ({one / 2 / sum(times[N][form]['whole']):.2f})"
                    cells.append(f"{cell:>14}")
                print(f"{model[0]}/{model[1]} x {model[2]:<5} {N:>8} {P:>4} | {' '.join(cells)}")


if __name__ == "__main__":
    main()
