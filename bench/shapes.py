#!/usr/bin/env python3
"""Shapes off the usual table (bench/peers.py): libfattn beside FlashAttention-3, cuDNN and FlashAttention-2.

    python3 bench/shapes.py --library libfattn.so --fa3 libfa3.so [--rows REGEX] [--rounds 7] [--passes fwd,bwd]
        [--before OLD.so]

A row: group, dtype, head_dim (of q and k / of v), mask, batches or packed sequences, heads (of q / of k), rows x keys,
then per pass TFLOP/s of each library, `best` (ours over the fastest peer) and our kernel. Only visible pairs (row, key)
count: 2 (d + dv) FLOP each forward, 2 (3 d + 2 dv) backward. `plain`, of windows and packed rows: our rate over our own
without them, causal or full like the row; for packed rows on as many sequences of equal lengths.

Groups: dims, ragged (N that no tile divides), gqa, heads (B H from 1 to 4096), models (heads of GPT-2, Qwen2.5, Llama
3.2, Whisper and others, mostly no power of two), grouped (heads that share keys, mostly of one sequence), cross (rows
and keys differ in number), window, packed (16384 tokens, sequences cut at random), strides (slices of [B,S,3,H,D]),
f16. A name is what a row prints before its first figure, without the padding: --rows matches it.

fa3: FlashAttention-3's kernels with the arguments that its own dispatch chooses (bench/fa3.cu), those that the library
has. cudnn: PyTorch's backend, packed rows by its operator. fa2: PyTorch's operator, which has windows, packed rows and
a causal mask that ends at the last key. A peer that refuses a row, or whose O or dQ is more than 0.02 off ours, has
"-"; --why lists the reasons. before: another build of libfattn, in brackets ours over it. Calls interleaved, medians of
device times."""
import argparse
import dataclasses
import re
import statistics
import time
import warnings

import torch
from torch.nn.attention import SDPBackend

import peers
from features import WINDOW, visible

TOKENS = 16384
PASSES = {"fwd": "forward", "bwd": "backward"}


@dataclasses.dataclass(frozen=True)
class Row:
    group: str
    d: int
    B: int  # sequences where packed
    H: int
    Sq: int  # the sum of all lengths where packed
    causal: bool = False
    dv: int = 0  # as d
    Hkv: int = 0  # as H
    Sk: int = 0  # as Sq
    left: int = -1
    right: int = -1
    packed: bool = False
    sliced: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def sizes(self):
        return self.dv or self.d, self.Hkv or self.H, self.Sk or self.Sq

    @property
    def name(self):
        dv, Hkv, Sk = self.sizes
        d = f"{self.d}/{dv}" if dv != self.d else self.d
        mask = "causal" if self.causal else "full"
        if self.left >= 0:
            mask = f"left {self.left}" if self.right == 0 else f"around {self.left}"
        heads = f"{self.H}/{Hkv}" if Hkv != self.H else self.H
        shape = f"{self.Sq}x{Sk}" if Sk != self.Sq else self.Sq
        return f"{self.group} {str(self.dtype)[6:].replace('float', 'f')} d{d} {mask} B{self.B} H{heads} {shape}"

    def lengths(self):
        """Of the sequences; packed: cut at random places, so that they differ much."""
        if not self.packed:
            return [self.Sq] * self.B
        cuts = torch.randperm(self.Sq - 1, generator=torch.Generator().manual_seed(self.B))[:self.B - 1] + 1
        cuts = [0, *sorted(cuts.tolist()), self.Sq]
        return [b - a for a, b in zip(cuts, cuts[1:])]

    def pairs(self):
        """Visible ones, of one head in all sequences."""
        left = self.left if self.left >= 0 else None
        right = 0 if self.causal else self.right if self.right >= 0 else None
        if self.packed:
            return sum(visible(n, n, left, right) for n in self.lengths())
        return self.B * visible(self.Sq, self.sizes[2], left, right)

    def plain(self):
        """What windows and packed rows are compared with."""
        if self.packed:
            return dataclasses.replace(self, packed=False, Sq=self.Sq // self.B)
        return dataclasses.replace(self, left=-1, right=-1, causal=self.right == 0)


def table():
    def rows(group, dims, shapes, **more):
        for d in dims:
            for B, H, N, mask in shapes:
                yield Row(group, d, B, H, N, mask == "causal", **more)
    both = ("full", "causal")

    for N in (1024, 4096):
        yield from rows("dims", (80, 96), [(TOKENS // N, 20, N, m) for m in both])
        yield from rows("dims", (192,), [(TOKENS // N, 16, N, m) for m in both], dv=128)
    yield from rows("dims", (192,), [(2, 16, 5000, m) for m in both], dv=128)
    yield from rows("dims", (192,), [(4, 10, 4096, m) for m in both])

    yield from rows("ragged", (64,), [(TOKENS // N, 32, N, "causal") for N in (1000, 3000, 5000, 10000)])
    yield from rows("ragged", (128,), [(TOKENS // N, 16, N, "causal") for N in (1000, 3000, 5000, 10000)])
    yield from rows("ragged", (64,), [(16, 32, 1000, "full")])
    yield from rows("ragged", (128,), [(16, 16, 1000, "full"), (3, 16, 5000, "full")])
    yield from rows("ragged", (256,), [(5, 8, 3000, "causal")])

    for group in (4, 8):
        yield from rows("gqa", (64,), [(4, 32, 4096, m) for m in both], Hkv=32 // group)
        yield from rows("gqa", (128,), [(4, 16, 4096, m) for m in both], Hkv=16 // group)
    yield from rows("gqa", (128,), [(2, 32, 8192, "causal"), (16, 32, 1000, "causal")], Hkv=8)
    yield from rows("gqa", (256,), [(4, 8, 4096, "causal")], Hkv=2)

    yield from rows("heads", (128,), [(1, 1, 8192, "causal"), (1, 1, 2048, "full"), (1, 4, 4096, "causal"),
                                      (1, 4, 1024, "full"), (1, 8, 2048, "causal"), (1, 16, 1024, "causal"),
                                      (1, 16, 4096, "full")])
    yield from rows("heads", (64,), [(1, 1, 4096, "causal"), (1, 8, 4096, "full"), (1, 16, 2048, "causal"),
                                     (64, 16, 384, "full"), (256, 16, 256, "causal")])
    yield from rows("heads", (128,), [(64, 32, 384, "causal"), (24, 16, 700, "full")])

    yield from rows("models", (64,), [(1, 25, 1024, "causal"), (4, 25, 1024, "causal"), (1, 12, 4096, "causal"),
                                      (2, 12, 2048, "full"), (3, 20, 1500, "full"), (1, 20, 2048, "full")])
    yield from rows("models", (64,), [(1, 9, 4096, "causal"), (4, 9, 2048, "causal")], Hkv=3)
    yield from rows("models", (128,), [(1, 28, 4096, "causal"), (1, 28, 8192, "causal")], Hkv=4)
    yield from rows("models", (128,), [(1, 24, 8192, "causal"), (1, 40, 2048, "causal"), (3, 40, 4096, "causal")],
                    Hkv=8)
    yield from rows("models", (128,), [(1, 12, 2048, "causal"), (1, 9, 4096, "full"), (1, 25, 2048, "full")])
    yield from rows("models", (256,), [(3, 16, 2048, "causal")], Hkv=8)

    for d, H, Hkv, shapes in ((64, 14, 2, [(1, 4096), (4, 2048), (1, 8192)]), (128, 12, 2, [(1, 8192)]),
                              (128, 16, 2, [(1, 4096), (2, 4096), (1, 8192)]), (128, 28, 4, [(1, 10240), (1, 16384)]),
                              (128, 32, 8, [(1, 2048), (1, 4096), (1, 6144)]),
                              (128, 64, 8, [(1, 2048), (1, 4096), (1, 6144), (1, 8192)]), (128, 8, 1, [(1, 8192)]),
                              (64, 71, 1, [(1, 2048)])):
        yield from rows("grouped", (d,), [(B, H, N, "causal") for B, N in shapes], Hkv=Hkv)

    for d, H, Sq, Sk, mask in ((128, 16, 1024, 8192, "causal"), (128, 16, 512, 16384, "full"),
                               (128, 16, 4096, 1024, "full"), (64, 32, 2048, 4096, "causal"),
                               (64, 32, 1500, 6000, "full"), (128, 16, 4096, 2048, "causal")):
        yield from rows("cross", (d,), [(4, H, Sq, mask)], Sk=Sk)

    for d, N, left in ((64, 4096, 512), (64, 8192, 1024), (64, 16384, 512), (64, 16384, 4096), (128, 4096, 512),
                       (128, 4096, 2048), (128, 8192, 1024), (128, 16384, 512), (128, 16384, 4096)):
        yield from rows("window", (d,), [(TOKENS // N, 2048 // d, N, "window")], left=left, right=0)
    for d in (64, 128):
        yield from rows("window", (d,), [(2, 2048 // d, 8192, "window")], left=1024, right=1024)
    yield from rows("window", (128,), [(2, 32, 8192, "window")], left=1024, right=0, Hkv=8)

    for d in (64, 128):
        shapes = [(B, 2048 // d, TOKENS, "causal") for B in (1, 10, 40, 160)]
        shapes += [(B, 2048 // d, TOKENS, "full") for B in (10, 160)]
        yield from rows("packed", (d,), shapes, packed=True)
    yield from rows("packed", (128,), [(40, 32, TOKENS, "causal")], packed=True, Hkv=8)
    yield from rows("packed", (192,), [(40, 16, TOKENS, "causal")], packed=True, dv=128)

    yield from rows("strides", (64, 128), [(8, 16, 2048, "causal")], sliced=True)
    yield from rows("strides", (128,), [(4, 16, 4096, "full")], sliced=True)

    yield from rows("f16", (64,), [(4, 32, 4096, m) for m in both], dtype=torch.float16)
    yield from rows("f16", (128,), [(4, 16, 4096, m) for m in both], dtype=torch.float16)


def tensors(row, device):
    """What a call reads and writes, [B,H,S,D] in memory of [B,S,H,D] or [B,S,3,H,D]."""
    dv, Hkv, Sk = row.sizes
    B = 1 if row.packed else row.B

    def new(S, H, D):
        return torch.randn(B, S, H, D, device=device, dtype=row.dtype).transpose(1, 2)
    if row.sliced:
        both = [torch.randn(B, row.Sq, 3, row.H, row.d, device=device, dtype=row.dtype) for _ in range(2)]
        t = {n: x[:, :, i].transpose(1, 2) for x, names in zip(both, (("q", "k", "v"), ("dq", "dk", "dv")))
             for i, n in enumerate(names)}
    else:
        t = dict(q=new(row.Sq, row.H, row.d), k=new(Sk, Hkv, row.d), v=new(Sk, Hkv, dv))
        t.update({"d" + n: torch.empty_like(t[n]) for n in "qkv"})
    t.update(d_o=new(row.Sq, row.H, dv), o=new(row.Sq, row.H, dv))
    t["lse"] = torch.empty(t["q"].shape[:3], device=device)
    return t


def sums_of(row, device):
    """cu_seqlens, None where not packed."""
    if not row.packed:
        return None
    return torch.tensor([0, *row.lengths()], device=device).cumsum(0, dtype=torch.int32)


def our_call(library, row, t, sums):
    flags, params, more = peers.CAUSAL if row.causal else 0, {}, {}
    if row.left >= 0:
        flags, params = flags | WINDOW, dict(window_left=row.left, window_right=row.right)
    if row.packed:
        params = dict(max_seqlen_q=max(row.lengths()), max_seqlen_k=max(row.lengths()))
        more = dict(cu_seqlens_q=sums, cu_seqlens_k=sums)
    return library.prepare(flags, params, **t, **more)


# ---- peers: forward and backward, either of which may be None, and the results o and dq, in [B,H,S,D] ----

def fa3_calls(fa3, row, t, sums):
    longest = max(row.lengths()) if row.packed else 0
    forward, backward, results = fa3.calls(t, row.causal, row.left, row.right, sums, longest)
    for run in (forward, backward):
        if run:
            run()
    if not forward and not backward:
        raise RuntimeError("its library lacks these kernels")
    return forward, backward, results


class Operator:
    """Forward and backward of one of PyTorch's attention operators on [B,S,H,D] or packed [total,H,D]."""

    def __init__(self, row, t, sums):
        self.row, self.sums = row, sums
        self.inputs = [t[n][0].transpose(0, 1) if row.packed else t[n].transpose(1, 2) for n in "qkv"]
        self.d_o = t["d_o"][0].transpose(0, 1) if row.packed else t["d_o"].transpose(1, 2)
        self.longest = [max(row.lengths())] * 2 if row.packed else [row.Sq, row.sizes[2]]
        self.kept = None

    def results(self):
        def back(x):
            return x.transpose(0, 1)[None] if self.row.packed else x.transpose(1, 2)
        self.forward()
        return dict(o=back(self.kept[0]), dq=back(self.backward()[0]))


class FlashAttention2(Operator):
    def forward(self):
        row = self.row
        self.kept = torch.ops.aten._flash_attention_forward(
            *self.inputs, self.sums, self.sums, *self.longest, 0.0, row.causal, False,
            window_size_left=row.left, window_size_right=0 if row.causal else row.right)

    def backward(self):
        row, (o, lse, state, unused, _) = self.row, self.kept
        return torch.ops.aten._flash_attention_backward(
            self.d_o, *self.inputs, o, lse, self.sums, self.sums, *self.longest, 0.0, row.causal, state, unused,
            window_size_left=row.left, window_size_right=0 if row.causal else row.right)


class PackedCudnn(Operator):
    def forward(self):
        self.kept = torch.ops.aten._cudnn_attention_forward(
            *self.inputs, None, self.sums, self.sums, *self.longest, True, 0.0, self.row.causal, False)

    def backward(self):
        o, lse, _, _, _, _, seed, offset, _ = self.kept
        return torch.ops.aten._cudnn_attention_backward(
            self.d_o, *self.inputs, o, lse, seed, offset, None, self.sums, self.sums, *self.longest, 0.0,
            self.row.causal)


def operator_calls(kind, row, t, sums):
    operator = kind(row, t, sums)
    results = operator.results()
    return operator.forward, operator.backward, results


def cudnn_calls(row, t, sums):
    if row.left >= 0:
        raise RuntimeError("no windows in PyTorch")
    if row.causal and row.sizes[2] != row.Sq:
        raise RuntimeError("PyTorch's causal mask ends at the first keys")
    if row.packed:
        return operator_calls(PackedCudnn, row, t, sums)
    forward, backward = peers.torch_calls(t, row.causal, SDPBackend.CUDNN_ATTENTION)
    return forward, backward, dict(o=forward().detach(), dq=backward()[0])


def peers_of(names, fa3, row, t, sums, why):
    """Name: (forward, backward) of those that compute what we do; why: gets the reasons of the others."""
    make = {"fa3": lambda: fa3_calls(fa3, row, t, sums), "cudnn": lambda: cudnn_calls(row, t, sums),
            "fa2": lambda: operator_calls(FlashAttention2, row, t, sums)}
    found = {}
    for name in names:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                forward, backward, results = make[name]()
            off = {n: peers.relative(results[n], t[n].double()) for n in ("o", "dq") if backward or n == "o"}
            if not all(x <= 0.02 for x in off.values()):
                raise RuntimeError("another result: " + ", ".join(f"{n} {x:.1e}" for n, x in off.items()) + " off")
            found[name] = forward, backward
        except (RuntimeError, TypeError) as error:
            why.append(f"{name}: {row.name}: {(str(error).splitlines() or [repr(error)])[0]}")
    return found


def measure(library, before, names, fa3, row, device, passes, rounds, why):
    """By pass: (TFLOP/s by library, ours over the best peer, ours over plain, kernel); missing ones are None."""
    t, sums = tensors(row, device), sums_of(row, device)
    call = our_call(library, row, t, sums)
    before_call = our_call(before, row, t, sums) if before else None
    call.fwd()
    call.bwd()
    others = peers_of(names, fa3, row, t, sums, why)
    base = None
    if row.packed or row.left >= 0:
        base = row.plain()
        base_call = our_call(library, base, tensors(base, device), None)
        base_call.fwd()
    dv, result = row.sizes[0], {}
    for i, which in enumerate(PASSES):
        if which not in passes:
            continue
        calls = {"ours": getattr(call, which), **{n: c[i] for n, c in others.items() if c[i]}}
        if base:
            calls["plain"] = getattr(base_call, which)
        if before_call:
            calls["before"] = getattr(before_call, which)
        ms = peers.interleaved(calls, rounds)
        each = 2 * row.H * (row.d + dv if which == "fwd" else 3 * row.d + 2 * dv) * 1e-9
        work, plain = row.pairs() * each, base.pairs() * each / ms.pop("plain") if base else None
        rate = {n: work / x for n, x in ms.items()}
        fastest = max((x for n, x in rate.items() if n not in ("ours", "before")), default=None)
        result[which] = (rate, fastest and rate["ours"] / fastest, plain and rate["ours"] / plain,
                         getattr(call.plan, which + "_kernel").decode())
    return result


def print_row(row, result, names):
    line = f"{row.name:44}"
    for which, (rate, best, plain, kernel) in result.items():
        line += f" | {which} ours {rate['ours']:4.0f}"
        if "before" in rate:
            line += f" before {rate['before']:4.0f} ({rate['ours'] / rate['before']:.2f})"
        for n in names:
            line += f" {n} {rate[n]:4.0f}" if n in rate else f" {n}    -"
        line += f" best {best:5.2f}" if best else " best     -"
        line += f" plain {plain:5.2f}" if plain else " " * 12
        line += f" {kernel.removeprefix('fattn_' + which + '_'):32}"
    print(line.rstrip(), flush=True)


def summary(done, passes):
    """done: [(row, result)]"""
    for label, k in (("ours over the best peer", 1), ("over our plain kernel", 2)):
        for which in passes:
            ratios = {}
            for row, result in done:
                if result[which][k]:
                    for group in (row.group, "all"):
                        ratios.setdefault(group, []).append((result[which][k], row.name))
            for group in sorted(ratios, key=lambda n: n == "all"):
                if k == 2 and group == "all":
                    continue
                worst, name = min(ratios[group])
                print(f"{PASSES[which]}, {label}, {group}: geometric mean "
                      f"{statistics.geometric_mean(r for r, _ in ratios[group]):.3f} of {len(ratios[group])}, "
                      f"worst {worst:.2f} ({name})")
    for which in passes:
        below = sorted((result[which][1], row.name) for row, result in done if (result[which][1] or 1) < 1)
        print(f"{PASSES[which]}, below 1.00: {len(below)}")
        for ratio, name in below:
            print(f"  {ratio:.2f} {name}")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--library", default="build/release/lib/libfattn.so")
    p.add_argument("--fa3", metavar="LIBRARY", help="FlashAttention-3's kernels (bench/fa3.sh)")
    p.add_argument("--before", metavar="LIBRARY", help="another build of libfattn, timed beside this one")
    p.add_argument("--rows", metavar="REGEX", default="", help="only rows whose name has a match")
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--passes", default="fwd,bwd", help="of fwd, bwd")
    p.add_argument("--peers", nargs="*", default=["fa3", "cudnn", "fa2"], choices=["fa3", "cudnn", "fa2"])
    p.add_argument("--list", action="store_true", help="print the names and stop")
    p.add_argument("--why", action="store_true", help="print why peers have no figure")
    a = p.parse_args()
    rows, passes = [r for r in table() if re.search(a.rows, r.name)], a.passes.split(",")
    if not set(passes) <= set(PASSES):
        p.error(f"--passes {a.passes}: of fwd, bwd")
    if not rows:
        p.error(f"--rows {a.rows}: no row has a match")
    if a.list:
        return print("\n".join(r.name for r in rows))
    torch.manual_seed(0)
    begin = time.time()
    library, fa3 = peers.Library(a.library, peers.CUDA, quiet=True), peers.Fa3(a.fa3) if a.fa3 else None
    before = peers.Library(a.before, peers.CUDA, quiet=True) if a.before else None
    names = [n for n in a.peers if n != "fa3" or fa3]
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}; "
          f"TFLOP/s, {len(rows)} rows, {a.rounds} rounds")
    done, why = [], []
    for row in rows:
        done.append((row, measure(library, before, names, fa3, row, "cuda", passes, a.rounds, why)))
        print_row(*done[-1], names)
    summary(done, [n for n in PASSES if n in passes])
    if a.why:
        print("\n".join(why))
    print(f"{time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
