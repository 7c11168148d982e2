#!/usr/bin/env python3
"""Attention over 2, 4 and 8 GPUs: a model, projected from one GPU and from transfers between two.

A rank computes its share of the whole sequence's time at the rate that calls of its rows have on one GPU
(results/ranks_h200.txt, "one"), and passes over tensors in F32 or between layouts at the rate of memory. A message
takes ALPHA and its bytes over BETA: fitted to NCCL's sends and receives between two H200 (NVLink, both ways at
once: 64 MB in 243 us, 256 MB in 848 us). A ring's messages go while kernels run, the others' do not. Kernels are not
slowed by the SMs that NCCL takes. Efficiency is forward and backward together: one GPU's time / (GPUs x time).

    python3 bench/ranks_model.py > bench/results/ranks_model.txt
"""
import math
import pathlib
import re

HERE = pathlib.Path(__file__).resolve().parent
ALPHA, BETA = 41e-6, 317e9  # s, bytes/s
MEMORY = 3.5e12             # bytes/s of a pass over memory
LAUNCH = 4e-6               # s, a small kernel or copy


def measured():
    """(Hq, Hkv, d) -> {N: (forward, backward)}, s, one rank."""
    got = {}
    for line in (HERE / "results/ranks_h200.txt").read_text().splitlines():
        if row := re.match(r"(\d+)/(\d+) x (\d+) +(\d+) ring +\| +([\d.]+) +([\d.]+)", line):
            Hq, Hkv, d, N = map(int, row.groups()[:4])
            got.setdefault((Hq, Hkv, d), {})[N] = (float(row[5]) * 1e-3, float(row[6]) * 1e-3)
    return got


def at(times, N, way):
    """Time of a sequence of N, by straight lines between the logarithms."""
    known = sorted(times)
    low = max((n for n in known if n <= N), default=known[0])
    high = min((n for n in known if n >= N), default=known[-1])
    if low == high:
        return times[low][way] * (N / low) ** 2
    part = math.log(N / low) / math.log(high / low)
    return math.exp((1 - part) * math.log(times[low][way]) + part * math.log(times[high][way]))


def message(size):
    return ALPHA + size / BETA


def compute(times, N, P, way):
    """The share of a rank, at the rate of calls of its N / P rows."""
    rows = N / P
    slower = at(times, rows, way) * P * P / at(times, N, way)
    return times_whole(times, N, way) / P * max(1, slower ** 0.5)


def times_whole(times, N, way):
    return at(times, N, way)


def ring(model, times, N, P):
    Hq, Hkv, d = model
    t = N // P
    kv, dkv, o = 2 * t * Hkv * d * 2, 2 * t * Hkv * d * 4, t * Hq * d * 4
    fwd, bwd = (compute(times, N, P, way) / P for way in (0, 1))  # of a step
    fwd += (2 * o / MEMORY + 2 * LAUNCH) * (P - 1) / P            # merges read and write O in F32
    bwd += (2 * o + 4 * dkv) / MEMORY + 4 * LAUNCH                # dQ, and dK and dV are added and passed on
    forward = fwd + (P - 1) * max(fwd, message(kv))
    backward = bwd + (P - 1) * max(bwd, message(kv) + message(dkv)) + message(dkv)
    return forward + backward


def all_gather(model, times, N, P):
    Hq, Hkv, d = model
    t = N // P
    kv, dkv = 2 * t * Hkv * d * 2, 2 * t * Hkv * d * 4
    moved = (P - 1) * message(kv) * 2 + (P - 1) * message(dkv)
    passes = (2 * 2 * P * kv + 6 * P * dkv) / MEMORY + 20 * LAUNCH
    return compute(times, N, P, 0) + compute(times, N, P, 1) + moved + passes


def ulysses(model, times, N, P):
    Hq, Hkv, d = model
    if Hkv % P:
        return None
    t = N // P
    q, kv = t * Hq * d * 2, 2 * t * Hkv * d * 2
    there, back = 2 * q + kv + (3 * q + kv), q + (q + kv)  # forward q, k, v, o; backward o, dO, and the gradients, too
    passes = 4 * (there + back) / MEMORY + 40 * LAUNCH
    moved = 4 * (P - 1) * ALPHA + (there + back) * (P - 1) / P / BETA
    return (times_whole(times, N, 0) + times_whole(times, N, 1)) / P + moved + passes


def main():
    print(__doc__.split("\n\n")[1])
    print("\nProjected, nothing here was measured on several GPUs. bf16, causal.\n")
    print(f"{'heads x d':<12} {'N':>7} {'GPUs':>4} | {'ring':>6} {'gather':>6} {'ulysses':>7}")
    for model, times in measured().items():
        for N in (8192, 16384, 32768, 65536, 131072):
            for P in (2, 4, 8):
                one = times_whole(times, N, 0) + times_whole(times, N, 1)
                row = [f(model, times, N, P) for f in (ring, all_gather, ulysses)]
                cells = " ".join(f"{one / P / x:{w}.2f}" if x else f"{'-':>{w}}" for x, w in zip(row, (6, 6, 7)))
                print(f"{model[0]}/{model[1]} x {model[2]:<5} {N:>8} {P:>4} | {cells}")


if __name__ == "__main__":
    main()
