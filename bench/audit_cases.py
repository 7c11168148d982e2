"""Attention cases of audit.py: those of data/*.h5, generated ones, the fp64 reference and the bounds of errors."""
import glob
import os

import numpy as np
import torch

CAUSAL, TOP_LEFT, WINDOW, MERGE = 1, 2, 4, 32
ADDS = {"dq": 1 << 8, "dk": 1 << 9, "dv": 1 << 10, "d_bias": 1 << 11, "d_sink": 1 << 12}
FLOATS = ("q", "k", "v", "d_o", "bias", "alibi", "sink", "d_lse", "delta", "o_in", "lse_in", "dq_in", "dk_in", "dv_in",
          "d_bias_in", "d_sink_in")
ROUNDED = ("q", "k", "v", "d_o", "bias", "dq_in", "dk_in", "dv_in")  # these have the dtype of a call
INTEGERS = ("seqlens_q", "seqlens_k", "cu_seqlens_q", "cu_seqlens_k", "rng_step")
OUTPUTS = ("o", "lse", "dq", "dk", "dv", "d_bias", "d_sink")
ATTRS = ("flags scale softcap dropout_p window_left window_right max_seqlen_q max_seqlen_k q_pos0 k_pos0 rng_seed "
         "rng_stream rng_batch0 rng_head0 rng_heads").split()
U = {torch.float64: 2.0 ** -53, torch.float32: 2.0 ** -24, torch.float16: 2.0 ** -11, torch.bfloat16: 2.0 ** -8}
LETTER = {torch.float64: "d", torch.float32: "s", torch.float16: "h", torch.bfloat16: "b"}


class Case:
    """Inputs `t` (F64 and I32), parameters `a`, results `want` (F64, NaN where nothing is written) or None."""

    def __init__(self, name, t, a=None, want=None, layout="bhsd", unit=None, note=""):
        self.name, self.t, self.want, self.layout, self.unit, self.note = name, t, want, layout, unit, note
        self.a = {n: 0 for n in ATTRS} | (a or {})
        self.flags = int(self.a["flags"])

    def __getattr__(self, n):  # q, k, bias, ...: None when absent
        if n in FLOATS or n in INTEGERS:
            return self.t.get(n)
        raise AttributeError(n)

    @property
    def packed(self):
        return "cu_seqlens_q" in self.t

    @property
    def scale(self):
        return float(self.a["scale"]) or self.q.shape[3] ** -0.5

    @property
    def threshold(self):
        """p takes effect as this number of 32768."""
        return int(np.floor(32768 * float(self.a["dropout_p"]) + 0.5))

    def sequences(self):
        """(row of the batch, first row, rows, first key, keys) of each sequence."""
        if self.packed:
            q, k = self.cu_seqlens_q.tolist(), self.cu_seqlens_k.tolist()
            return [(0, q[n], q[n + 1] - q[n], k[n], k[n + 1] - k[n]) for n in range(len(q) - 1)]
        B, Sq, Sk = self.q.shape[0], self.q.shape[2], self.k.shape[2]
        q = self.seqlens_q.tolist() if "seqlens_q" in self.t else [Sq] * B
        k = self.seqlens_k.tolist() if "seqlens_k" in self.t else [Sk] * B
        return [(b, 0, q[b], 0, k[b]) for b in range(B)]

    def distance(self, Sq, Sk, device="cpu"):
        """i' + off - j'."""
        off = 0 if self.flags & TOP_LEFT else Sk - Sq
        i = torch.arange(Sq, device=device)[:, None] + int(self.a["q_pos0"]) + off
        return i - torch.arange(Sk, device=device) - int(self.a["k_pos0"])

    def visible(self, Sq, Sk, device="cpu"):
        d = self.distance(Sq, Sk, device)
        seen = torch.ones(Sq, Sk, dtype=torch.bool, device=device)
        if self.flags & (CAUSAL | TOP_LEFT):
            seen &= d >= 0
        if self.flags & WINDOW and int(self.a["window_left"]) >= 0:
            seen &= d <= int(self.a["window_left"])
        if self.flags & WINDOW and int(self.a["window_right"]) >= 0:
            seen &= -d <= int(self.a["window_right"])
        return seen

    def rounded(self, dtype):
        """(this case with inputs that the dtype holds, whether they had to be rounded); None where one overflows."""
        t, changed = dict(self.t), False
        for n in ROUNDED:
            if n in t:
                t[n] = t[n].to(dtype).double()
                changed |= not torch.equal(t[n], self.t[n])
                if not torch.equal(t[n].isfinite(), self.t[n].isfinite()):
                    return None
        r = Case(self.name, t, self.a, None if changed else self.want, self.layout, self.unit, self.note)
        return r, changed


    def without(self, name):
        t = {n: x for n, x in self.t.items() if n != name}
        return Case(self.name, t, self.a, None, self.layout, self.unit, self.note)


def load(folder):
    """The attention cases of a folder of .h5 files, or of the .npz files that `export` writes; by file and name."""
    cases = []
    for path in sorted(glob.glob(os.path.join(folder, "*.h5"))):
        try:
            import h5py
        except ImportError:
            raise SystemExit(f"{folder}: reading .h5 files needs h5py; --export on a machine that has it writes .npz")
        with h5py.File(path, "r") as f:
            for name, group in f["cases"].items():
                if "q" in group:
                    data = {n: group[n][()] for n in FLOATS + INTEGERS + OUTPUTS + ("unit",) if n in group}
                    attrs = {n: group.attrs[n] for n in ATTRS}
                    text = [group.attrs[n].decode() for n in ("layout", "note")]
                    cases.append((f"{os.path.basename(path)[:-3]}/{name}", data, attrs, text))
    for path in sorted(glob.glob(os.path.join(folder, "*.npz"))):
        with np.load(path) as f:
            names = sorted({n.split("/")[0] for n in f.files})
            for name in names:
                mine = {n.split("/")[1]: f[n] for n in f.files if n.startswith(name + "/")}
                attrs = {n: mine.pop("attr." + n)[()] for n in ATTRS}
                text = [str(mine.pop("attr." + n)) for n in ("layout", "note")]
                cases.append((f"{os.path.basename(path)[:-4]}/{name}", mine, attrs, text))
    if not cases:
        raise SystemExit(f"{folder}: no .h5 and no .npz files with attention cases")
    return [from_arrays(*c) for c in cases]


def from_arrays(name, data, attrs, text):
    t = {n: torch.from_numpy(np.asarray(data[n], np.float64)) for n in FLOATS if n in data}
    t |= {n: torch.from_numpy(np.asarray(data[n], np.int32)) for n in INTEGERS if n in data}
    want = {n: torch.from_numpy(np.asarray(data[n], np.float64)) for n in OUTPUTS if n in data}
    unit = dict(zip(OUTPUTS, data["unit"].tolist())) if "unit" in data else None
    return Case(name, t, {n: attrs[n].item() for n in ATTRS}, want, text[0], unit, text[1])


def export(folder, out):
    """Writes the cases of a folder of .h5 files as .npz files, which need NumPy alone."""
    files = {}
    for c in load(folder):
        file, name = c.name.split("/")
        arrays = files.setdefault(file, {})
        narrow = {n: c.t[n].numpy().astype(np.float32) for n in FLOATS if n in c.t}  # F32 in the .h5 files, too
        for n, x in narrow.items():
            assert np.array_equal(x.astype(np.float64), c.t[n].numpy()), (c.name, n)
        for n, x in (narrow | {n: c.t[n].numpy() for n in INTEGERS if n in c.t} |
                     {n: x.numpy() for n, x in c.want.items()}).items():
            arrays[f"{name}/{n}"] = x
        if c.unit:
            arrays[f"{name}/unit"] = np.array([c.unit[n] for n in OUTPUTS])
        arrays |= {f"{name}/attr.{n}": np.asarray(c.a[n]) for n in ATTRS}
        arrays |= {f"{name}/attr.layout": np.asarray(c.layout), f"{name}/attr.note": np.asarray(c.note)}
    os.makedirs(out, exist_ok=True)
    for file, arrays in files.items():
        np.savez_compressed(os.path.join(out, file + ".npz"), **arrays)
    print(f"{out}: {sum(len({n.split('/')[0] for n in f}) for f in files.values())} cases")


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain(name, B, H, Hkv, Sq, Sk, D, seed=0, **a):
    t = dict(q=normal(seed, B, H, Sq, D), k=normal(seed + 1, B, Hkv, Sk, D), v=normal(seed + 2, B, Hkv, Sk, D),
             d_o=normal(seed + 3, B, H, Sq, D))
    return Case(name, t, a)


def generated():
    """Shapes that every fused kernel is made for; those of the fixtures are small."""
    cases = []
    for D in (64, 128, 256):
        for flags, mask in ((0, "full"), (CAUSAL, "causal")):
            for N in (128, 333, 512):
                cases.append(plain(f"generated/{mask}_{D}_{N}", 2, 2, 2, N, N, D, flags=flags))
            cases.append(plain(f"generated/{mask}_{D}_gqa", 1, 4, 1, 257, 257, D, flags=flags))
            cases.append(plain(f"generated/{mask}_{D}_more_keys", 1, 2, 2, 130, 333, D, flags=flags))
        cases.append(plain(f"generated/one_row_{D}", 2, 2, 2, 1, 512, D))
    return cases


# ---- the reference ----

def philox(counter, seed):
    """Philox4x32-7 (Salmon et al. 2011); counter: four uint64 arrays below 2**32."""
    low, c, k = np.uint64(0xFFFFFFFF), [np.asarray(w, np.uint64) for w in counter], [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(7):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [b >> np.uint64(32) ^ c[1] ^ np.uint64(k[0]), b & low, a >> np.uint64(32) ^ c[3] ^ np.uint64(k[1]), a & low]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def keep_mask(case, b, h, Sq, Sk):
    """The dropout mask of a head of sequence b: the bits that include/fattn/attention.h describes."""
    a = case.a
    i, j = np.indices((Sq, Sk)).astype(np.int64)
    i, j = i + int(a["q_pos0"]), j + int(a["k_pos0"])
    step = int(case.rng_step) if case.rng_step is not None else 0
    plane = (b + int(a["rng_batch0"])) * (int(a["rng_heads"]) or case.q.shape[1]) + h + int(a["rng_head0"])
    stream = (int(a["rng_stream"]) + 0x9E3779B1 * step) & 0xFFFFFFFF
    words = philox([(j >> 4) * 4 + ((j & 7) >> 1), (i >> 4) * 8 + (i & 7), np.full_like(i, plane),
                    np.full_like(i, stream)], int(a["rng_seed"]))
    lane = ((j >> 3) & 1) * 4 + ((i >> 3) & 1) * 2 + (j & 1)
    word = np.choose(lane >> 1, words).astype(np.int64)
    bits, T = (word >> 16 * (lane & 1)) & 0x7FFF, case.threshold
    return torch.from_numpy(bits >= T if T <= 16384 else bits < 32768 - T)


HUGE = 1024  # beyond this abs L, kernels compute a row's sum again in backward


def reference(case, dtype=None, device=None):
    """Every output. dtype None: in fp64. F32: computed in F32. 16 bits: computed in fp64, with S, P, dP, dS, O and
    the results rounded to the dtype, as an unfused program stores them."""
    device = device or case.q.device
    real = torch.float32 if dtype == torch.float32 else torch.float64
    narrow = dtype in (torch.float16, torch.bfloat16)

    def stored(x):
        return x.to(dtype).to(real) if narrow else x
    x = {n: case.t[n].to(device, real) for n in FLOATS if n in case.t}
    q, k, v = x["q"], x["k"], x["v"]
    B, H, rows = q.shape[:3]
    group, cap, scale, inf = H // max(k.shape[1], 1), float(case.a["softcap"]), case.scale, float("inf")
    factor = 32768 / (32768 - case.threshold)

    def new(shape):
        return torch.full(shape, float("nan"), dtype=torch.float64, device=device)
    out = {"o": new((B, H, rows, v.shape[3])), "lse": new((B, H, rows))}
    out |= {"dq": new(q.shape), "dk": new(k.shape), "dv": new(v.shape)}
    d_o = x["d_o"].expand(out["o"].shape)
    d_bias = torch.zeros_like(x["bias"]) if "bias" in x else None
    d_sink = torch.zeros(H, dtype=real, device=device)
    for b, (row, q0, Sq, k0, Sk) in enumerate(case.sequences()):
        at, keys = slice(q0, q0 + Sq), slice(k0, k0 + Sk)
        seen = case.visible(Sq, Sk, device)
        distance = case.distance(Sq, Sk, device).abs().to(real) if "alibi" in x else None
        for g in range(k.shape[1]):
            K, V = k[row, g, keys], v[row, g, keys]
            dk, dv = torch.zeros_like(K), torch.zeros_like(V)
            for h in range(g * group, (g + 1) * group):
                Q, dO = q[row, h, at], d_o[row, h, at]
                t = scale * (Q @ K.T)
                t = cap * torch.tanh(t / cap) if cap else t
                s = t
                if "alibi" in x:
                    s = s - x["alibi"][h] * distance
                if "bias" in x:
                    where = tuple(n if d > 1 else 0 for n, d in zip((b, h), x["bias"].shape))
                    bias = x["bias"][where]
                    s = s + bias[:Sq if bias.shape[0] > 1 else 1, :Sk if bias.shape[1] > 1 else 1]
                s = stored(s).masked_fill(~seen, -inf)
                sink = x["sink"][h] if "sink" in x else torch.tensor(-inf, dtype=real, device=device)
                keep = 1.0
                if case.threshold:
                    keep = keep_mask(case, b, h, Sq, Sk).to(device, real) * factor
                m = torch.cat([s, sink.expand(Sq, 1)], 1).amax(1, keepdim=True)
                base = torch.where(m.isinf(), torch.zeros_like(m), m)
                e = torch.where(m == inf, torch.zeros_like(s), torch.exp(s - base))
                total = e.sum(1, keepdim=True) + torch.where(sink == m, (m > -inf).to(real), torch.exp(sink - base))
                L = (m + torch.log(torch.where(total > 0, total, torch.ones_like(total))))
                L = torch.where(m == inf, m, L)[:, 0]
                O = (stored(e) * keep) @ V / torch.where(total > 0, total, torch.ones_like(total))
                O = torch.where(m == inf, torch.zeros_like(O), O)
                if case.flags & MERGE:
                    before = x["lse_in"][row, h, at]
                    joint = torch.logaddexp(L, before)
                    zero = torch.where(joint == -inf, torch.zeros_like(joint), joint)
                    share = [torch.where(p == -inf, torch.zeros_like(p), torch.exp(p - zero)) for p in (L, before)]
                    old = torch.where((before == -inf)[:, None], torch.zeros_like(O), x["o_in"][row, h, at])
                    O, L = share[0][:, None] * O + share[1][:, None] * old, joint
                if narrow and not case.flags & MERGE:
                    O = stored(O)
                out["o"][row, h, at] = O.double()
                if narrow:
                    L = L.float().to(real)
                out["lse"][row, h, at] = L.double()
                delta = (dO * O).sum(1)
                if "d_lse" in x:
                    delta = delta - x["d_lse"].expand(B, H, rows)[row, h, at]
                if "delta" in x:
                    delta = x["delta"][row, h, at]
                alive = L > -inf
                # P from L, for huge rows from their own maximum and sum, as bwd/ref/bwd_ref.c has it.
                high, more = L, torch.zeros_like(L)
                own = torch.where(m == inf, m, m + torch.log(torch.where(total > 0, total, torch.ones_like(m))))[:, 0]
                huge = L.isfinite() & (L.abs() > HUGE) & (m[:, 0] > -inf)
                if huge.any():
                    rest = torch.log(total[:, 0])
                    other = L - own
                    count = other.abs() > L.abs() * (2.0 ** -47 if dtype is None else 2.0 ** -18)
                    high = torch.where(huge, m[:, 0], L)
                    more = torch.where(huge, rest + torch.where(count, other, torch.zeros_like(other)), more)
                safe = torch.where(high.isfinite(), high, torch.zeros_like(high))
                none = ~alive | (high == inf)
                P = stored(torch.exp(s - safe[:, None] - more[:, None])).masked_fill(none[:, None], 0)
                held = torch.where(sink == high, torch.exp(-more), torch.exp(sink - safe - more))
                held = torch.where(~alive | ((high == inf) & (sink != high)), torch.zeros_like(held), held)
                delta = torch.where(alive, delta, torch.zeros_like(delta))
                d_sink[h] -= (held * delta).sum()
                dP = stored((dO @ V.T) * keep)
                G = stored(P * (dP - delta[:, None])).masked_fill((s == -inf) | ~alive[:, None], 0)
                if d_bias is not None:
                    part = G
                    part = part if bias.shape[0] > 1 else part.sum(0, keepdim=True)
                    part = part if bias.shape[1] > 1 else part.sum(1, keepdim=True)
                    d_bias[where][:part.shape[0], :part.shape[1]] += part
                dX = scale * G * (1 - (t / cap) ** 2 if cap else 1)
                dX = dX.masked_fill(s == -inf, 0)
                dq = (dX @ K).masked_fill(~alive[:, None], 0)
                old = x["dq_in"][row, h, at] if case.flags & ADDS["dq"] else 0
                out["dq"][row, h, at] = (dq + old).double()
                dk += dX.T @ Q
                dv += (P * keep).T @ dO
            for n, d in (("dk", dk), ("dv", dv)):
                old = x[n + "_in"][row, g, keys] if case.flags & ADDS[n] else 0
                out[n][row, g, keys] = (d + old).double()
    if d_bias is not None:
        out["d_bias"] = (d_bias + (x["d_bias_in"] if case.flags & ADDS["d_bias"] else 0)).double()
    if "sink" in x:
        out["d_sink"] = (d_sink + (x["d_sink_in"] if case.flags & ADDS["d_sink"] else 0)).double()
    if dtype not in (None, torch.float64):
        for n in out:
            wide = n in ("lse", "d_bias", "d_sink") or n == "o" and case.flags & MERGE
            out[n] = out[n].to(torch.float32 if wide else dtype).double()
    return out


# ---- bounds ----

def largest(x):
    x = x[x.isfinite()]
    return max(1.0, x.abs().max().item()) if x.numel() else 1.0


def rounding_floor(dtype, want):
    """2 roundings of want + 0.3 - 0.3: what fattn_compare allows where a result cancels."""
    w = want[want.isfinite()]
    if not w.numel():
        return 0.0
    back = ((w + 0.3).to(dtype).double() - 0.3).to(dtype).double()
    return 2 * torch.maximum((back - w).abs(), U[dtype] * w.abs()).max().item()


def limits(case, dtype, want, low):
    """Output: (absolute, relative) bound of its errors, those of tests/fixture/test_fixture_cases.c and of NUMERICS.md,
    section 5: from the unfused computation in the same dtype, for every library alike."""
    finite = want["lse"][want["lse"].isfinite() & (want["lse"].abs() < 1e6)]
    size = max(1.0, finite.abs().max().item()) if finite.numel() and not case.unit else 1.0
    D, Dv, S = case.q.shape[3], case.v.shape[3], case.q.shape[2] + case.k.shape[2]
    if dtype == torch.float64:
        tolerance = 1e-12 * size
    elif dtype == torch.float32:
        tolerance = 2.0 ** -24 * (8 + (D + Dv) ** 0.5 + S ** 0.5) * size
    else:
        tolerance = U[dtype] * Dv ** 0.5
    bound = {}
    for n in want:
        unit = case.unit[n] if case.unit else 1.0
        if dtype == torch.float64 or n == "lse" and case.unit:
            bound[n] = tolerance * unit, tolerance
            continue
        wide = n in ("lse", "d_bias", "d_sink")
        error = (low[n] - want[n])[want[n].isfinite() & low[n].isfinite()]
        worst = error.abs().max().item() if error.numel() else 0.0
        factor = 2 if n in ("o", "lse") else 3
        floor = rounding_floor(torch.float32 if wide else dtype, want[n])
        bound[n] = factor * worst + max(floor, tolerance * max(unit, largest(want[n]))), 0.0
    return bound


def relative(got, want):
    """Of the Frobenius norms, where the result is finite; None without one."""
    got, want = got[want.isfinite()], want[want.isfinite()]
    norm = want.norm().item() if want.numel() else 0
    return (got - want).norm().item() / norm if norm else None


class Verdict:
    """One output: error over bound, relative Frobenius error, largest error; `text` when it is not a number."""

    def __init__(self, output, ratio, relative, error, text=""):
        self.output, self.ratio, self.relative, self.error, self.text = output, ratio, relative, error, text


def judge(got, want, bound, strict):
    """The worst output. strict: also what must not be written, and infinities of L, are compared."""
    worst = Verdict("", 0.0, 0.0, 0.0)
    for n, g in got.items():
        w = want[n]
        if g.shape != w.shape:
            return Verdict(n, float("inf"), 0, 0, f"shape {tuple(g.shape)}")
        count = w.isfinite() if not strict else torch.ones_like(w, dtype=torch.bool)
        fine = g.isfinite() & w.isfinite()
        same = (g == w) | (g.isnan() & w.isnan())
        bad = count & ~fine & ~same
        if bad.any():
            kind = "nan" if g[bad].isnan().any() else "inf"
            if strict and w[bad].isnan().all():
                kind = "written outside"
            return Verdict(n, float("inf"), float("nan"), float("nan"), f"{kind} in {int(bad.sum())} of {w.numel()}")
        error = (g - w)[fine & count].abs()
        if not error.numel():
            continue
        limit = bound[n][0] + bound[n][1] * w[fine & count].abs()
        ratio = torch.where(error == 0, torch.zeros_like(error), error / limit).max().item()
        norm = w[fine & count].norm().item()
        relative = error.norm().item() / norm if norm else 0.0
        if ratio >= worst.ratio:
            worst = Verdict(n, ratio, relative, error.max().item())
    return worst
