"""libfattn beside PyTorch's attention backends: same tensors, calls interleaved, medians, ratios.

    python3 bench/peers.py --library build/release/lib/libfattn.so [--device cpu] [--quick] [--check]

On CUDA, rows are those of the usual FlashAttention benchmark: 16384 tokens, hidden size 2048, N =
512..16384, head_dim 64, 128, 256, full and causal. On the CPU (--device cpu, --threads), one sequence: 8
heads up to N = 1024, 2 heads of 4096, in GFLOP/s and in shares of OpenBLAS's 2048^3 float32 matrix product on
the same threads. FLOP count 4 B H N^2 d forward (half when causal), 2.5 times that backward. Needs PyTorch;
nothing here is used by the library or its tests."""
import argparse
import ctypes as C
import os
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

F64, F32, F16, BF16, I32 = 1, 2, 3, 4, 5
DTYPES = {torch.float64: F64, torch.float32: F32, torch.float16: F16, torch.bfloat16: BF16,
          torch.int32: I32}
CPU, CUDA = 1, 2
CAUSAL, TF32, EXACT_DELTA, UNIFIED_MAX = 1, 16, 64, 1 << 15


class Tensor(C.Structure):
    _fields_ = [("data", C.c_void_p), ("shape", C.c_int64 * 5), ("stride", C.c_int64 * 5),
                ("ndim", C.c_int32), ("dtype", C.c_int32), ("device", C.c_int32),
                ("device_id", C.c_int32)]


class Rng(C.Structure):
    _fields_ = [("seed", C.c_uint64), ("stream", C.c_uint32), ("reserved", C.c_uint32)]


class Params(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("flags", C.c_uint32), ("algorithm", C.c_int32),
                ("scale", C.c_float), ("softcap", C.c_float), ("dropout_p", C.c_float),
                ("window_left", C.c_int32), ("window_right", C.c_int32),
                ("max_seqlen_q", C.c_int64), ("max_seqlen_k", C.c_int64), ("q_pos0", C.c_int64),
                ("k_pos0", C.c_int64), ("rng", Rng), ("rng_batch0", C.c_int32),
                ("rng_head0", C.c_int32), ("rng_heads", C.c_int32), ("unified_max", C.c_float)]


IO_TENSORS = ["q", "k", "v", "o", "lse", "bias", "alibi", "sink", "seqlens_q", "seqlens_k",
              "cu_seqlens_q", "cu_seqlens_k", "rng_step", "d_o", "d_lse", "delta", "dq", "dk", "dv",
              "d_bias", "d_sink"]


class Io(C.Structure):
    _fields_ = ([("struct_size", C.c_uint32), ("reserved", C.c_uint32)] +
                [(n, C.POINTER(Tensor)) for n in IO_TENSORS] +
                [("saved", C.c_void_p), ("saved_bytes", C.c_size_t), ("workspace", C.c_void_p),
                 ("workspace_bytes", C.c_size_t), ("page_table", C.POINTER(Tensor)), ("fp8", C.c_void_p)])


class Plan(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("deterministic", C.c_uint32),
                ("fwd_workspace", C.c_size_t), ("bwd_workspace", C.c_size_t),
                ("saved_bytes", C.c_size_t), ("lse_bytes", C.c_size_t),
                ("materialized_bytes", C.c_size_t), ("fwd_kernel", C.c_char * 64),
                ("bwd_kernel", C.c_char * 64)]


class CtxOptions(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("flags", C.c_uint32), ("device", C.c_int32),
                ("device_id", C.c_int32), ("stream", C.c_void_p), ("cpu_threads", C.c_int32),
                ("arch_cap", C.c_int32), ("sm_limit", C.c_int32), ("reserved", C.c_int32),
                ("allocator", C.c_void_p * 3), ("log", C.c_void_p), ("log_user", C.c_void_p)]


LOG = C.CFUNCTYPE(None, C.c_void_p, C.c_int, C.c_char_p)


class Library:
    """One context, and attention calls on torch tensors of its device."""

    def __init__(self, path, device, threads=0, arch_cap=0, quiet=False, flags=0, stream=None):
        self.lib = C.CDLL(path)
        self.lib.fattn_ctx_error.restype = C.c_char_p
        self.log = LOG(lambda user, level, text: print(text.decode(), file=sys.stderr))
        options = CtxOptions(struct_size=C.sizeof(CtxOptions), flags=flags, device=device, stream=stream,
                             cpu_threads=threads,
                             arch_cap=arch_cap, log=None if quiet else C.cast(self.log, C.c_void_p))
        self.ctx = C.c_void_p()
        status = self.lib.fattn_ctx_create(C.byref(options), C.byref(self.ctx))
        if status:
            raise SystemExit(f"fattn_ctx_create: status {status}")
        self.device = device

    def tensor(self, t):
        r = Tensor(data=t.data_ptr(), ndim=t.dim(), dtype=DTYPES.get(t.dtype, 0), device=self.device,
                   device_id=0)
        for d in range(t.dim()):
            r.shape[d], r.stride[d] = t.shape[d], t.stride(d)
        return r

    def check(self, status):
        if status:
            raise RuntimeError(self.lib.fattn_ctx_error(self.ctx).decode())

    def prepare(self, flags=0, params=None, **tensors):
        """An attention call with everything it points to: call .fwd() and .bwd(). `params`: by name."""
        return Call(self, flags, params or {}, tensors)


class Call:
    def __init__(self, library, flags, params, tensors):
        self.library, self.torch_tensors = library, tensors
        self.params = Params(struct_size=C.sizeof(Params), flags=flags, **params)
        self.views = {n: library.tensor(t) for n, t in tensors.items()}
        self.io = Io(struct_size=C.sizeof(Io), **{n: C.pointer(v) for n, v in self.views.items()})
        plan = Plan(struct_size=C.sizeof(Plan))
        library.check(library.lib.fattn_attention_query(library.ctx, C.byref(self.params),
                                                        C.byref(self.io), C.byref(plan)))
        self.plan = plan
        size = max(plan.fwd_workspace, plan.bwd_workspace) + 256
        self.workspace = torch.empty(size, dtype=torch.uint8, device=tensors["q"].device)
        self.io.workspace = (self.workspace.data_ptr() + 255) // 256 * 256
        self.io.workspace_bytes = size - 256
        self.saved = torch.empty(plan.saved_bytes + 256, dtype=torch.uint8, device=tensors["q"].device)
        self.io.saved = (self.saved.data_ptr() + 255) // 256 * 256
        self.io.saved_bytes = plan.saved_bytes

    def fwd(self):
        lib = self.library
        lib.check(lib.lib.fattn_attention_fwd(lib.ctx, C.byref(self.params), C.byref(self.io)))

    def bwd(self):
        lib = self.library
        lib.check(lib.lib.fattn_attention_bwd(lib.ctx, C.byref(self.params), C.byref(self.io)))


def make(B, H, N, d, dtype, device, causal, library, Hkv=None, flags=0):
    """Tensors [B,H,N,d] of [B,N,H,d] memory, and the library's call on them."""
    Hkv = Hkv or H

    def new(h):
        return torch.randn(B, N, h, d, device=device, dtype=dtype).transpose(1, 2)
    q, k, v, d_o = new(H), new(Hkv), new(Hkv), new(H)
    t = dict(q=q, k=k, v=v, d_o=d_o, o=torch.empty_like(q), dq=torch.empty_like(q),
             dk=torch.empty_like(k), dv=torch.empty_like(v),
             lse=torch.empty(B, H, N, device=device,
                             dtype=torch.float64 if dtype == torch.float64 else torch.float32))
    return t, library.prepare(flags | (CAUSAL if causal else 0), **t)


def relative(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def check(library, device, dtypes):
    """Relative errors against fp64 of PyTorch's math, beside PyTorch's own fused kernel."""
    worst = 0
    for dtype in dtypes:
        for B, H, Hkv, N, d in ((2, 4, 4, 512, 64), (2, 4, 2, 333, 128), (1, 2, 1, 1000, 256),
                                (1, 3, 3, 257, 80), (2, 2, 2, 65, 96), (1, 2, 2, 1, 64)):
            for causal in (False, True):
                t, call = make(B, H, N, d, dtype, device, causal, library, Hkv)
                call.fwd()
                call.bwd()
                exact = {n: t[n].double().requires_grad_() for n in "qkv"}
                wide = [exact["q"]] + [exact[n].repeat_interleave(H // Hkv, 1) for n in "kv"]
                s = wide[0] @ wide[1].transpose(2, 3) / d ** 0.5
                if causal:
                    s = s.masked_fill(torch.ones(N, N, device=device).triu(1).bool(), -torch.inf)
                o = s.softmax(-1) @ wide[2]
                o.backward(t["d_o"].double())
                low = {n: t[n].clone().requires_grad_() for n in "qkv"}
                with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
                    lo = F.scaled_dot_product_attention(
                        low["q"], low["k"].repeat_interleave(H // Hkv, 1),
                        low["v"].repeat_interleave(H // Hkv, 1), is_causal=causal)
                lo.backward(t["d_o"])
                want = [o, exact["q"].grad, exact["k"].grad, exact["v"].grad]
                ours = [t["o"], t["dq"], t["dk"], t["dv"]]
                theirs = [lo, low["q"].grad, low["k"].grad, low["v"].grad]
                L = (t["lse"].double() - s.logsumexp(-1)).abs().max().item()
                errors = [(relative(a, w) if w.norm() > 0 else a.double().norm().item(),
                           relative(b, w) if w.norm() > 0 else 0) for a, b, w in
                          zip(ours, theirs, want)]
                bad = L > 1e-5 or any(not a <= 1.2 * b + 1e-5 for a, b in errors)
                worst += bad
                print(f"{str(dtype)[6:]:9} B{B} H{H}/{Hkv} N{N} d{d} causal={int(causal)} "
                      f"L {L:.1e}  " + "  ".join(f"{n} {a:.2e}/{b:.2e}" for n, (a, b) in
                                                 zip(("o", "dq", "dk", "dv"), errors)),
                      "BAD" if bad else "")
    print("check:", "FAILED" if worst else "ok")
    return worst


SLEEP = 1500000  # cycles, about 0.9 ms: longer than the host takes for a batch


def batch_ms(call, count):
    """Device time of one call out of `count` in a row, which the host enqueues while the device sleeps."""
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(SLEEP)
    a.record()
    for _ in range(count):
        call()
    b.record()
    b.synchronize()
    return a.elapsed_time(b) / count


def interleaved(calls, rounds):
    """Median device times in ms of batches of about 1.5 ms, or of what the host enqueues while the device sleeps. The
    libraries take turns, so that the card's clock, which follows its power, is the same for all."""
    host = []
    for call in calls.values():
        call()
        begin = time.perf_counter()
        call()
        host.append(time.perf_counter() - begin)
    count = max(1, round(1.5 / batch_ms(next(iter(calls.values())), 3) + 0.5))
    count = max(1, min(count, int(0.7e-3 / max(host))))
    times = {n: [] for n in calls}
    for _ in range(rounds):
        for n, call in calls.items():
            times[n].append(batch_ms(call, count))
    return {n: statistics.median(t) for n, t in times.items()}


def torch_calls(t, causal, backend):
    """Forward and backward of one of PyTorch's backends on the tensors t, in their memory."""
    leaf = {n: t[n].detach().requires_grad_() for n in "qkv"}
    more = dict(enable_gqa=True) if t["q"].shape[1] != t["k"].shape[1] else {}

    def forward():
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(leaf["q"], leaf["k"], leaf["v"], is_causal=causal, **more)
    out = forward()
    return forward, lambda: torch.autograd.grad(out, list(leaf.values()), t["d_o"], retain_graph=True)


# What FlashAttention-3's own kernels reached over cuDNN 9.19 in one run on an H200: forward, backward,
# for N = 512 .. 16384: for runs without --fa3.
FA3_OVER_CUDNN = {
    (64, False): ((.84, .87, 1.01, 1.04, 1.07, 1.13), (1.18, 1.18, 1.17, 1.16, 1.18, 1.17)),
    (64, True): ((.87, .90, 1.02, 1.05, 1.17, 1.14), (1.17, 1.22, 1.27, 1.26, 1.27, 1.24)),
    (128, False): ((.97, 1.00, 1.03, .99, 1.00, 1.11), (1.07, 1.09, 1.12, 1.14, 1.11, 1.11)),
    (128, True): ((.97, 1.12, 1.10, 1.09, 1.21, 1.11), (1.07, 1.16, 1.20, 1.20, 1.19, 1.14)),
    (256, False): ((.99, .99, 1.00, 1.03, 1.03, 1.01), (1.25, 1.30, 1.22, 1.25, 1.30, 1.30)),
    (256, True): ((.98, 1.04, 1.13, 1.12, 1.10, 1.12), (1.12, 1.20, 1.22, 1.24, 1.22, 1.23)),
}
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


class Fa3Call(C.Structure):
    _fields_ = ([("tensor", C.c_void_p * 8), ("stride", C.c_int64 * 3 * 8)] +
                [(n, C.c_void_p) for n in ("lse", "lse2", "delta", "dq_sums", "dk_sums", "dv_sums", "counters",
                                           "cu_seqlens_q", "cu_seqlens_k")] +
                [(n, C.c_int32) for n in ("B", "H", "Hkv", "Sq", "Sk", "total_q", "total_k", "d", "dv", "causal",
                                          "left", "right")] +
                [(n, C.c_void_p) for n in ("o_parts", "lse_parts")])


class Fa3:
    """FlashAttention-3's kernels, in a shared library made by bench/fa3.sh."""

    def __init__(self, path):
        self.lib = C.CDLL(path)

    def function(self, name):
        try:
            return getattr(self.lib, name)
        except AttributeError:
            return None

    def calls(self, t, causal, left=-1, right=-1, sums=None, longest=0):
        """Forward and backward on [B,H,S,D] tensors, and what they write. A window if left or right is not negative;
        sums: cu_seqlens of rows and keys. None in place of a call that the library lacks: without forward, backward
        reads the o and lse of t."""
        _, H, Sq, d = t["q"].shape
        Hkv, Sk, dv = t["k"].shape[1], t["k"].shape[2], t["v"].shape[3]
        B = t["q"].shape[0] if sums is None else len(sums) - 1
        many, keys = ((B * (n + 128) if sums is None else n + 128 * (B + 1)) for n in (Sq, Sk))
        wide = next(n for n in (64, 96, 128, 192, 256) if n >= d)
        wide_v = wide if dv == d else next(n for n in (64, 96, 128, 192, 256) if n >= dv)
        kind = (H != Hkv) + 2 * (left >= 0 or right >= 0) + 4 * (sums is not None)
        dtype = {torch.bfloat16: "bf16", torch.float16: "f16"}[t["q"].dtype]

        def new(*shape, dtype=torch.float32):
            return torch.empty(shape, dtype=dtype, device=t["q"].device)
        results = {n: torch.empty_like(t[n]) for n in ("o", "dq", "dk", "dv")}
        results["lse"] = new(*t["q"].shape[:3])
        space = dict(lse2=new(many * H), delta=new(many * H), dq_sums=new(many * H * wide),
                     counters=new(-(-(longest or Sq) // 64) * B * H + 4 * B + 17, dtype=torch.int32))
        if H != Hkv:
            space.update(dk_sums=new(keys * Hkv * wide), dv_sums=new(keys * Hkv * wide))
        call = Fa3Call(B=B, H=H, Hkv=Hkv, Sq=longest or Sq, Sk=longest or Sk, total_q=t["q"].shape[0] * Sq,
                       total_k=t["q"].shape[0] * Sk, d=d, dv=dv, causal=causal, left=left, right=right)
        for n, x in {"lse": results["lse"], **space}.items():
            setattr(call, n, x.data_ptr())
        if sums is not None:
            call.cu_seqlens_q = call.cu_seqlens_k = sums.data_ptr()
        for i, n in enumerate(("q", "k", "v", "o", "d_o", "dq", "dk", "dv")):
            x = results.get(n, t[n])
            call.tensor[i] = x.data_ptr()
            call.stride[i][:] = (0 if sums is not None else x.stride(0), x.stride(2), x.stride(1))

        def bind(which):
            name = f"fa3_{which}_{wide}_{wide_v}_{dtype}_{kind}"
            function = self.function(name)

            def run():
                status = function(C.byref(call), None)
                if status:
                    raise RuntimeError(f"{name}: CUDA error {status}")
            run.keep = t, results, space, sums
            return function and run
        forward, backward = bind("fwd"), bind("bwd")
        if not forward:
            results["o"].copy_(t["o"]), results["lse"].copy_(t["lse"])
        return forward, backward, results

    def few_queries(self, t, stream):
        """Forward without a mask on [B,H,S,D] tensors, with keys split as their flash_attn_func does, and o. None
        where the library lacks it."""
        B, H, Sq, d = t["q"].shape
        Hkv, Sk = t["k"].shape[1:3]
        function = self.function(f"fa3_fwd_{d}_{d}_bf16_8")
        if not function:
            return None, None

        def new(*shape, dtype=torch.float32):
            return torch.empty(shape, dtype=dtype, device=t["q"].device)
        o, parts = torch.empty_like(t["q"]), 128 if B * Hkv < 128 else 1  # where heads fill the GPU it splits nothing
        space = dict(lse=new(B, H, Sq), counters=new(64 * B * H, dtype=torch.int32),
                     o_parts=new(parts, B, H, Sq, d), lse_parts=new(parts, B, H, Sq))
        call = Fa3Call(B=B, H=H, Hkv=Hkv, Sq=Sq, Sk=Sk, total_q=B * Sq, total_k=B * Sk, d=d, dv=d, causal=0, left=-1,
                       right=-1)
        for n, x in space.items():
            setattr(call, n, x.data_ptr())
        for i, x in enumerate((t["q"], t["k"], t["v"], o)):
            call.tensor[i] = x.data_ptr()
            call.stride[i][:] = (x.stride(0), x.stride(2), x.stride(1))

        def run():
            status = function(C.byref(call), C.c_void_p(stream))
            if status:
                raise RuntimeError(f"FlashAttention-3: CUDA error {status}")
        run.keep = t, space
        return run, o


def bench(library, device, a):
    fa3 = Fa3(a.fa3) if a.fa3 else None
    before = Library(a.before, CUDA, arch_cap=a.arch_cap) if a.before else None
    backends = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
                "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
    ratios, digits = {}, 1 if a.dtype in ("float32", "float64") else 0
    torch.backends.cuda.matmul.allow_tf32 = a.tf32
    for d in a.dims:
        for causal in (False, True):
            for N in a.lengths or ((1024, 4096, 16384) if a.quick else LENGTHS):
                B, H = 16384 // N, 2048 // d
                t, call = make(B, H, N, d, getattr(torch, a.dtype), device, causal, library,
                               flags=TF32 if a.tf32 else 0)
                t["k"][..., ::max(1, d // 4)] += a.means
                flops = 4 * B * H * N * N * d / (2 if causal else 1)
                passes = ({"ours": call.fwd}, {"ours": call.bwd})
                if before:
                    older = before.prepare((TF32 if a.tf32 else 0) | (CAUSAL if causal else 0), **t)
                    passes[0]["before"], passes[1]["before"] = older.fwd, older.bwd
                if a.exact:
                    exact = library.prepare(EXACT_DELTA | (CAUSAL if causal else 0), **t)
                    exact.fwd()
                    passes[0]["exact"], passes[1]["exact"] = exact.fwd, exact.bwd
                for name in a.peers or ("fa2", "cudnn"):
                    passes[0][name], passes[1][name] = torch_calls(t, causal, backends[name])
                if fa3 and a.dtype == "bfloat16":
                    passes[0]["fa3"], passes[1]["fa3"], results = fa3.calls(t, causal)
                    for one in (call.fwd, call.bwd, passes[0]["fa3"], passes[1]["fa3"]):
                        one()
                    if relative(results["dq"], t["dq"].double()) > 0.02:
                        print("fa3 computes something else here")
                line = f"d{d:<4}{'causal' if causal else 'full':7}{N:<6}"
                for k, factor in ((0, 1.0), (1, 2.5)):
                    ms = interleaved(passes[k], 21)
                    for n in ms:
                        line += f" {n} {flops * factor / ms[n] * 1e-9:5.{digits}f}"
                        if n != "ours":
                            r = ms[n] / ms["ours"]
                            ratios.setdefault((n, k), []).append(r)
                            line += f" ({r:.2f})"
                    if "cudnn" in ms:
                        known = ms["cudnn"] / FA3_OVER_CUDNN[d, causal][k][LENGTHS.index(N)]
                        r = min(ms["cudnn"], ms.get("fa3", known)) / ms["ours"]
                        ratios.setdefault(("better of cudnn and fa3", k), []).append(r)
                        line += f" better ({r:.2f})"
                    line += "  |" if k == 0 else ""
                print(line, flush=True)
    for (n, k), r in sorted(ratios.items()):
        print(f"geometric mean, ours over {n}, {'backward' if k else 'forward'}: "
              f"{statistics.geometric_mean(r):.3f}  worst {min(r):.3f}")


def check_large(library, device):
    """Errors of O against fp64 for larger and larger scores, beside cuDNN's."""
    for d in (64, 128, 256):
        for scale in (1, 2, 4):
            t, call = make(1, 4, 4096, d, torch.bfloat16, device, False, library)
            t["q"].mul_(scale)
            call.fwd()
            s = t["q"].double() @ t["k"].double().transpose(2, 3) / d ** 0.5
            exact = s.softmax(-1) @ t["v"].double()
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                theirs = F.scaled_dot_product_attention(t["q"], t["k"], t["v"])
            L = (t["lse"].double() - s.logsumexp(-1)).abs().max().item()
            print(f"d{d} q x {scale}: o {relative(t['o'], exact):.3e}, cudnn's "
                  f"{relative(theirs, exact):.3e}, L {L:.1e}")


# ---- the CPU ----

CPU_ROWS = [(8, 128), (8, 256), (8, 512), (8, 1024), (2, 4096)]  # heads, N
CPU_GOALS = {512: (0.65, 0.65), 1024: (0.78, 0.76), 4096: (0.80, 0.80)}  # shares, causal, float32


def seconds(call, least):
    """Per call: the best of three runs of at least that long, after one to warm up."""
    call()
    begin = time.perf_counter()
    call()
    count = max(1, int(least / (time.perf_counter() - begin)))
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter() - begin) / count)
    return best


CORE = "import ctypes as C; b = C.CDLL('libopenblas.so.0'); b.openblas_get_corename.restype = C.c_char_p; " \
       "print(b.openblas_get_corename().decode())"


def choose_blas():
    """OpenBLAS picks its kernels by the CPU's model, as it is loaded. One that it does not know yet gets
    SSE3's ("Prescott"), an eighth of the speed on a CPU with AVX-512: then say what it has."""
    core = subprocess.run([sys.executable, "-c", CORE], capture_output=True, text=True).stdout.strip()
    with open("/proc/cpuinfo") as f:
        flags = next((line for line in f if line.startswith("flags")), "").split()
    if core == "Prescott" and "avx2" in flags:
        os.environ["OPENBLAS_CORETYPE"] = "SkylakeX" if "avx512f" in flags else "Haswell"


class Sgemm:
    """OpenBLAS's float32 matrix product, the one that libfattn has loaded."""

    def __init__(self, threads, n=2048):
        self.blas, self.n = C.CDLL("libopenblas.so.0"), n
        self.blas.openblas_set_num_threads(threads)
        self.blas.openblas_get_corename.restype = C.c_char_p
        self.core = self.blas.openblas_get_corename().decode()
        self.a, self.b, self.c = (torch.randn(n, n) for _ in range(3))

    def __call__(self):
        row_major, plain, n, one, zero = 101, 111, self.n, C.c_float(1), C.c_float(0)
        x, y, z = (C.c_void_p(t.data_ptr()) for t in (self.a, self.b, self.c))
        self.blas.cblas_sgemm(row_major, plain, plain, n, n, n, one, x, n, y, n, zero, z, n)

    def gflops(self, least):
        return 2e-9 * self.n ** 3 / seconds(self, least)


def bench_cpu(library, a):
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
    peers = [n for n in a.peers or backends if n in backends]
    sgemm = Sgemm(a.threads)
    rate = max(sgemm.gflops(a.seconds) for _ in range(5))
    print(f"{a.threads} threads, OpenBLAS ({sgemm.core}) sgemm 2048^3 {rate:.0f} GFLOP/s; "
          f"PyTorch {torch.__version__}: {torch.get_num_threads()} threads")
    print("GFLOP/s forward | backward; ours in shares of sgemm; peers: ours over theirs; 16 bits: "
          "over our float32")
    ratios, ours = {}, {}
    for dtype in [getattr(torch, n) for n in a.dtypes]:
        for d in [n for n in a.dims if n <= 128]:
            for causal in (False, True):
                for H, N in CPU_ROWS[3:] if a.quick else CPU_ROWS:
                    t, call = make(1, H, N, d, dtype, "cpu", causal, library)
                    flops = 4 * H * N * N * d / (2 if causal else 1)
                    rows = {"ours": (call.fwd, call.bwd)}
                    rows.update({n: torch_calls(t, causal, backends[n]) for n in peers})
                    best = {n: [float("inf")] * 2 for n in rows}
                    for _ in range(a.repeat):
                        for n, calls in rows.items():
                            for k in (0, 1):
                                time.sleep(0.01)  # until the other library's threads stop spinning
                                best[n][k] = min(best[n][k], seconds(calls[k], a.seconds))
                    time.sleep(0.01)
                    rate = max(rate, sgemm.gflops(a.seconds))
                    key, name = (d, causal, H, N), str(dtype)[6:]
                    line = f"{name:8} d{d:<4}{'causal' if causal else 'full':7}H{H} N{N:<6}"
                    for k, factor in ((0, 1.0), (1, 2.5)):
                        speed = {n: flops * factor / best[n][k] * 1e-9 for n in rows}
                        ours[name, key, k] = speed["ours"]
                        line += f" ours {speed['ours']:6.0f} ({speed['ours'] / rate:.2f})"
                        if ("float32", key, k) in ours and dtype != torch.float32:
                            r = speed["ours"] / ours["float32", key, k]
                            ratios.setdefault((name, "our float32", k), []).append(r)
                            line += f" 16/32 {r:.2f}"
                        for n in peers:
                            r = speed["ours"] / speed[n]
                            ratios.setdefault((name, n, k), []).append(r)
                            line += f" {n} {speed[n]:6.0f} ({r:.2f})"
                        line += "  |" if k == 0 else ""
                    print(line, flush=True)
    passes = ("forward", "backward")
    for (dtype, n, k), r in sorted(ratios.items()):
        print(f"{dtype}: geometric mean, ours over {n}, {passes[k]}: {statistics.geometric_mean(r):.3f}  "
              f"worst {min(r):.3f}")
    for (dtype, (d, causal, H, N), k), speed in ours.items():
        if dtype == "float32" and causal and N in CPU_GOALS:
            share, goal = speed / rate, CPU_GOALS[N][k]
            print(f"goal: d{d} causal N{N} {passes[k]}: {share:.2f} of sgemm, wanted {goal:.2f}"
                  f"{'' if share >= goal else '  BELOW'}")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--library", default="build/release/lib/libfattn.so")
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    p.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU")
    p.add_argument("--repeat", type=int, default=3, help="rounds over the backends, on the CPU")
    p.add_argument("--seconds", type=float, default=0.05, help="least time of a run, on the CPU")
    p.add_argument("--arch-cap", type=int, default=0)
    p.add_argument("--dims", type=int, nargs="*", default=[64, 128, 256])
    p.add_argument("--dtypes", nargs="*", help="of the check, and of the CPU's rows")
    p.add_argument("--dtype", default="bfloat16", help="of the timing on CUDA; float32 and float64 beside math")
    p.add_argument("--tf32", action="store_true", help="with --dtype float32: both may round to TF32")
    p.add_argument("--means", type=float, default=0, help="added to four channels of K on CUDA: dQ is corrected")
    p.add_argument("--lengths", type=int, nargs="*", help="N on CUDA, instead of the usual")
    p.add_argument("--quick", action="store_true", help="fewer rows")
    p.add_argument("--check", action="store_true", help="errors only, no timing")
    p.add_argument("--before", metavar="LIBRARY", help="another build of libfattn, timed beside this one on CUDA")
    p.add_argument("--exact", action="store_true", help="time ours with FATTN_EXACT_DELTA, too, on CUDA")
    p.add_argument("--fa3", metavar="LIBRARY", help="FlashAttention-3 (bench/fa3.cu); without it its usual "
                                                    "ratio to cudnn stands in")
    p.add_argument("--peers", nargs="*", help="of fa2, cudnn, efficient, math; of flash, math on the CPU")
    a = p.parse_args()
    torch.manual_seed(0)
    cpu = a.device == "cpu"
    a.dtypes = a.dtypes or (["float32"] if cpu else []) + ["bfloat16", "float16"]
    torch.set_num_threads(a.threads)
    choose_blas()
    library = Library(a.library, CPU if cpu else CUDA, threads=a.threads, arch_cap=a.arch_cap)
    failed = check(library, a.device, [getattr(torch, t) for t in a.dtypes])
    if not cpu and "bfloat16" in a.dtypes:
        check_large(library, "cuda")
    if not a.check:
        bench_cpu(library, a) if cpu else bench(library, "cuda", a)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
