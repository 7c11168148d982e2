"""Errors of 16-bit attention on the CPU, beside PyTorch's and beside a GPU's: the same tensors, relative Frobenius
norms against fp64, in %.

    python3 bench/cpu_errors.py --library build/release/lib/libfattn.so [--threads 16]

"ours": as it comes; "F32": FATTN_CTX_F32_PRODUCTS; "exact": FATTN_EXACT_DELTA; "flash" and "math": PyTorch's on the
CPU; "gpu": ours, where there is one. The last lines are ours over the others, for each output the geometric mean over
the rows and the largest."""
import argparse
import statistics

import torch
from torch.nn.attention import SDPBackend

import peers

F32_PRODUCTS = 4  # FATTN_CTX_F32_PRODUCTS
OUTPUTS = ("o", "dq", "dk", "dv")
# name, mean of every fourth channel of K, mean of V
INPUTS = (("Gaussian", 0, 0), ("K + 3 in d/4 channels", 3, 0), ("V + 1", 0, 1))


def exact(t, causal):
    q, k, v = (t[n].double().requires_grad_() for n in "qkv")
    s = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    if causal:
        s = s.masked_fill(torch.ones(s.shape[2:]).triu(1).bool(), -torch.inf)
    o = s.softmax(-1) @ v
    o.backward(t["d_o"].double())
    return dict(zip(OUTPUTS, (o.detach(), q.grad, k.grad, v.grad)))


def run_library(library, t, causal, flags=0):
    device = "cuda" if library.device == peers.CUDA else "cpu"
    x = {n: y.clone().to(device) for n, y in t.items()}
    call = library.prepare(flags | (peers.CAUSAL if causal else 0), **x)
    call.fwd()
    call.bwd()
    return {n: x[n].cpu() for n in OUTPUTS}


def run_torch(t, causal, backend):
    forward, backward = peers.torch_calls(t, causal, backend)
    return dict(zip(OUTPUTS, (forward().detach(), *backward())))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--library", default="build/release/lib/libfattn.so")
    p.add_argument("--threads", type=int, default=torch.get_num_threads())
    p.add_argument("--dtype", default="bfloat16")
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    ours = peers.Library(a.library, peers.CPU, threads=a.threads)
    f32 = peers.Library(a.library, peers.CPU, threads=a.threads, flags=F32_PRODUCTS)
    gpu = peers.Library(a.library, peers.CUDA) if torch.cuda.is_available() else None
    ratios = {}
    for d in (64, 128):
        for causal in (False, True):
            for N in (512, 2048):
                for name, key_mean, value_mean in INPUTS:
                    torch.manual_seed(1)
                    t, call = peers.make(1, 4, N, d, getattr(torch, a.dtype), "cpu", causal, ours)
                    t["k"][..., ::4] += key_mean
                    t["v"] += value_mean
                    want = exact(t, causal)
                    got = {"ours": run_library(ours, t, causal),
                           "F32": run_library(f32, t, causal),
                           "exact": run_library(ours, t, causal, peers.EXACT_DELTA),
                           "flash": run_torch(t, causal, SDPBackend.FLASH_ATTENTION),
                           "math": run_torch(t, causal, SDPBackend.MATH)}
                    if gpu:
                        got["gpu"] = run_library(gpu, t, causal)
                    errors = {n: {o: peers.relative(x[o], want[o]) for o in OUTPUTS} for n, x in got.items()}
                    kernel = call.plan.bwd_kernel.decode()
                    print(f"d{d} {'causal' if causal else 'full'} N{N} {name} ({kernel}):")
                    for n, e in errors.items():
                        print(f"    {n:6}" + "".join(f" {o} {100 * e[o]:.3f}" for o in OUTPUTS), flush=True)
                        for o in OUTPUTS:
                            ratios.setdefault((n, o), []).append(errors["ours"][o] / e[o])
    for n in ("F32", "exact", "flash", "math", "gpu"):
        if (n, "o") in ratios:
            print(f"ours over {n:6}" + "".join(
                f" {o} {statistics.geometric_mean(ratios[n, o]):.3f} (most {max(ratios[n, o]):.3f})" for o in OUTPUTS))


if __name__ == "__main__":
    main()
