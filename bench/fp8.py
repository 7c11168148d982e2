#!/usr/bin/env python3
"""FATTN_FP8 on a Hopper GPU beside FP8 of FlashAttention-3 and cuDNN: errors against fp64, and times.

    python3 bench/fp8.py --library libfattn.so [--fa3 libfa3_fp8.so] [--errors] [--speed] [--quick]

libfa3_fp8.so has FlashAttention-3's kernels behind bench/fa3_fp8.cu; without it their columns are missing. Its codes
are made here, with one scale per head and batch, amax / 448, for each of q, k and v, as its own interface asks for.
cuDNN's FP8 forward comes through its front end (pip package nvidia-cudnn-frontend), without it these columns are
missing: one scale per tensor, 256 for P, and o in bf16 where cuDNN has that, else in E4M3 with a scale that fits.

Errors: O in percent, |O - O64| / |O64| as norms over rows spread over the sequence; L as a root of a mean of squares.
One head of N rows and N keys, not causal; the reference is fp64 on the same bf16 q, k and v. Distributions:
  G  normal numbers                X  a thousandth of q, k, v has ten times the size beside it (FlashAttention-3's)
  B  four channels of K at +-10, V around 0.5    T  G with q three times as large    V  G with V around 1
int8: FATTN_FP8_INT8, Q K^T of integers.
Speed: 16384 tokens, hidden size 2048, as bench/peers.py; calls interleaved, medians of device times, TFLOP/s of
4 B H N^2 d FLOP (half when causal). kernel: forward on copies that were made before; quantiser: makes them, in us;
call: both, copies in the workspace; fa3, cudnn8: FP8 kernels on codes that were made before; bf16: ours; cudnn:
PyTorch's, bf16.
In brackets our kernel over it, of bf16 also our call over it. Needs PyTorch 2.3 or later."""
import argparse
import ctypes as C
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

try:
    import cudnn
except ImportError:
    cudnn = None

import peers

FP8, HADAMARD, INT8 = 1 << 13, 1 << 14, 1 << 17
FIELDS = ["q8", "k8", "v8", "q_scale", "q_shift", "k_scale", "v_scale", "v_mean", "partials"]


class Fp8(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("rope_base", C.c_float)] + [(n, peers.Tensor) for n in FIELDS]


class Copies:
    """A call that reads 8-bit copies of its own, made by quantise()."""

    def __init__(self, library, flags, tensors):
        self.library, self.call = library, library.prepare(flags, **tensors)
        size, self.copies = C.c_size_t(), Fp8()
        self.layout(None, size)
        self.memory = torch.empty(size.value + 256, dtype=torch.uint8, device="cuda")
        self.layout(C.c_void_p((self.memory.data_ptr() + 255) // 256 * 256), size)
        self.call.io.fp8 = C.addressof(self.copies)
        self.quantise()

    def layout(self, memory, size):
        self.library.check(self.library.lib.fattn_fp8_layout(
            self.library.ctx, C.byref(self.call.params), C.byref(self.call.io), memory, C.byref(size),
            C.byref(self.copies)))

    def quantise(self):
        self.library.check(self.library.lib.fattn_fp8_quantize(self.library.ctx, C.byref(self.call.params),
                                                               C.byref(self.call.io)))


class Fa3:
    """FlashAttention-3's FP8 forward (bench/fa3_fp8.cu) on codes of [B,H,N,d] tensors whose memory is [B,N,H,d]."""

    def __init__(self, lib, t, causal):
        B, self.H, N, d = t["q"].shape
        self.codes, self.scales = zip(*(self.quantise(t[n]) for n in "qkv"))
        self.o = torch.empty(B, N, self.H, d, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
        self.lse = torch.empty(B, self.H, N, device="cuda")
        self.counter = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.function = getattr(lib, f"fa3_fp8_fwd_{d}")
        self.args = [C.c_void_p(x.data_ptr()) for x in (*self.codes, self.o, self.lse, *self.scales)]
        self.args += [B, N, self.H, int(causal), C.c_void_p(self.counter.data_ptr()), None]

    def quantise(self, x):
        """[B,N,H,d] codes, and [B,H] scales: one head at a time, which needs little memory."""
        codes = torch.empty(x.transpose(1, 2).shape, dtype=torch.uint8, device="cuda")
        scales = torch.empty(x.shape[:2], device="cuda")
        for h in range(self.H):
            head = x[:, h].float()
            scales[:, h] = head.abs().amax((1, 2)).clamp(min=1e-30) / 448
            codes[:, :, h] = (head / scales[:, h, None, None]).to(torch.float8_e4m3fn).view(torch.uint8)
        return codes, scales

    def __call__(self):
        status = self.function(*self.args)
        if status:
            raise RuntimeError(f"fa3_fp8_fwd: CUDA error {status}")


class Cudnn8:
    """cuDNN's FP8 forward on codes of [B,H,N,d] tensors whose memory is [B,N,H,d]; o8: its o, times `scale`."""

    def __init__(self, t, causal, largest_o=None):
        B, H, N, d = t["q"].shape
        code, F32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
        self.scale = 1.0 if largest_o is None else 448 / largest_o
        self.handle = cudnn.create_handle()
        cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)
        self.graph = g = cudnn.pygraph(io_data_type=code, intermediate_data_type=F32, compute_data_type=F32,
                                       handle=self.handle)
        self.data, inputs = {}, {}
        for n in "qkv":
            descale = t[n].abs().max().float() / 448
            codes = (t[n].float() / descale).to(torch.float8_e4m3fn)
            inputs[n] = self.tensor(codes, code)
            inputs[f"descale_{n}"] = self.number(descale.item())
        for n, value in (("descale_s", 1 / 256), ("scale_s", 256.0), ("scale_o", self.scale)):
            inputs[n] = self.number(value)
        o, stats, *largest = g.sdpa_fp8(**inputs, attn_scale=d ** -0.5, use_causal_mask=causal, generate_stats=True)
        self.o8 = torch.empty(B, N, H, d, device="cuda", dtype=torch.bfloat16 if largest_o is None else
                              torch.float8_e4m3fn).transpose(1, 2)
        self.lse = torch.empty(B, H, N, device="cuda")
        self.output(o, self.o8, cudnn.data_type.BFLOAT16 if largest_o is None else code)
        self.output(stats, self.lse[..., None], F32)
        for x in largest:
            self.output(x, torch.empty(1, 1, 1, 1, device="cuda"), F32)
        g.validate()
        g.build_operation_graph()
        g.create_execution_plans([cudnn.heur_mode.A])
        g.check_support()
        g.build_plans()
        self.workspace = torch.empty(max(1, g.get_workspace_size()), dtype=torch.uint8, device="cuda")

    def tensor(self, x, dtype):
        handle = self.graph.tensor(dim=list(x.shape), stride=list(x.stride()), data_type=dtype)
        self.data[handle] = x.view(torch.uint8) if dtype == cudnn.data_type.FP8_E4M3 else x
        return handle

    def number(self, value):
        return self.tensor(torch.full((1, 1, 1, 1), value, device="cuda"), cudnn.data_type.FLOAT)

    def output(self, handle, x, dtype):
        handle.set_output(True).set_dim(list(x.shape)).set_stride(list(x.stride())).set_data_type(dtype)
        self.data[handle] = x.view(torch.uint8) if dtype == cudnn.data_type.FP8_E4M3 else x

    def o(self):
        return self.o8.float() / self.scale

    def __call__(self):
        self.graph.execute(self.data, self.workspace, handle=self.handle)


def cudnn8_call(t, causal):
    """None: cuDNN has no such call, and why is printed."""
    for largest_o in (None, t["v"].abs().max().item()):
        try:
            call = Cudnn8(t, causal, largest_o)
            call()
            return call
        except Exception as e:  # the front end's own types
            why = str(e).splitlines()[0]
    print(f"cudnn8: {why}")
    return None


def tensors(B, H, N, d):
    def new():
        return torch.randn(B, N, H, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    q = new()
    return dict(q=q, k=new(), v=new(), o=torch.empty_like(q), lse=torch.empty(B, H, N, device="cuda"))


# ---- errors ----

def add_outliers(t):
    for n in "qkv":
        t[n] += torch.where(torch.rand(t[n].shape, device="cuda") < 1e-3, 10 * torch.randn_like(t[n]), 0)


def add_channel_means(t):
    d = t["k"].shape[-1]
    for channel, mean in ((5, 10), (d // 4 + 5, -10), (d // 2 + 5, 10), (3 * d // 4 + 5, -10)):
        t["k"][..., channel] += mean
    t["v"] += 0.5


def enlarge_q(t):
    t["q"] *= 3


def add_mean_of_v(t):
    t["v"] += 1


ROWS = [("G", 1024, None), ("G", 16384, None), ("G", 131072, None), ("X", 4096, add_outliers),
        ("B", 16384, add_channel_means), ("B", 131072, add_channel_means), ("T", 4096, enlarge_q),
        ("V", 131072, add_mean_of_v)]


def exact(t, rows):
    """O and L of some rows in fp64, keys in blocks."""
    q = t["q"][0, 0, rows].double() * t["q"].shape[-1] ** -0.5
    L = torch.full((len(rows),), -torch.inf, dtype=torch.float64, device="cuda")
    o = torch.zeros(len(rows), t["v"].shape[-1], dtype=torch.float64, device="cuda")
    for j in range(0, t["k"].shape[2], 8192):
        s = q @ t["k"][0, 0, j:j + 8192].double().T
        block = s.logsumexp(-1)
        both = torch.logaddexp(L, block)
        o = o * (L - both).exp()[:, None] + (s - both[:, None]).exp() @ t["v"][0, 0, j:j + 8192].double()
        L = both
    return o, L


def errors(library, fa3, dims):
    names = ["bf16", "fp8", "fp8 rotated", "int8", "int8 rotated"] + (["fa3 fp8"] if fa3 else []) + \
        (["cudnn fp8"] if cudnn else [])
    print("errors: O in %, L; " + ", ".join(names))
    for d in dims:
        for name, N, change in ROWS:
            t = tensors(1, 1, N, d)
            if change:
                change(t)
            rows = torch.linspace(0, N - 1, min(N, 512), device="cuda").long()
            want_o, want_L = exact(t, rows)
            line = f"d{d:<4}{name} {N:<7}"
            for way in names:
                o, lse = t["o"], t["lse"]
                if way == "fa3 fp8":
                    call = Fa3(fa3, t, False)
                    o, lse = call.o, call.lse
                elif way == "cudnn fp8":
                    call = cudnn8_call(t, False)
                    if not call:
                        continue
                    o, lse = call.o(), call.lse
                else:
                    flags = {"bf16": 0, "fp8": FP8, "fp8 rotated": FP8 | HADAMARD, "int8": FP8 | INT8,
                             "int8 rotated": FP8 | INT8 | HADAMARD}[way]
                    call = library.prepare(flags, **t).fwd
                if way != "cudnn fp8":
                    o.fill_(torch.nan)
                    call()
                off = 100 * peers.relative(o[0, 0, rows], want_o)
                L_off = (lse[0, 0, rows].double() - want_L).square().mean().sqrt().item()
                line += f"  {off:6.3g} {L_off:.1e}"
            print(line, flush=True)


# ---- speed ----

def cudnn_call(t, causal):
    def call():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(t["q"], t["k"], t["v"], is_causal=causal)
    try:
        call()
    except RuntimeError:
        return None
    return call


def speed(library, fa3, dims, lengths, rounds):
    ratios = {}
    print("TFLOP/s: kernel, call, quantiser in us; peers (our kernel over it; bf16: our call over it, too)")
    for d in dims:
        for causal in (False, True):
            for N in lengths:
                B, H = 16384 // N, 2048 // d
                t, flags = tensors(B, H, N, d), peers.CAUSAL if causal else 0
                copies = Copies(library, FP8 | flags, t)
                calls = {"kernel": copies.call.fwd, "quantiser": copies.quantise,
                         "call": library.prepare(FP8 | flags, **t).fwd}
                integers = Copies(library, FP8 | INT8 | flags, t)
                calls |= {"int8 kernel": integers.call.fwd, "int8 quantiser": integers.quantise}
                copies.call.fwd()
                if fa3:
                    calls["fa3"] = Fa3(fa3, t, causal)
                    calls["fa3"]()
                    if not peers.relative(calls["fa3"].o, t["o"].double()) < 0.15:
                        print("fa3 computes something else here")
                calls["bf16"] = library.prepare(flags, **t).fwd
                if cudnn and (call8 := cudnn8_call(t, causal)):
                    calls["cudnn8"] = call8
                    if not peers.relative(call8.o(), t["o"].double()) < 0.15:
                        print("cudnn8 computes something else here")
                if call16 := cudnn_call(t, causal):
                    calls["cudnn"] = call16
                ms = peers.interleaved(calls, rounds)
                rate = {n: 4e-9 * B * H * N * N * d / (2 if causal else 1) / x for n, x in ms.items()}
                line = f"d{d:<4}{'causal' if causal else 'full':7}{N:<6} kernel {rate['kernel']:5.0f} call " \
                       f"{rate['call']:5.0f} quantiser {1000 * ms['quantiser']:4.0f} int8 kernel " \
                       f"{rate['int8 kernel']:5.0f} quantiser {1000 * ms['int8 quantiser']:4.0f}"
                ratios.setdefault("int8 kernel over kernel", []).append(ms["kernel"] / ms["int8 kernel"])
                for n in ms:
                    if n in ("kernel", "call", "quantiser", "int8 kernel", "int8 quantiser"):
                        continue
                    over = [ms[n] / ms["kernel"]] + ([ms[n] / ms["call"]] if n == "bf16" else [])
                    for which, r in zip(("kernel", "call"), over):
                        ratios.setdefault(f"{which} over {n}", []).append(r)
                    line += f"  {n} {rate[n]:4.0f} ({', '.join(f'{r:.2f}' for r in over)})"
                print(line, flush=True)
    print("geometric means (least): " + ", ".join(f"{n} {statistics.geometric_mean(r):.3f} ({min(r):.2f})"
                                                  for n, r in ratios.items()))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--library", default="build/release/lib/libfattn.so")
    p.add_argument("--fa3", metavar="LIBRARY", help="FlashAttention-3's FP8 kernels (bench/fa3_fp8.cu)")
    p.add_argument("--errors", action="store_true", help="only these")
    p.add_argument("--speed", action="store_true", help="only this")
    p.add_argument("--dims", type=int, nargs="*", default=[64, 128, 256], help="head_dims of the times")
    p.add_argument("--lengths", type=int, nargs="*", default=peers.LENGTHS)
    p.add_argument("--rounds", type=int, default=21)
    p.add_argument("--quick", action="store_true", help="fewer lengths")
    a = p.parse_args()
    torch.manual_seed(0)
    library = peers.Library(a.library, peers.CUDA, quiet=True)
    fa3 = C.CDLL(a.fa3) if a.fa3 else None
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    if not a.speed:
        errors(library, fa3, (128, 64))
    if not a.errors:
        speed(library, fa3, a.dims, (1024, 4096, 16384) if a.quick else a.lengths, a.rounds)


if __name__ == "__main__":
    main()
