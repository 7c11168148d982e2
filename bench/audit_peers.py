"""The attention libraries that audit.py compares, each behind the same two functions: what it takes, and a call."""
import importlib
import importlib.metadata
import importlib.util
import re
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, bias as attn_bias, sdpa_kernel

import audit_cases as ac
import peers

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


class Refused(Exception):
    """The library says that it does not compute this call."""


def place(x, layout, dtype, device):
    """x with the strides of the case's layout."""
    x = x.to(device, dtype)
    if layout == "bhsd" or x.dim() != 4:
        return x.contiguous()
    if layout == "pitch":
        wide = torch.zeros(*x.shape[:3], x.shape[3] + 1, device=device, dtype=dtype)
        wide[..., 1:] = x
        return wide[..., 1:]
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def place_qkv(tensors, dtype, device):
    """Slices of one [B,S,3,H,D]."""
    B, H, S, D = tensors[0].shape
    whole = torch.empty(B, S, 3, H, D, dtype=dtype, device=device)
    for n, x in enumerate(tensors):
        whole[:, :, n] = x.to(device, dtype).transpose(1, 2)
    return [whole[:, :, n].transpose(1, 2) for n in range(3)]


def inputs(case, dtype, device):
    """q, k, v, d_o; a d_o of one row for all has strides of 0."""
    shape = case.q.shape[:3] + case.v.shape[3:]
    if case.layout == "qkv":
        q, k, v = place_qkv([case.q, case.k, case.v], dtype, device)
    else:
        q, k, v = (place(x, case.layout, dtype, device) for x in (case.q, case.k, case.v))
    d_o = place(case.d_o, "pitch" if case.layout == "pitch" else "bhsd", dtype, device).expand(shape)
    return q, k, v, d_o


def double(outputs):
    return {n: x.detach().double() for n, x in outputs.items() if x is not None}


class Peer:
    """takes: None, or why the interface cannot express the case. run: outputs in F64 on the call's device."""
    strict = False  # also untouched memory and infinities of L are compared

    def takes(self, case, dtype):
        raise NotImplementedError

    def run(self, case, dtype, device):
        raise NotImplementedError


class Fattn(Peer):
    dtypes, strict = (F64, F32, BF16, F16), True

    def __init__(self, name, path, device, threads=0, arch_cap=0, flags=0):
        self.name, self.device, self.flags = name, device, flags
        self.library = peers.Library(path, peers.CUDA if device == "cuda" else peers.CPU, threads=threads,
                                     arch_cap=arch_cap, quiet=True)
        self.version = path + (f", kernels of {arch_cap}" if arch_cap else "")

    def takes(self, case, dtype):
        return None

    def run(self, case, dtype, device, o_dtype=None, backward_flags=0, forward_only=False):
        statistic = F64 if dtype == F64 else F32
        q, k, v, d_o = inputs(case, dtype, device)
        t = dict(q=q, k=k, v=v, d_o=d_o)
        t |= {n: case.t[n].to(device, dtype) for n in ("bias",) if n in case.t}
        t |= {n: case.t[n].to(device, statistic) for n in ("alibi", "sink", "d_lse", "delta") if n in case.t}
        t |= {n: case.t[n].to(device) for n in ac.INTEGERS if n in case.t}
        if "d_lse" in t:
            t["d_lse"] = t["d_lse"].expand(q.shape[:3])
        nan = float("nan")
        merge = case.flags & ac.MERGE

        def out(name, shape, kind):
            add = merge if name in ("o", "lse") else case.flags & ac.ADDS[name]
            x = case.t[name + "_in"] if add else torch.full(shape, nan, dtype=kind, device=device)
            rows = name in ("o", "dq", "dk", "dv")
            t[name] = place(x, case.layout if rows and case.layout != "qkv" else "bhsd", kind, device)
        out("o", q.shape[:3] + v.shape[3:], statistic if merge else o_dtype or dtype)
        out("lse", q.shape[:3], statistic)
        if case.layout == "qkv":
            t["dq"], t["dk"], t["dv"] = place_qkv([torch.full(x.shape, nan) for x in (q, k, v)], dtype, device)
        else:
            for n in "qkv":
                out("d" + n, t[n].shape, dtype)
        if "bias" in t:
            out("d_bias", t["bias"].shape, statistic)
        if "sink" in t:
            out("d_sink", t["sink"].shape, statistic)
        a = case.a
        params = {n: a[n] for n in ("scale", "softcap", "dropout_p", "window_left", "window_right", "max_seqlen_q",
                                    "max_seqlen_k", "q_pos0", "k_pos0", "rng_batch0", "rng_head0", "rng_heads")}
        params["rng"] = peers.Rng(seed=int(a["rng_seed"]), stream=int(a["rng_stream"]))
        try:
            call = self.library.prepare(case.flags | self.flags, params, **t)
            call.fwd()
            if backward_flags:
                call.params.flags |= backward_flags
            if not forward_only:
                call.bwd()
        except RuntimeError as e:
            raise Refused(str(e)) from None
        if device == "cuda":
            torch.cuda.synchronize()
        names = ("o", "lse") if forward_only else ac.OUTPUTS
        return double({n: t[n] for n in names if n in t})

    def repeats(self, case, dtype, device, flags, times):
        """How many of `times` further calls gave other gradients than the first, with workspaces full of NaN."""
        first, different = None, 0
        q, k, v, d_o = inputs(case, dtype, device)
        t = dict(q=q, k=k, v=v, d_o=d_o, lse=torch.empty(q.shape[:3], device=device))
        t |= {n: torch.empty_like(x) for n, x in (("o", q), ("dq", q), ("dk", k), ("dv", v))}
        t |= {n: case.t[n].to(device) for n in ac.INTEGERS if n in case.t}
        params = {n: case.a[n] for n in ("max_seqlen_q", "max_seqlen_k")}
        try:
            call = self.library.prepare(case.flags | self.flags | flags, params, **t)
            call.fwd()
            for _ in range(times + 1):
                call.workspace.fill_(255)
                call.bwd()
                got = [t[n].clone() for n in ("dq", "dk", "dv")]
                first = first or got
                different += not all(torch.equal(x, y) for x, y in zip(got, first))
        except RuntimeError as e:
            raise Refused(str(e)) from None
        return different


def widened(case, multiple):
    """The case with q, k, v of one head_dim, a multiple of that: zeros change nothing, but the default scale."""
    D, Dv = case.q.shape[3], case.v.shape[3]
    wide = -(-max(D, Dv) // multiple) * multiple
    if D == Dv == wide:
        return case
    t = dict(case.t)
    for n in ("q", "k", "v", "d_o"):
        t[n] = F.pad(t[n], (0, wide - t[n].shape[3]))
    return ac.Case(case.name, t, case.a | {"scale": case.scale}, case.want, "bhsd", case.unit)


def narrowed(outputs, case):
    width = {"o": case.v.shape[3], "dv": case.v.shape[3], "dq": case.q.shape[3], "dk": case.q.shape[3]}
    return {n: x[..., :width[n]] if n in width else x for n, x in outputs.items()}


def mask_of(case, dtype, device):
    """What the interface of PyTorch's attention says for this case: ("full" | "causal" | "lower_right", None),
    ("mask", bool or dtype tensor [.,.,Sq,Sk]), or (None, why not)."""
    Sq, Sk = case.q.shape[2], case.k.shape[2]
    B = case.q.shape[0]
    plain = not any(n in case.t for n in ("seqlens_q", "seqlens_k", "bias", "alibi"))
    if plain and not case.flags & ~(ac.CAUSAL | ac.TOP_LEFT) and case.a["q_pos0"] == case.a["k_pos0"]:
        if not case.flags:  # at once: a mask of a long sequence is large
            return "full", None
        if Sq == Sk or case.flags & ac.TOP_LEFT:
            return "causal", None
    seen = case.visible(Sq, Sk)
    if any(n in case.t for n in ("seqlens_q", "seqlens_k")):
        each = []
        for _, _, rows, _, keys in case.sequences():
            part = torch.zeros(Sq, Sk, dtype=torch.bool)
            part[:rows, :keys] = case.visible(rows, keys)
            each.append(part)
        seen = torch.stack(each)[:, None] if each else seen
    if "bias" in case.t or "alibi" in case.t:
        H = case.q.shape[1]
        total = case.bias if "bias" in case.t else torch.zeros(1, 1, 1, 1, dtype=F64)
        if "alibi" in case.t:
            if "seqlens_q" in case.t or "seqlens_k" in case.t:
                return None, "ALiBi with lengths"
            total = total - case.alibi[:, None, None] * case.distance(Sq, Sk).abs()
        if not torch.equal(total.to(dtype).double(), total):
            return None, "the additive mask is not exact in the dtype"
        if not (total.to(dtype).isfinite() | (total == -float("inf"))).all():
            return None, "the additive mask is not finite in the dtype"
        if not seen.all():
            total = total.expand(B, H, Sq, Sk).masked_fill(~seen, -float("inf"))
        return "mask", total.to(device, dtype)
    if seen.all():
        return "full", None
    if seen.dim() == 2 and torch.equal(seen, torch.ones(Sq, Sk).tril().bool()):
        return "causal", None
    if seen.dim() == 2 and torch.equal(seen, torch.ones(Sq, Sk).tril(Sk - Sq).bool()):
        return "lower_right", seen[None, None].to(device)
    return "mask", (seen if seen.dim() == 4 else seen[None, None]).to(device)


class Sdpa(Peer):
    """One backend of torch.nn.functional.scaled_dot_product_attention, which must not fall back to another."""

    def __init__(self, name, backend, dtypes, masks, lower_right, gqa, packed, dbias, lse=None, only_square=False,
                 multiple=0):
        self.name, self.backend, self.dtypes, self.masks, self.lower_right = name, backend, dtypes, masks, lower_right
        self.gqa, self.packed, self.dbias, self.lse, self.only_square = gqa, packed, dbias, lse, only_square
        self.multiple = multiple  # of the head_dims that it takes, one for q, k and v; 0: any
        self.version = f"PyTorch {torch.__version__}"

    def takes(self, case, dtype):
        if dtype not in self.dtypes:
            return "dtype"
        for n in ("sink", "d_lse", "delta"):
            if n in case.t:
                return n
        if case.flags & ac.MERGE or any(case.flags & f for f in ac.ADDS.values()):
            return "adds to results"
        if float(case.a["softcap"]):
            return "softcap"
        if case.threshold:
            return "its dropout mask is its own"
        if case.q.shape[1] != case.k.shape[1] and not self.gqa:
            return "GQA"
        if case.packed:
            if not self.packed or "bias" in case.t or "alibi" in case.t or case.flags & ~ac.CAUSAL:
                return "packed" if not self.packed else "packed with a mask"
            if case.flags and any(rows != keys for _, _, rows, _, keys in case.sequences()):
                return "packed: two alignments of a causal mask"
            return None
        kind, why = mask_of(case, dtype, "cpu")
        if kind is None:
            return why
        if kind == "mask" and not self.masks:
            return "mask"
        if kind == "lower_right" and not (self.masks or self.lower_right):
            return "causal, more keys than rows"
        if kind == "causal" and self.only_square and case.q.shape[2] != case.k.shape[2]:
            return "causal, top-left"
        return None

    def attention(self, leaf, kind, mask, scale, gqa):
        q, k, v = leaf
        if kind == "lower_right" and self.lower_right:
            mask = attn_bias.causal_lower_right(q.shape[2], k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=kind == "causal", scale=scale,
                                              enable_gqa=gqa)

    def run(self, case, dtype, device, forward_only=False):
        wide = widened(case, self.multiple) if self.multiple else case
        return narrowed(self.run_wide(wide, dtype, device, forward_only), case)

    def run_wide(self, case, dtype, device, forward_only):
        q, k, v, d_o = inputs(case, dtype, device)
        with warnings.catch_warnings(record=True) as said, sdpa_kernel(self.backend):
            warnings.simplefilter("always")
            try:
                if case.packed:
                    return self.run_packed(case, q, k, v, d_o)
                kind, mask = mask_of(case, dtype, device)
                gqa = q.shape[1] != k.shape[1]
                leaf = [x.detach().requires_grad_() for x in (q, k, v)]
                bias = mask if kind == "mask" and mask.dtype != torch.bool and "bias" in case.t else None
                if bias is not None and self.dbias and bias.shape == case.bias.shape and not bias.isinf().any():
                    mask = bias = mask.detach().requires_grad_()
                else:
                    bias = None
                with torch.no_grad() if forward_only else torch.enable_grad():
                    o = self.attention(leaf, kind, mask, case.scale, gqa)
                out = {"o": o}
                if not forward_only:
                    want = leaf + ([bias] if bias is not None else [])
                    grads = torch.autograd.grad(o, want, d_o)
                    out |= dict(zip(("dq", "dk", "dv", "d_bias"), grads))
                if self.lse and not gqa and kind in ("full", "causal") and q.numel():
                    with torch.no_grad():
                        L = self.lse(q, k, v, kind == "causal", case.scale)
                    out["lse"] = L.reshape(*L.shape[:2], -1)[:, :, :q.shape[2]]
                out = double(out)
                if device == "cuda":
                    torch.cuda.synchronize()
            except Exception as e:  # of many types, by version
                if "CUDA error" in str(e):
                    raise
                raise Refused(reason(e, said)) from None
        return out

    def run_packed(self, case, q, k, v, d_o):
        """Nested tensors: PyTorch's packed sequences."""
        leaf = [x[0].transpose(0, 1).contiguous().detach().requires_grad_() for x in (q, k, v)]
        lengths = case.sequences()
        offsets = [x.to(q.device, torch.int64) for x in (case.cu_seqlens_q, case.cu_seqlens_k, case.cu_seqlens_k)]
        longest = [max(s[n] for s in lengths) for n in (2, 4, 4)]
        least = [min(s[n] for s in lengths) for n in (2, 4, 4)]
        used = [int(x[-1]) for x in offsets]
        nested = [torch.nested.nested_tensor_from_jagged(x[:n], at, min_seqlen=a, max_seqlen=b).transpose(1, 2)
                  for x, n, at, a, b in zip(leaf, used, offsets, least, longest)]
        o = F.scaled_dot_product_attention(*nested, is_causal=bool(case.flags), scale=case.scale,
                                           enable_gqa=q.shape[1] != k.shape[1])
        o = o.transpose(1, 2).values()
        grads = torch.autograd.grad(o, leaf, d_o[0].transpose(0, 1)[:used[0]].contiguous())
        out = {"o": torch.full(case.q.shape[:3] + case.v.shape[3:], float("nan"), dtype=F64, device=q.device)}
        out["o"][0, :, :used[0]] = o.detach().transpose(0, 1).double()
        return out | double({n: x.transpose(0, 1)[None] for n, x in zip(("dq", "dk", "dv"), grads)})


def reason(error, said):
    """Why a backend refused: PyTorch says so in warnings; else its error's first line."""
    texts = [str(w.message).split(" (Triggered")[0] for w in said]
    texts = [t for t in texts if not re.search("disabled|kernel not used because|prototype", t)]
    texts = [re.sub(r"\.? Got .*", "", t) for t in texts]
    first = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = "; ".join(dict.fromkeys(texts)) or first[0]
    return re.sub(r"\s+", " ", text)


# L is not in the result of scaled_dot_product_attention, but in those of the functions that it calls.

def lse_flash(q, k, v, causal, scale):
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[1]


def lse_flash_cpu(q, k, v, causal, scale):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)[1]


def lse_efficient(q, k, v, causal, scale):
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)[1]


def lse_cudnn(q, k, v, causal, scale):
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)[1]


class FlashPackage(Peer):
    """The packages flash_attn (FlashAttention-2) and flash_attn_interface (FlashAttention-3)."""
    dtypes = (BF16, F16)

    def __init__(self, name, module):
        self.name, self.module = name, importlib.import_module(module)
        package = "flash_attn" if module == "flash_attn" else "flash_attn_3"
        try:
            self.version = f"{module} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            self.version = module
        self.second = module == "flash_attn"

    def takes(self, case, dtype):
        if dtype not in self.dtypes:
            return "dtype"
        for n in ("sink", "d_lse", "delta", "bias", "seqlens_q", "seqlens_k"):
            if n in case.t:
                return n
        if "alibi" in case.t and not self.second:
            return "alibi"
        if case.flags & ac.MERGE or any(case.flags & f for f in ac.ADDS.values()):
            return "adds to results"
        if case.threshold:
            return "its dropout mask is its own"
        if case.flags & ac.TOP_LEFT and case.q.shape[2] != case.k.shape[2]:
            return "causal, top-left"
        if case.a["q_pos0"] != case.a["k_pos0"] and case.flags:
            return "positions"
        return None

    def run(self, case, dtype, device, forward_only=False):
        q, k, v, d_o = (x.transpose(1, 2) for x in inputs(case, dtype, device))
        leaf = [x.detach().requires_grad_() for x in (q, k, v)]
        left, right = -1, -1
        if case.flags & ac.WINDOW:
            left, right = (int(case.a[n]) for n in ("window_left", "window_right"))
        options = dict(softmax_scale=case.scale, causal=bool(case.flags & 3), window_size=(left, right),
                       softcap=float(case.a["softcap"]))
        if "alibi" in case.t:
            options["alibi_slopes"] = case.alibi.to(device, F32)
        try:
            if case.packed:
                rows = [max(s[n] for s in case.sequences()) for n in (2, 4)]
                at = [case.t[n].to(device) for n in ("cu_seqlens_q", "cu_seqlens_k")]
                flat = [x[0] for x in leaf]
                o = self.module.flash_attn_varlen_func(*flat, *at, *rows, **options)
                o = (o[0] if isinstance(o, tuple) else o)[None]
            else:
                o = self.module.flash_attn_func(*leaf, **options)
                o = o[0] if isinstance(o, tuple) else o
            grads = [] if forward_only else torch.autograd.grad(o, leaf, d_o)
            torch.cuda.synchronize()
        except Exception as e:  # of many types, by version
            if "CUDA error" in str(e):
                raise
            raise Refused(reason(e, [])) from None
        return double({n: x.transpose(1, 2) for n, x in zip(("o", "dq", "dk", "dv"), [o, *grads])})


class Fa3Library(Peer):
    """FlashAttention-3's kernels in the library that bench/fa3.cu makes."""
    dtypes = (BF16,)

    def __init__(self, path):
        self.name, self.fa3, self.version = "FA3", peers.Fa3(path), path

    def takes(self, case, dtype):
        if dtype != BF16:
            return "dtype"
        if case.flags & ~(ac.CAUSAL | ac.TOP_LEFT) or case.packed or case.threshold or float(case.a["softcap"]):
            return "features"
        if set(case.t) - {"q", "k", "v", "d_o"}:
            return "features"
        same = case.q.shape == case.k.shape == case.v.shape
        if not same or case.q.shape[3] not in (64, 128, 256) or case.a["q_pos0"] != case.a["k_pos0"]:
            return "shape"
        return None if abs(case.scale * case.q.shape[3] ** 0.5 - 1) < 1e-6 else "scale"

    def run(self, case, dtype, device, forward_only=False):
        t = {n: case.t[n].to(device, dtype).transpose(1, 2).contiguous().transpose(1, 2) for n in ("q", "k", "v")}
        d_o = case.d_o.expand(case.q.shape).to(device, dtype)
        t["d_o"] = d_o.transpose(1, 2).contiguous().transpose(1, 2)
        t |= {n: torch.empty_like(t["q"]) for n in ("o", "dq", "dk", "dv")}
        forward, backward, results = self.fa3.calls(t, bool(case.flags & 3))
        forward()
        if not forward_only:
            backward()
        torch.cuda.synchronize()
        names = ("o", "lse") if forward_only else ("o", "lse", "dq", "dk", "dv")
        return double({n: results[n] for n in names})


def installed(module):
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def names(a):
    """Every peer that this machine can have, in the order of the columns."""
    torch_peers = ["FA2", "cuDNN", "efficient", "math"] if a.device == "cuda" else ["flash", "math"]
    hopper = a.device == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
    out = ["fattn", "exact"] + (["mma16"] if hopper else []) + (["before"] if a.before else []) + torch_peers
    if a.device == "cuda":
        out += ["FA3"] if a.fa3 else []
        out += [n for n, m in (("flash_attn", "flash_attn"), ("fa3_package", "flash_attn_interface")) if installed(m)]
    return [n for n in out if not a.peers or n in a.peers]


def make(name, a):
    every, half = (F64, F32, BF16, F16), (BF16, F16)
    if name == "fattn":
        return Fattn(name, a.library, a.device, a.threads)
    if name == "exact":
        return Fattn(name, a.library, a.device, a.threads, flags=peers.EXACT_DELTA)
    if name == "mma16":  # the kernels of compute capability 8.0, on this device
        return Fattn(name, a.library, a.device, a.threads, arch_cap=80)
    if name == "before":
        return Fattn(name, a.before, a.device, a.threads)
    if name == "math":
        return Sdpa("math", SDPBackend.MATH, every, True, False, True, False, True)
    if name == "flash":
        return Sdpa("flash", SDPBackend.FLASH_ATTENTION, every, True, False, True, False, False, lse_flash_cpu,
                    multiple=1)
    if name == "FA2":
        return Sdpa("FA2", SDPBackend.FLASH_ATTENTION, half, False, True, True, True, False, lse_flash, True,
                    8)
    if name == "efficient":
        return Sdpa("efficient", SDPBackend.EFFICIENT_ATTENTION, (F32, BF16, F16), True, True, False, True, True,
                    lse_efficient, multiple=8)
    if name == "cuDNN":
        return Sdpa("cuDNN", SDPBackend.CUDNN_ATTENTION, half, True, False, True, True, False, lse_cudnn,
                    multiple=8)
    if name == "FA3":
        return Fa3Library(a.fa3)
    return FlashPackage(name, "flash_attn" if name == "flash_attn" else "flash_attn_interface")
