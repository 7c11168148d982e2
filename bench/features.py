"""What a feature costs: libfattn's TFLOP/s with it over those of the plain call, in one run, interleaved.

    python3 bench/features.py --library build/release/lib/libfattn.so [--lengths 4096] [--dims 64 128 256]
        [--cases bias dropout] [--peers flash efficient cudnn] [--before LIBRARY] [--means 2]

bf16, 16384 tokens, hidden size 2048. Only pairs (row, key) that are visible count as work. `causal` rows
are relative to the plain causal call, the others to the plain full one. A bias is [1,H,N,N] in bf16, for all sequences
of the batch; dbias: its gradient is asked for, too. --peers: PyTorch's backends with the same bias, or with dropout.
--before: another build of libfattn; how much faster this one is.
Needs PyTorch for its tensors."""
import argparse
import statistics

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import peers

WINDOW, DETERMINISTIC = 4, 8


def lengths_of(B, N, seed):
    """B lengths from N/4 to N with the sum B * 5/8 N."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(N // 4, N + 1, (B,), generator=generator)
    return x.tolist()


def visible(Sq, Sk, left=None, right=None):
    """Pairs (i, j) with i + off - left <= j <= i + off + right."""
    off, count = Sk - Sq, 0
    for i in range(Sq):
        low = 0 if left is None else max(0, i + off - left)
        high = Sk - 1 if right is None else min(Sk - 1, i + off + right)
        count += max(0, high - low + 1)
    return count


def cases(B, H, N, d, device):
    """Name, what it is compared with, flags, params, tensors, visible pairs per head of the whole batch."""
    full, causal = B * visible(N, N), B * visible(N, N, None, 0)
    slopes = torch.tensor([2.0 ** (-8.0 * (h + 1) / H) for h in range(H)], device=device)
    lengths = lengths_of(B, N, 1)
    lines = torch.tensor(lengths, dtype=torch.int32, device=device)
    sums = torch.tensor([sum(lengths[:n]) for n in range(B + 1)], dtype=torch.int32, device=device)
    padded = sum(visible(n, n) for n in lengths)
    padded_causal = sum(visible(n, n, None, 0) for n in lengths)
    left = N // 4
    bias = torch.randn(1, H, N, N, device=device, dtype=torch.bfloat16).expand(B, H, N, N)
    C = peers.CAUSAL
    yield "plain", None, 0, {}, {}, full
    yield "plain causal", None, C, {}, {}, causal
    yield "alibi", "plain", 0, {}, {"alibi": slopes}, full
    yield "alibi causal", "plain causal", C, {}, {"alibi": slopes}, causal
    yield "window causal", "plain causal", C | WINDOW, {"window_left": left, "window_right": 0}, {}, \
        B * visible(N, N, left, 0)
    yield "window", "plain", WINDOW, {"window_left": left, "window_right": left}, {}, \
        B * visible(N, N, left, left)
    yield "padded", "plain", 0, {}, {"seqlens_q": lines, "seqlens_k": lines}, padded
    yield "packed causal", "plain causal", C, {"max_seqlen_q": N, "max_seqlen_k": N}, \
        {"cu_seqlens_q": sums, "cu_seqlens_k": sums}, padded_causal
    yield "sink causal", "plain causal", C, {}, {"sink": torch.zeros(H, device=device)}, causal
    yield "softcap", "plain", 0, {"softcap": 30.0}, {}, full
    yield "softcap causal", "plain causal", C, {"softcap": 30.0}, {}, causal
    yield "dropout", "plain", 0, {"dropout_p": 0.1}, {}, full
    yield "dropout causal", "plain causal", C, {"dropout_p": 0.1}, {}, causal
    yield "bias", "plain", 0, {}, {"bias": bias}, full
    yield "bias causal", "plain causal", C, {}, {"bias": bias}, causal
    d_bias = torch.zeros(1, H, N, N, device=device).expand(B, H, N, N)
    yield "bias, dbias", "plain", 0, {}, {"bias": bias, "d_bias": d_bias}, full
    yield "deterministic", "plain", DETERMINISTIC, {}, {}, full
    yield "deterministic causal", "plain causal", C | DETERMINISTIC, {}, {}, causal


def call_of(library, means, B, H, N, d, device, flags, params, tensors):
    packed = "cu_seqlens_q" in tensors
    total = int(tensors["cu_seqlens_q"][-1]) if packed else N

    def new():
        return torch.randn(1 if packed else B, total, H, d, device=device,
                           dtype=torch.bfloat16).transpose(1, 2)
    t = {n: new() for n in ("q", "k", "v", "d_o", "o", "dq", "dk", "dv")}
    t["k"][..., ::d // 4] += means
    t["lse"] = torch.empty(t["q"].shape[:3], device=device)
    return library.prepare(flags, params, **t, **tensors)


BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "cudnn": SDPBackend.CUDNN_ATTENTION}


def peer_calls(backend, B, H, N, d, device, flags, params, tensors):
    """Forward and backward of PyTorch's call with this bias or dropout; None where the backend refuses it."""
    def new():
        return torch.randn(B, N, H, d, device=device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
    inputs = [new(), new(), new()]
    bias = tensors["bias"][:1].detach().clone().requires_grad_("d_bias" in tensors) if "bias" in tensors else None
    mask = None if bias is None else bias.expand(B, H, N, N)
    options = {"dropout_p": params.get("dropout_p", 0.0), "is_causal": bool(flags & peers.CAUSAL)}
    d_o = new().detach()

    def forward():
        with sdpa_kernel(BACKENDS[backend]):
            return torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=mask, **options)
    wanted = inputs + [bias] if "d_bias" in tensors else inputs
    try:
        out = forward()
        torch.autograd.grad(out, wanted, d_o, retain_graph=True)
    except RuntimeError as error:
        print(f"{backend} d{d} refuses: {str(error).splitlines()[0][:100]}", flush=True)
        return None

    def only_forward():
        with torch.no_grad():
            forward()
    return {"fwd": only_forward, "bwd": lambda: torch.autograd.grad(out, wanted, d_o, retain_graph=True)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--library", required=True)
    parser.add_argument("--dims", type=int, nargs="*", default=[64, 128, 256])
    parser.add_argument("--lengths", type=int, nargs="*", default=[4096])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--passes", nargs="*", default=["fwd", "bwd"], choices=["fwd", "bwd"])
    parser.add_argument("--cases", nargs="*", help="only these beside the plain ones, by the start of their names")
    parser.add_argument("--peers", nargs="*", default=[], choices=list(BACKENDS),
                        help="beside calls with a bias or dropout")
    parser.add_argument("--before", metavar="LIBRARY", help="another build of libfattn, beside this one")
    parser.add_argument("--means", type=float, default=0, help="added to four channels of K: dQ is corrected")
    a = parser.parse_args()
    library = peers.Library(a.library, peers.CUDA)
    before = a.before and peers.Library(a.before, peers.CUDA)
    torch.manual_seed(0)
    for d in a.dims:
        for N in a.lengths:
            B, H = 16384 // N, 2048 // d
            rows = []
            beside = {}  # calls of peers
            for name, base, flags, params, tensors, pairs in cases(B, H, N, d, "cuda"):
                if a.cases is not None and base and not any(name.startswith(x) for x in a.cases):
                    continue
                shape = a.means, B, H, N, d, "cuda", flags, params, tensors
                rows.append((name, base, pairs, call_of(library, *shape)))
                if before:
                    call = call_of(before, *shape)
                    call.fwd()
                    beside[name, "before"] = {"fwd": call.fwd, "bwd": call.bwd}
                for peer in a.peers if name in ("bias", "bias, dbias", "dropout", "dropout causal") else []:
                    if calls := peer_calls(peer, B, H, N, d, "cuda", flags, params, tensors):
                        beside[name, peer] = calls
            for which in a.passes:
                calls = {r[0]: getattr(r[3], which) for r in rows
                         if which == "bwd" or not r[0].startswith("deterministic")}
                for r in rows:
                    if which == "bwd":
                        r[3].fwd()
                calls |= {key: value[which] for key, value in beside.items()}
                times = peers.interleaved(calls, a.rounds)
                rate = {r[0]: (4 if which == "fwd" else 10) * H * d * r[2] / times[r[0]] / 1e9
                        for r in rows if r[0] in calls}
                for name, base, _, call in rows:
                    if name not in rate:
                        continue
                    kernel = getattr(call.plan, which + "_kernel").decode()
                    share = f"{rate[name] / rate[base]:6.2f}" if base else "      "
                    ratios = "".join(f"  {peer} {times[name, peer] / times[name]:.2f}x"
                                     for x, peer in beside if x == name)
                    print(f"{which} d{d:<4}N {N:<6}{name:22}{rate[name]:7.0f} TFLOP/s {share}  {kernel}{ratios}",
                          flush=True)


if __name__ == "__main__":
    main()
