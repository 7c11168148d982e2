"""Every attention library that is installed, held against fp64: fixtures, known failures, keys with means.

    python3 bench/audit.py --library build/release/lib/libfattn.so [--device cpu] [--fa3 libfa3.so] [--quick]

1. The attention cases of data/*.h5 in every dtype: forward, backward, against the recorded results (where a dtype does
   not hold the inputs, against the fp64 reference of the rounded inputs). A result fails beyond the bound of
   NUMERICS.md, section 5, "fixtures": it comes from the unfused computation in the same dtype and is the same for all.
2. Failures that were reported of some library, on what is installed.
3. Tables of generated data (--tables): means of keys, rows far from zero, where else a rounding has a bias.

Needs PyTorch and NumPy; h5py for .h5 files. `--export FOLDER` writes them as .npz, which `--fixtures FOLDER` reads."""
import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch

import audit_cases as ac
import audit_peers as ap

DTYPES = {"d": torch.float64, "s": torch.float32, "h": torch.float16, "b": torch.bfloat16}
TIMEOUT = 300  # seconds for one library's fixtures, in a process of its own
RESTARTS = 12
FIXTURES = """A cell: largest error over its bound (beyond 1: failed, !), the output and the dtype of the worst of all
dtypes (d F64, s F32, h F16, b BF16). -: the interface cannot say it. refused: it says that it does not compute it.
A library that takes no gradient of L gets such a case without it; head_dims that it does not take are padded with
zeros. lost: its process ended before."""


def chosen(a):
    cases = [c for c in ac.load(a.fixtures) + ac.generated() if not a.case or a.case in c.name]
    if not cases:
        raise SystemExit(f"no case's name contains {a.case}")
    return cases[::4] if a.quick and not a.case else cases


# ---- fixtures: a process per library, since a failed kernel may take its process down ----

def worker(a):
    """Prints a line of JSON per case and dtype, before it runs and after."""
    torch.set_num_threads(a.threads if a.device == "cpu" else 1)  # on a GPU all of them run at once
    peer, count = ap.make(a.worker, a), 0

    def say(**what):
        print("RESULT " + json.dumps(what), flush=True)
    say(version=peer.version)
    for case in chosen(a):
        for letter, dtype in DTYPES.items():
            key, count = dict(case=case.name, dtype=letter, count=count + 1), count + 1
            if dtype not in peer.dtypes or count <= a.after:
                continue
            rounded = case.rounded(dtype)
            if rounded and "d_lse" in case.t and peer.takes(rounded[0], dtype) == "d_lse":
                rounded = rounded[0].without("d_lse"), True
            why = "beyond the dtype's range" if rounded is None else peer.takes(rounded[0], dtype)
            if why:
                say(**key, state="-", why=why)
                continue
            say(**key, state="running")
            mine = rounded[0]
            want = mine.want or ac.reference(mine)
            low = ac.reference(mine, dtype) if dtype != torch.float64 else None
            try:
                got = {n: x.cpu() for n, x in peer.run(mine, dtype, a.device).items()}
            except ap.Refused as e:
                say(**key, state="refused", why=str(e)[:200])
                continue
            v = ac.judge(got, want, ac.limits(mine, dtype, want, low), peer.strict)
            say(**key, state="ok" if v.ratio <= 1 else "failed", output=v.output, ratio=v.ratio, relative=v.relative,
                error=v.error, text=v.text, dq=ac.relative(got["dq"], want["dq"]))


def start(name, a, after=0):
    command = [sys.executable, os.path.abspath(__file__), "--worker", name, "--after", str(after), "--library",
               a.library, "--device", a.device, "--fixtures", a.fixtures, "--threads", str(a.threads)]
    for option in ("before", "fa3", "case"):
        if getattr(a, option):
            command += ["--" + option, getattr(a, option)]
    command += ["--quick"] if a.quick else []
    said, errors = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
    return subprocess.Popen(command, stdout=said, stderr=errors, text=True), said, errors


def finish(name, a, started):
    """(results by case and dtype, version, what went wrong with processes). After a case that ended the process another
    one goes on."""
    results, version, wrongs = {}, "?", []
    for _ in range(RESTARTS):
        more, version, wrong = collect(started)
        results.update(more)
        if not wrong:
            break
        wrongs.append(wrong)
        broken = [r for r in more.values() if r["state"] == "running"]
        for r in broken:
            r.update(state="failed", output="", ratio=float("inf"), relative=0, error=0, text="process " + wrong)
        if not broken or "did not end" in wrong:
            break
        started = start(name, a, broken[-1]["count"])
    return results, version, f"{len(wrongs)} times {'; '.join(dict.fromkeys(wrongs))}" if wrongs else ""


def collect(started):
    """(results by case and dtype, version, what went wrong) of one process."""
    process, said, errors = started
    try:
        process.wait(TIMEOUT)
        wrong = f"ended with {process.returncode}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        wrong = f"did not end in {TIMEOUT} s"
    for file in (said, errors):
        file.seek(0)
    if wrong:
        wrong += ": " + ([line for line in errors.read().splitlines() if line] or [""])[-1][:150]
    results, version = {}, "?"
    for line in said:
        if line.startswith("RESULT "):
            r = json.loads(line[7:])
            if "version" in r:
                version = r["version"]
            else:
                results[r["case"], r["dtype"]] = r
    return results, version, wrong


def cell(rows):
    """The worst dtype of a case."""
    if not rows:
        return "lost"
    states = {r["state"] for r in rows}
    failed = [r for r in rows if r["state"] == "failed"]
    fine = [r for r in rows if r["state"] == "ok"]
    if failed or fine:
        r = max(failed or fine, key=lambda r: r["ratio"])
        number = f"{r['ratio']:.2f}" if r["ratio"] < 100 else f"{r['ratio']:.0e}"
        what = r["text"].split(" ")[0][:7] if r["text"] else number
        return f"{what} {r['output'].replace('d_', 'd')} {r['dtype']}{'!' if failed else ''}"
    return "refused" if "refused" in states else "-"


def fixtures(a, processes):
    cases, names = chosen(a), ap.names(a)
    print(f"\n== Fixtures: {len(cases)} cases, forward and backward\n{FIXTURES}")
    done = {n: finish(n, a, processes[n] if processes else start(n, a)) for n in names}
    width = max(len(c.name) for c in cases) + 1
    print("\n" + " " * width + "".join(f"{n:16}" for n in names))
    for c in cases:
        cells = [cell([r for (name, _), r in done[n][0].items() if name == c.name]) for n in names]
        print(f"{c.name:{width}}" + "".join(f"{t:16}" for t in cells).rstrip())
    print("\nCases times dtypes")
    for n in names:
        results, version, wrong = done[n]
        count = {s: sum(r["state"] == s for r in results.values()) for s in ("-", "refused", "ok", "failed")}
        print(f"{n:10} taken {count['ok'] + count['failed']:4}, passed {count['ok']:4}, failed {count['failed']:3}, "
              f"refused {count['refused']:3}, not expressible {count['-']:4}   {version}")
        if wrong:
            print(f"{'':10} its process {wrong}")
    print("\nRelative error of dQ where keys have means, BF16, %")
    for c in cases:
        mine = {n: done[n][0].get((c.name, "b"), {}).get("dq") for n in names}
        if c.name.startswith("means/") and any(x is not None for x in mine.values()):
            print(f"{c.name:{width}}" + "".join("-               " if x is None else f"{100 * x:<16.3f}"
                                                for x in mine.values()).rstrip())
    print("\nFailures")
    for n in names:
        for (case, dtype), r in sorted(done[n][0].items()):
            if r["state"] == "failed":
                size = f"{r['ratio']:.3g} x its bound, relative error {r['relative']:.2e}, largest {r['error']:.2e}"
                print(f"{n:10} {case:32} {dtype} {r['output']:6} {r['text'] or size}")
    print("\nRefused, each reason once")
    for n in names:
        reasons = {}
        for (case, dtype), r in sorted(done[n][0].items()):
            if r["state"] == "refused":
                reasons.setdefault(r["why"], []).append(f"{case} {dtype}")
        for why, where in reasons.items():
            print(f"{n:10} {len(where):3} x {why}  ({where[0]})")
    return {n: (done[n][0], done[n][2]) for n in names}


# ---- known failures ----

def negative_scores():
    """cudnn-frontend #1072: one row, 128 keys, all scores far below zero."""
    c = ac.plain("Sq 1, scores near -500", 1, 2, 2, 1, 128, 64)
    c.t["q"] = torch.full_like(c.t["q"], 8.0)
    c.t["k"] = c.t["k"] / 4 - 8.0
    return c


def packed_case(H, Hkv, D, lengths, name):
    total = sum(lengths)
    c = ac.plain(name, 1, H, Hkv, total, total, D, flags=ac.CAUSAL, max_seqlen_q=max(lengths),
                 max_seqlen_k=max(lengths))
    at = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    c.t["cu_seqlens_q"] = c.t["cu_seqlens_k"] = at
    return c


def padded_keys():
    """pytorch #191937: one key more than a block of 32, a mask."""
    c = ac.plain("65 keys, a mask", 1, 4, 4, 65, 65, 64)
    c.t["bias"] = torch.zeros(1, 1, 65, 65, dtype=torch.float64)
    c.t["bias"][..., :9] = -2.0 ** 30
    return c


def version_of(package):
    try:
        return ap.importlib.metadata.version(package)
    except ap.importlib.metadata.PackageNotFoundError:
        return None


def known_rows(a, name, peer, case, dtype=torch.bfloat16):
    """What this library does with the case."""
    mine, _ = case.rounded(dtype)
    why = peer.takes(mine, dtype) if dtype in peer.dtypes else "dtype"
    if why:
        return f"- ({why})"
    want, low = ac.reference(mine), ac.reference(mine, dtype)
    try:
        got = {n: x.cpu() for n, x in peer.run(mine, dtype, a.device).items()}
    except ap.Refused as e:
        return f"refused: {str(e)[:90]}"
    v = ac.judge(got, want, ac.limits(mine, dtype, want, low), peer.strict)
    zero = [n for n in ("dq", "dk", "dv") if n in got and not got[n].any() and want[n].any()]
    text = f"{'all zero: ' + ' '.join(zero) + ', ' if zero else ''}{v.output} "
    return text + (v.text or f"{v.relative:.2e}, {v.ratio:.2f} of its bound") + ("  FAILED" if v.ratio > 1 else "")


def transformer_engine():
    """TransformerEngine #2448: packed, GQA, head_dim 256: dk and dv of a second backward, with the allocator's blocks
    written to in between."""
    import transformer_engine.pytorch as te
    at = torch.tensor([0, 64, 128], device="cuda", dtype=torch.int32)
    attention = te.DotProductAttention(num_attention_heads=4, kv_channels=256, num_gqa_groups=1, qkv_format="thd",
                                       attn_mask_type="padding_causal")
    x = [torch.randn(128, h, 256, device="cuda", dtype=torch.bfloat16).requires_grad_() for h in (4, 1, 1)]
    first, different = None, 0
    for _ in range(20):
        o = attention(*x, cu_seqlens_q=at, cu_seqlens_kv=at, max_seqlen_q=64, max_seqlen_kv=64)
        got = torch.autograd.grad(o.float().sum(), x)
        first = first or got
        different += not all(torch.allclose(g.float(), f.float(), rtol=0.05, atol=0.05) for g, f in zip(got, first))
        dirt = [torch.full((n,), float("nan"), device="cuda") for n in (1 << 10, 1 << 16, 1 << 20)]
        del dirt
    return f"{different} of 20 backward passes differ" + ("  FAILED" if different else "")


def fa3_deterministic():
    """flash-attention #2244, its script: 30 backward passes with deterministic=True."""
    from flash_attn_interface import flash_attn_func
    x = [torch.randn(2, 1024, 12, 64, device="cuda", dtype=torch.float16).requires_grad_() for _ in range(3)]
    d_o = torch.randn_like(x[0])
    first, different = None, 0
    for _ in range(30):
        o = flash_attn_func(*x, causal=True, deterministic=True)
        got = torch.autograd.grad(o[0] if isinstance(o, tuple) else o, x, d_o)
        first = first or got
        different += not all(torch.equal(g, f) for g, f in zip(got, first))
    return f"{different} of 30 backward passes differ" + ("  FAILED" if different else "")


def guarded(call):
    try:
        return call()
    except Exception as e:  # a package of any version: its error is the result
        return f"failed: {type(e).__name__}: {(str(e).splitlines() or [''])[0][:90]}"


def known(a):
    print("\n== Failures that were reported of some library, here (BF16; worst output, relative error)")
    cuda = a.device == "cuda"
    made = {n: ap.make(n, a) for n in ap.names(a)}
    cudnn = torch.backends.cudnn.version() if cuda else 0
    text = f"version {cudnn // 10000}.{cudnn // 100 % 100}: " if cudnn else "not on this device"
    if cudnn:
        text += "affected" if 92200 <= cudnn < 92700 else "not affected"
    lengths = (200, 1, 129, 64)
    for title, case in (
            (f"cudnn-frontend #462: ragged backward all zero, cuDNN 9.22 to 9.26, head-major statistics and a total "
             f"length\n   (here: {text}; its Python package: "
             f"{version_of('nvidia-cudnn-frontend') or 'not installed'}; PyTorch calls it by nested tensors). "
             f"Packed, causal:",
             packed_case(4, 4, 64, lengths, "packed")),
            ("The same with grouped heads and head_dim 128:", packed_case(4, 1, 128, lengths, "packed, grouped")),
            ("cudnn-frontend #943: an empty sequence, NaN in cuDNN below 9.25:",
             packed_case(2, 2, 64, (70, 0, 33), "packed, an empty sequence")),
            ("cudnn-frontend #1072: one row, scores far below zero, NaN in dK and dV of cuDNN 9.25 and 9.26:",
             negative_scores()),
            ("pytorch #191937: 65 keys and a mask, mem-efficient:", padded_keys())):
        print(title)
        for n, peer in made.items():
            print(f"   {n:10} {guarded(lambda: known_rows(a, n, peer, case))}")
    print("TransformerEngine #2448: packed, grouped heads: dK and dV depend on what the workspace held before")
    version = version_of("transformer-engine")
    print(f"   TransformerEngine {version}: {guarded(transformer_engine)}" if version and cuda else
          "   TransformerEngine: not installed")
    grouped = packed_case(4, 1, 256, (64, 64), "packed, grouped, head_dim 256")
    for n in made:
        if isinstance(made[n], ap.Fattn):
            flags = 8  # FATTN_DETERMINISTIC: all three can be compared bit by bit
            different = guarded(lambda: made[n].repeats(grouped, torch.bfloat16, a.device, flags, 20))
            print(f"   {n:10} gradients differ in {different} of 20 calls with NaN in the workspace")
    print("flash-attention #2244: FlashAttention-3 with deterministic=True does not repeat")
    package = cuda and ap.installed("flash_attn_interface")
    print("   flash_attn_interface: " + (guarded(fa3_deterministic) if package else
                                         "not installed (bench/fa3.cu has the kernels that are not deterministic)"))
    square = ac.plain("", 2, 12, 12, 1024, 1024, 64, flags=ac.CAUSAL)
    for n in made:
        if isinstance(made[n], ap.Fattn):
            different = guarded(lambda: made[n].repeats(square, torch.float16, a.device, 8, 30))
            print(f"   {n:10} FATTN_DETERMINISTIC: gradients differ in {different} of 30 calls")


def heading(a):
    print(f"bench/audit.py, {time.strftime('%Y-%m-%d')}: Python {platform.python_version()}, "
          f"PyTorch {torch.__version__}")
    if a.device == "cuda":
        v = torch.backends.cudnn.version()
        print(f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, "
              f"cuDNN {v // 10000}.{v // 100 % 100}.{v % 100}, libraries: {', '.join(ap.names(a))}")
    else:
        print(f"CPU, {a.threads} threads, libraries: {', '.join(ap.names(a))}")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--library", default="build/release/lib/libfattn.so")
    p.add_argument("--before", metavar="LIBRARY", help="another build of libfattn")
    p.add_argument("--fa3", metavar="LIBRARY", help="FlashAttention-3 (bench/fa3.cu)")
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    p.add_argument("--threads", type=int, default=min(8, torch.get_num_threads()), help="of the CPU")
    p.add_argument("--peers", nargs="*", help="these alone: fattn exact mma16 before FA2 FA3 cuDNN math flash ...")
    p.add_argument("--fixtures", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data"))
    p.add_argument("--case", help="fixtures whose file/name contains this; nothing else is run")
    p.add_argument("--tables", nargs="*", choices=["means", "dk", "bias"],
                   help="without a name: none; left out: all, unless --case")
    p.add_argument("--no-fixtures", action="store_true", help="tables only")
    p.add_argument("--quick", action="store_true", help="every fourth fixture, small tables")
    p.add_argument("--export", metavar="FOLDER", help="write the fixtures as .npz files there, and end")
    p.add_argument("--worker", help=argparse.SUPPRESS)
    p.add_argument("--after", type=int, default=0, help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.export:
        return ac.export(a.fixtures, a.export)
    ap.peers.choose_blas()
    if a.worker:
        return worker(a)
    if a.device == "cpu":
        torch.set_num_threads(a.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    sys.stdout.reconfigure(line_buffering=True)
    begin = time.monotonic()
    heading(a)
    failed, processes = 0, {}
    if not a.no_fixtures and a.device == "cuda":  # beside the tables: nothing is timed
        processes = {n: start(n, a) for n in ap.names(a)}
    tables = a.tables if a.tables is not None else ([] if a.case else ["means", "dk", "bias"])
    if tables:
        import audit_tables
        failed += audit_tables.run(a, tables)
    if not a.no_fixtures:
        done = fixtures(a, processes)
        for results, wrong in (done.get(n, ({}, "")) for n in ("fattn", "exact", "mma16")):
            failed += sum(r["state"] == "failed" for r in results.values()) + bool(wrong)
        if not a.case:
            known(a)
    print(f"\n{time.monotonic() - begin:.0f} s; fattn: {failed or 'nothing'} beyond its bounds and goals")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
