#!/usr/bin/env python3
"""Attention of few queries over many keys on a GPU: libfattn and PyTorch's backends.

K and V are read from memory, not from L2: calls in a row use different ones, of 256 MB together. Times are those of
CUDA graphs of many calls, which leave out the host. TB/s: bytes of K and V by time; `read`: what summing up a tensor
reaches. `--unified MAX ...` adds FATTN_UNIFIED_MAX with these maxima: scores are normal numbers of deviation 1, so
that 0 fits and 200 has every part computed twice.
"""
import argparse
import pathlib
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import peers

COLD = 256 << 20  # bytes, four times an H200's L2
BACKENDS = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION}


def tensors(B, Hq, Hkv, Sq, Sk, d):
    def new(H, N):
        return torch.randn(B, N, H, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    q = new(Hq, Sq)
    return dict(q=q, k=new(Hkv, Sk), v=new(Hkv, Sk), o=torch.empty_like(q),
                lse=torch.empty(B, Hq, Sq, device="cuda"))


def unified(maximum):
    return dict(flags=peers.UNIFIED_MAX, params=dict(unified_max=maximum))


def torch_call(t, name):
    def call():
        with sdpa_kernel(BACKENDS[name]):
            return F.scaled_dot_product_attention(t["q"], t["k"], t["v"], enable_gqa=t["q"].shape[1] != t["k"].shape[1])
    try:
        call()
    except RuntimeError:
        return None
    return call


def check(library, maxima):
    """Relative errors of O and L against fp64, beside FlashAttention-2's of O; also with unified maxima."""
    bad = 0
    for B, Hq, Hkv, Sq, Sk, d in ((2, 8, 2, 1, 3000, 128), (1, 4, 4, 5, 20000, 64), (3, 16, 1, 1, 1111, 256),
                                  (1, 32, 8, 3, 9000, 128), (2, 3, 3, 40, 777, 64)):
        t = tensors(B, Hq, Hkv, Sq, Sk, d)
        k, v = (t[n].double().repeat_interleave(Hq // Hkv, 1) for n in "kv")
        s = t["q"].double() @ k.transpose(2, 3) / d ** 0.5
        want = s.softmax(-1) @ v
        peer = torch_call(t, "fa2")
        theirs = peers.relative(peer(), want) if peer else float("nan")
        for way in [{}] + [unified(m) for m in maxima if Sq <= 16]:
            library.prepare(**way, **t).fwd()
            o, L = peers.relative(t["o"], want), (t["lse"].double() - s.logsumexp(-1)).abs().max().item()
            wrong = not (L < 1e-5 and o < 4e-3)
            bad += wrong
            print(f"B{B} Hq{Hq} Hkv{Hkv} Sq{Sq} Sk{Sk} d{d} {way.get('params', '')}: O {o:.2e}, fa2's {theirs:.2e}, "
                  f"L {L:.1e}", "BAD" if wrong else "")
    print("check:", "FAILED" if bad else "ok", flush=True)


def interleaved(calls, stream, rounds):
    """Median times in ms of a call, from graphs with a call or more on each set of tensors; libraries take turns."""
    graphs, counts = {}, {}
    for n, each in calls.items():
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        each[0]()
        a.record()
        each[0]()
        b.record()
        b.synchronize()
        counts[n] = max(len(each), round(1.5 / max(a.elapsed_time(b), 0.01)))
        graphs[n] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[n], stream=stream):
            for k in range(counts[n]):
                each[k % len(each)]()
    times = {n: [] for n in calls}
    for _ in range(rounds):
        for n, graph in graphs.items():
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            graph.replay()
            b.record()
            b.synchronize()
            times[n].append(a.elapsed_time(b) / counts[n])
    return {n: statistics.median(t) for n, t in times.items()}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--library", default="build/release/lib/libfattn.so")
    p.add_argument("--beside", metavar="LIBRARY", nargs="*", default=[], help="other builds of libfattn, by file name")
    p.add_argument("--arch-cap", type=int, default=0)
    p.add_argument("--peers", nargs="*", default=["fa2", "cudnn"], help="of fa2, cudnn, efficient")
    p.add_argument("--fa3", metavar="LIBRARY", help="FlashAttention-3's split kernels (bench/fa3.sh)")
    p.add_argument("--unified", metavar="MAX", type=float, nargs="*", default=[], help="of FATTN_UNIFIED_MAX")
    p.add_argument("--dims", type=int, nargs="*", default=[128])
    p.add_argument("--groups", type=int, nargs="*", default=[1, 4, 8])
    p.add_argument("--batches", type=int, nargs="*", default=[1, 8, 64])
    p.add_argument("--lengths", type=int, nargs="*", default=[4096, 32768, 131072], help="keys")
    p.add_argument("--queries", type=int, nargs="*", default=[1])
    p.add_argument("--most", type=float, default=10, help="GB of K and V; larger calls are left out")
    a = p.parse_args()
    stream = torch.cuda.Stream()
    torch.cuda.set_stream(stream)
    libraries = {n: peers.Library(path, peers.CUDA, arch_cap=a.arch_cap, stream=stream.cuda_stream)
                 for n, path in [("ours", a.library)] + [(pathlib.Path(x).stem, x) for x in a.beside]}
    fa3 = peers.Fa3(a.fa3) if a.fa3 else None
    print(torch.cuda.get_device_name())
    check(libraries["ours"], a.unified)
    x = torch.ones(1 << 30, device="cuda", dtype=torch.float32)
    ms = interleaved({"read": [lambda: x.sum()]}, stream, 5)["read"]
    print(f"read {x.numel() * 4 / ms * 1e-9:.2f} TB/s; Hkv 8")
    del x
    ratios = {}
    for d in a.dims:
        for Sq in a.queries:
            for group in a.groups:
                for B in a.batches:
                    for Sk in a.lengths:
                        size = B * 8 * Sk * d * 4
                        if size > a.most * 1e9:
                            continue
                        sets = [tensors(B, 8 * group, 8, Sq, Sk, d) for _ in range(-(-COLD // size))]
                        calls = {n: [c.prepare(**t).fwd for t in sets] for n, c in libraries.items()}
                        for m in a.unified if Sq <= 16 else ():
                            calls[f"unified {m:g}"] = [libraries["ours"].prepare(**unified(m), **t).fwd for t in sets]
                        for name in a.peers:
                            each = [torch_call(t, name) for t in sets]
                            if all(each):
                                calls[name] = each
                        if fa3:
                            pairs = [fa3.few_queries(t, stream.cuda_stream) for t in sets]
                            if all(run for run, _ in pairs):
                                calls["fa3"] = [run for run, _ in pairs]
                        times = interleaved(calls, stream, 11)
                        if "fa3" in calls and not peers.relative(pairs[0][1], sets[0]["o"].double()) < 1e-2:
                            print("fa3 computes something else here")
                        line = f"d{d:<4} Sq{Sq:<3} group {group:<3} B{B:<3} keys {Sk:<7}"
                        for n, ms in times.items():
                            line += f" {n} {ms * 1e3:7.1f} us"
                            if n == "ours":
                                line += f" {size / ms * 1e-9:.2f} TB/s"
                            if n != "ours":
                                ratios.setdefault(n, []).append(ms / times["ours"])
                                line += f" ({ms / times['ours']:.2f})"
                            line += " |"
                        print(line.rstrip(" |"), flush=True)
                        del sets, calls
    for n, r in ratios.items():
        print(f"geometric mean, ours over {n}: {statistics.geometric_mean(r):.3f}  worst {min(r):.3f}")


main()
