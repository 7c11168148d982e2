"""Peak memory of one attention layer, forward and backward: fattn memory beside PyTorch, in one run.

    python3 bench/peers_memory.py --fattn build/cuda/bin/fattn [--json FILE] [--plot FILE.svg]

B 1, 16 heads, d 64, causal, bf16. Both sides count what is allocated above q, k and v: O, what is kept for
backward, dO, dQ, dK, dV and workspaces; PyTorch by its allocator's peak (flash: FlashAttention-2; math:
N x N stored), fattn by its context's. Rows that do not fit the card say so. Needs PyTorch."""
import argparse
import json
import subprocess
import sys
import tempfile

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, D, MIB = 16, 64, 2**20


def inputs(n):
    return 3 * n * HEADS * D * 2


def torch_peak(n, backend):
    """Bytes above q, k and v, or None when it does not fit."""
    torch.cuda.empty_cache()
    q, k, v = (torch.randn(1, HEADS, n, D, device="cuda", dtype=torch.bfloat16,
                           requires_grad=True) for _ in range(3))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    try:
        with sdpa_kernel(backend):
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        o.backward(torch.randn_like(o))
        return torch.cuda.max_memory_allocated() - before
    except torch.cuda.OutOfMemoryError:
        return None


def fattn_rows(o, lengths):
    with tempfile.NamedTemporaryFile("r") as log:
        command = [o.fattn, "memory", "--device", "cuda", "--dtype", "bf16", "--heads", str(HEADS),
                   "--d", str(D), "--layers", "0", "--n", ",".join(map(str, lengths)), "--json",
                   o.json or log.name]
        subprocess.run(command + (["--plot", o.plot] if o.plot else []), check=True,
                       stdout=subprocess.DEVNULL)
        with open(o.json or log.name) as lines:
            return {(r["algorithm"], r["n"]): r for r in map(json.loads, lines)}


def text(value):
    return f"{'does not fit':>13s}" if value is None else f"{value / MIB:13.1f}"


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--fattn", required=True, help="the program")
    p.add_argument("--longest", type=int, default=131072)
    p.add_argument("--json", help="fattn's rows")
    p.add_argument("--plot", help="fattn's picture")
    o = p.parse_args()
    lengths = [1024]
    while 2 * lengths[-1] <= o.longest:
        lengths.append(2 * lengths[-1])
    rows = fattn_rows(o, lengths)
    torch_peak(256, SDPBackend.FLASH_ATTENTION)
    torch_peak(256, SDPBackend.MATH)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}; MiB above q, k, v")
    print(f"{'N':>7s} {'fattn flash':>13s} {'as predicted':>13s} {'PyTorch flash':>13s} {'ratio':>6s}  "
          f"{'fattn N x N':>13s} {'as predicted':>13s} {'PyTorch math':>13s}")
    worse = 0
    for n in lengths:
        ours = {}
        for way in "flash", "standard":
            r = rows[way, n]
            counted = r["counted_bytes"]
            ours[way] = (None if counted is None else counted - inputs(n),
                         r["predicted_bytes"] - inputs(n))
        flash = torch_peak(n, SDPBackend.FLASH_ATTENTION)
        math = torch_peak(n, SDPBackend.MATH)
        worse += ours["flash"][0] > flash
        print(f"{n:7d} {text(ours['flash'][0])} {text(ours['flash'][1])} {text(flash)} "
              f"{ours['flash'][0] / flash:6.2f}  {text(ours['standard'][0])} "
              f"{text(ours['standard'][1])} {text(math)}")
    print(f"{len(lengths)} lengths, {worse} with more than PyTorch's flash")
    return worse > 0


if __name__ == "__main__":
    sys.exit(main())
