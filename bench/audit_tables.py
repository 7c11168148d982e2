"""The tables of audit.py: relative errors against fp64, in percent of the Frobenius norm, on generated data."""
import torch

import audit_cases as ac
import audit_peers as ap

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NAMES = {BF16: "bf16", F16: "f16"}
PART = 32    # FATTN_MERGE in backward: o and lse are of more keys than this call's, so nothing is subtracted
GOAL = 1.5   # times the error of dQ without means
SAMPLE = 64  # rows of long sequences
MEANS = """Means of keys: relative error in %, 1 batch, 4 heads; four channels of K at c standard deviations (signs
alternate), four of V at 0.5. !: dQ's error above 1.5 times that of c = 0. exact: fattn with FATTN_EXACT_DELTA; as
part: fattn's backward told that o is of more keys, so that nothing is subtracted; mma16: fattn's kernels of compute
capability 8.0; unfused: S, P, dP, dS and O rounded to the dtype, the rest fp64"""


class Data:
    """Normal q, k, v, dO on the device, F64."""

    def __init__(self, device, N, D, H=4, Hkv=None, seed=1):
        self.device, self.N, self.D, self.H = device, N, D, H
        self.g = torch.Generator(device).manual_seed(seed)
        q, kv = (1, H, N, D), (1, Hkv or H, N, D)
        self.t = {"q": self.normal(*q), "k": self.normal(*kv), "v": self.normal(*kv), "d_o": self.normal(*q)}

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.g, device=self.device, dtype=torch.float64)

    def case(self, dtype, flags=0, extra=None, params=None, **means):
        """k=(mean, channels): that many channels at a mean of alternating sign. Values are rounded to the dtype."""
        t = dict(self.t)
        for n, (mean, channels) in means.items():
            t[n] = t[n] + channel_means(self.D, mean, channels, self.device)
        t = {n: x.to(dtype).double() for n, x in t.items()} | (extra or {})
        return ac.Case("", t, {"flags": flags} | (params or {}))


def channel_means(D, mean, channels, device):
    m = torch.zeros(D, dtype=torch.float64, device=device)
    at = torch.arange(0, D, D // channels, device=device)
    m[at] = mean * (1 - 2 * (torch.arange(len(at), device=device) % 2)).double()
    return m


class Runner:
    """The libraries, and fattn in ways that show where an error comes from."""

    def __init__(self, a):
        self.device = a.device
        self.peers = {n: ap.make(n, a) for n in ap.names(a)}
        self.refused = {}

    def run(self, name, case, dtype, forward_only=False):
        """Outputs, or None."""
        options, peer = {}, name
        if name == "F32 O":
            options, peer = {"o_dtype": F32}, "fattn"
        if name == "as part":
            options, peer = {"backward_flags": PART}, "fattn"
        if forward_only:
            options["forward_only"] = True
        peer = self.peers.get(peer)
        if peer is None or dtype not in peer.dtypes or peer.takes(case, dtype):
            return None
        try:
            return peer.run(case, dtype, self.device, **options)
        except ap.Refused as e:
            key = name, str(e)[:150]
            self.refused[key] = self.refused.get(key, 0) + 1
            return None

    def report(self):
        for (name, why), count in self.refused.items():
            print(f"refused: {name} {count} x {why}")
        self.refused = {}


def relative(got, want):
    return 100 * (ac.relative(got, want) or 0)


def number(x):
    if x is None:
        return "     -"
    return f"{x:6.0e}" if x < 0.001 and x else f"{x:6.3f}" if x < 10 else f"{x:6.2f}" if x < 100 else f"{x:6.0f}"


class Goals:
    """What a library's error of dQ grows by; fattn's may by GOAL."""

    def __init__(self):
        self.most, self.beyond, self.rows, self.missed = {}, {}, {}, []

    def add(self, name, label, dq):
        known = [x for x in dq if x is not None]
        if len(known) < 2 or dq[0] is None:
            return ""
        grown = max(known[1:]) / dq[0]
        self.most[name] = max(self.most.get(name, 0), grown)
        wrong = not grown <= GOAL
        self.rows[name] = self.rows.get(name, 0) + 1
        self.beyond[name] = self.beyond.get(name, 0) + wrong
        if wrong and name in ("fattn", "exact", "mma16"):
            self.missed.append(f"{name}, {label}: {grown:.2f}")
        return "!" if wrong else " "

    def report(self):
        print(f"\ndQ's error with means over that without: the largest, and rows beyond {GOAL}")
        for n, x in self.most.items():
            print(f"  {n:10} {x:8.2f}   {self.beyond[n]} of {self.rows[n]}")
        for text in self.missed:
            print(f"  beyond: {text}")
        return len(self.missed)


def sweep(r, names, label, cases, dtype, goals, only=None):
    """A line per library: dQ's error in every case, the other outputs' in the first and last."""
    errors = {n: [] for n in names}
    for case in cases:
        want = ac.reference(case)
        for n in names:
            got = ac.reference(case, dtype) if n == "unfused" else r.run(n, case, dtype)
            errors[n].append({x: relative(got[x], want[x]) for x in ("o", "dq", "dk", "dv")} if got else None)
        del want
    for n in names:
        if all(e is None for e in errors[n]):
            continue
        dq = [e and e["dq"] for e in errors[n]]
        mark = goals.add(n, label, dq)
        ends = [errors[n][0], errors[n][-1]]
        rest = "  ".join(" ".join(number(e and e[x]) for e in ends) for x in ("o", "dk", "dv"))
        print(f"{label:36} {n:9} {' '.join(number(x) for x in dq)}{mark}   {rest}", flush=True)


def sampled(case, rows):
    """fp64 o, lse and dq of these rows of the one head."""
    q, k, v, d_o = (case.t[n][0, 0] for n in ("q", "k", "v", "d_o"))
    s = case.scale * (q[rows] @ k.T)
    if case.flags & ac.CAUSAL:
        s = s.masked_fill(torch.arange(k.shape[0], device=k.device) > rows[:, None], -float("inf"))
    L = s.logsumexp(1)
    P = torch.exp(s - L[:, None])
    o = P @ v
    G = P * (d_o[rows] @ v.T - (d_o[rows] * o).sum(1, keepdim=True))
    return {"o": o, "lse": L, "dq": case.scale * (G @ k)}


def pick(device, N):
    g = torch.Generator().manual_seed(3)
    return torch.randint(N // 8, N, (SAMPLE,), generator=g).to(device)


def means(r, a, small):
    every = ["fattn", "exact", "as part", "mma16", "before", "FA2", "FA3", "cuDNN", "efficient", "flash", "math",
             "unfused"]
    cs = (0, 10, 100) if small else (0, 1, 3, 10, 30, 100)
    dims, lengths = ((64,), (128, 512)) if small else ((64, 128, 256), (128, 512, 2048, 8192))
    goals = Goals()
    print("\n== " + MEANS)
    for dtype in (BF16, F16):
        print(f"\n{NAMES[dtype]:46} dQ at c = {' '.join(f'{c:>6}' for c in cs):{7 * len(cs)}}"
              f"   O, dK, dV at c = {cs[0]}, {cs[-1]}")
        for D in dims:
            for N in lengths:
                names = every if dtype == BF16 or N == 2048 or small else every[:5]
                for flags in (0, ac.CAUSAL):
                    data = Data(a.device, N, D)
                    cases = (data.case(dtype, flags, k=(c, 4), v=(0.5, 4)) for c in cs)
                    sweep(r, names, f"{NAMES[dtype]} d{D} N {N} {'causal' if flags else 'full'}", cases, dtype, goals)
    features(r, a, every, 256 if small else 2048, goals)
    long_rows(r, a, [n for n in every if n not in ("efficient", "math", "unfused")],
              (2048,) if small else (32768, 131072), dims, goals)
    r.report()
    return goals.report()


def features(r, a, names, N, goals):
    cs = (0, 10, 100)
    print(f"\nWith other features, N {N}, bf16: dQ at c = {' '.join(f'{c:>6}' for c in cs)}; O, dK, dV at c = 0, 100")
    W = {"window_left": N // 8 - 1, "window_right": 0}
    lengths = [N // 3, 1, N // 2 - 7, 0]
    lengths.append(N - sum(lengths))
    at = torch.cumsum(torch.tensor([0, *lengths]), 0).to(torch.int32)
    packed = ({"cu_seqlens_q": at, "cu_seqlens_k": at}, {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)})
    sink = {"sink": torch.tensor([0.5, 4.0, -1.0, 30.0], dtype=torch.float64, device=a.device)}
    for D in (64, 128):
        data, grouped = Data(a.device, N, D), Data(a.device, N, D, Hkv=1)
        d_lse = {"d_lse": data.normal(1, 4, N)}
        for label, source, flags, extra, params in (
                ("packed, causal", data, ac.CAUSAL, *packed), ("packed, full", data, 0, *packed),
                ("4 heads on 1, causal", grouped, ac.CAUSAL, {}, {}), ("4 heads on 1, full", grouped, 0, {}, {}),
                ("window, causal", data, ac.CAUSAL | ac.WINDOW, {}, W), ("sink", data, 0, sink, {}),
                ("d_lse", data, 0, d_lse, {}), ("softcap 30, causal", data, ac.CAUSAL, {}, {"softcap": 30.0})):
            cases = (source.case(BF16, flags, extra, params, k=(c, 4), v=(0.5, 4)) for c in cs)
            sweep(r, names, f"bf16 d{D} {label}", cases, BF16, goals)
        for flags in (0, ac.CAUSAL):
            cases = (data.case(BF16, flags, k=(c, D), v=(0.5, 4)) for c in (0, 1))
            sweep(r, names, f"bf16 d{D} all channels, c = 0, 1 {'causal' if flags else 'full'}", cases, BF16, goals)


def long_rows(r, a, names, lengths, dims, goals):
    cs = (0, 10, 100)
    print(f"\nLong rows, 1 head, {SAMPLE} rows in fp64, bf16: dQ at c = {' '.join(f'{c:>6}' for c in cs)}; "
          "O at c = 0, 100")
    for D in dims:
        for N in lengths:
            rows = pick(a.device, N)
            for flags in (0, ac.CAUSAL):
                data = Data(a.device, N, D, H=1)
                label = f"bf16 d{D} N {N} {'causal' if flags else 'full'}"
                errors = {n: [] for n in names}
                for c in cs:
                    case = data.case(BF16, flags, k=(c, 4), v=(0.5, 4))
                    want = sampled(case, rows)
                    for n in names:
                        got = r.run(n, case, BF16)
                        found = got and {x: relative(got[x][0, 0, rows], want[x]) for x in ("o", "dq")}
                        errors[n].append(found)
                for n in names:
                    if any(errors[n]):
                        dq = [e and e["dq"] for e in errors[n]]
                        ends = " ".join(number(e and e["o"]) for e in (errors[n][0], errors[n][-1]))
                        mark = goals.add(n, label, dq)
                        print(f"{label:36} {n:9} {' '.join(number(x) for x in dq)}{mark}   {ends}", flush=True)


def dk(r, a, small):
    """The data of cudnn-frontend #744."""
    N, D = (512 if small else 2048), 64
    names = ["fattn", "exact", "F32 O", "as part", "mma16", "before", "FA2", "FA3", "cuDNN", "efficient", "flash",
             "math", "unfused"]
    print(f"\n== Rows far from zero (cudnn-frontend #744): every fourth q less m u, every k plus 2 u, u of 1 and -1;\n"
          f"N {N}, d {D}. Relative error in %. \"F32 O\": fattn with o stored in F32, which makes delta exact")
    print(f"\n{'':40}      o     dq     dk     dv   dq of the far rows, of the others")
    for dtype, m in ((BF16, 21), (F16, 100)):
        for flags in (0, ac.CAUSAL):
            data = Data(a.device, N, D)
            u = (data.normal(D) > 0).double() * 2 - 1
            data.t["q"][:, :, ::4] -= m * u
            data.t["k"] += 2 * u
            case = data.case(dtype, flags)
            want, far = ac.reference(case), torch.arange(N, device=a.device) % 4 == 0
            for n in names:
                got = ac.reference(case, dtype) if n == "unfused" else r.run(n, case, dtype)
                if got:
                    parts = [relative(got["dq"][:, :, f], want["dq"][:, :, f]) for f in (far, ~far)]
                    print(f"{NAMES[dtype]} m {m} {'causal' if flags else 'full':7}      {n:18} " +
                          " ".join(number(relative(got[x], want[x])) for x in ("o", "dq", "dk", "dv")) +
                          "   " + " ".join(number(x) for x in parts), flush=True)
    r.report()
    return 0


def bias(r, a, small):
    """Relative errors, and the part of them that lies along the true value."""
    N = 512 if small else 2048
    names = ["fattn", "exact", "mma16", "before", "FA2", "FA3", "cuDNN", "efficient", "flash", "math", "unfused"]
    outputs = ("o", "lse", "dq", "dk", "dv")
    print(f"\n== Where a rounding is not random: relative error in %, and <error, true>/<true, true> in units of 1e-6; "
          f"N {N}, 4 heads, bf16")
    print(f"\n{'':38}" + "".join(f"{x:>9}{'':8}" for x in outputs))

    def line(label, n, got, want):
        text = ""
        for x in outputs:
            if x in got and x in want:
                g, w = got[x][want[x].isfinite()], want[x][want[x].isfinite()]
                text += f" {number(relative(g, w)):>8} {1e6 * (((g - w) * w).sum() / (w * w).sum()).item():+7.0f}"
            else:
                text += f" {'-':>8} {'':7}"
        print(f"{label:28} {n:9}{text}", flush=True)
    for D in (64, 128):
        data = Data(a.device, N, D)
        for label, flags, changed in (
                ("normal", 0, {}), ("normal, causal", ac.CAUSAL, {}), ("V at 10", 0, {"v": (10, 4)}),
                ("V at 100", 0, {"v": (100, 4)}), ("Q at 10", 0, {"q": (10, 4)}), ("Q at 100", 0, {"q": (100, 4)}),
                ("dO at 10", 0, {"d_o": (10, 4)}), ("dO at 100", 0, {"d_o": (100, 4)}), ("q times 8", 0, {})):
            case = data.case(BF16, flags, **changed)
            if label == "q times 8":
                case.t["q"] = case.t["q"] * 8
            want = ac.reference(case)
            for n in names:
                got = ac.reference(case, BF16) if n == "unfused" else r.run(n, case, BF16)
                if got:
                    line(f"d{D} {label}", n, got, want)
    N = 4096 if small else 65536
    print(f"\nLong sums, forward alone, N {N}, 1 head, {SAMPLE} rows in fp64; \"V at 1\": all channels, of one sign")
    rows = pick(a.device, N)
    for D in (64, 128):
        for label in ("normal", "V at 1"):
            data = Data(a.device, N, D, H=1)
            data.t["v"] += label == "V at 1"
            case = data.case(BF16)
            want = {n: x for n, x in sampled(case, rows).items() if n != "dq"}
            for n in names[:-2]:
                got = r.run(n, case, BF16, forward_only=True)
                if got:
                    line(f"d{D} {label}", n, {x: got[x][0, 0, rows] for x in got if x in want}, want)
    r.report()
    return 0


def run(a, tables):
    r = Runner(a)
    small = a.quick or a.device == "cpu"
    return sum({"means": means, "dk": dk, "bias": bias}[t](r, a, small) for t in tables)
