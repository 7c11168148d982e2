"""Checks that files, tests, constants and tile sizes named in NUMERICS.md exist in the sources."""
import os
import pathlib
import re

ROOT = pathlib.Path(os.environ["FATTN_SOURCE"])
TEXT = (ROOT / "NUMERICS.md").read_text()
QUOTED = re.findall(r"`([^`\n]+)`", TEXT)
wrong = []


def check(right, what):
    if not right:
        wrong.append(what)


# Files, by path or by name.
for name in QUOTED + re.findall(r"\]\(([^)]+)\)", TEXT):
    name = name.split(" ")[0]
    if re.fullmatch(r"[\w./*-]+\.(c|h|md|py|inc|cu|cuh|def|h5)", name):
        found = [name] if "/" in name else ["**/" + name]
        check(any("build" not in path.parts for pattern in found for path in ROOT.glob(pattern)), f"there is no {name}")

# Tests: `suite: name`, `suite: *`, and a name after others.
tests = {}
for path in [p for folder in ("unit", "attention", "grad", "cuda", "fixture", "cli", "slow")
             for p in (ROOT / "tests" / folder).glob("*.c")]:
    for suite, name in re.findall(r"^Test\((\w+), (\w+)", path.read_text(), re.M):
        tests.setdefault(suite, set()).add(name)
suite, named = None, 0
for quoted in QUOTED:
    match = re.fullmatch(r"(\w+\*?): ([\w*]+)", quoted)
    if match:
        suite = match[1].rstrip("*")
        check(any(s.startswith(suite) for s in tests) if match[1] != suite else suite in tests,
              f"there is no suite {match[1]}")
        check(match[2] == "*" or match[2] in tests.get(suite, ()), f"there is no test {quoted}")
        named += 1
    elif re.fullmatch(r"[a-z]\w*_\w*_\w+", quoted):
        source = any(quoted in path.read_text() for folder in ("core", "fwd", "bwd", "tests/support", "include/fattn")
                     for path in (ROOT / folder).rglob("*.*") if path.suffix in (".c", ".h", ".cuh", ".inc"))
        check(source or any(quoted in names for names in tests.values()), f"nothing is called {quoted}")
check(named > 20, f"only {named} tests are named")

# Constants, as the sources have them.
for file, line, said in (
        ("core/attention/huge.h", "#define FATTNI_HUGE_L 1024.0f", "abs L > 1024"),
        ("core/attention/huge.h", f"#define FATTNI_HUGE_ROUNDING_F32 {2.0**-18}f", "2^-18"),
        ("core/attention/huge.h", f"#define FATTNI_HUGE_ROUNDING_F64 {2.0**-47}", "2^-47"),
        ("core/device/score_terms_mma.cuh", f"#define FATTNI_FAR_SCORE {2**22}.0f", "beyond 2^22"),
        ("fwd/cuda/sm90/fwd_sm90.cuh", "#define DOMINANT (F8 ? 0.25f : 0.5f)",
         "half of the sum so far (FATTN_FP8: a quarter)"),
        ("core/cuda/kernel.h", "enum { FATTNI_SHORT_ROWS = 1024 };", "Sq <= 1024"),
        ("core/attention/problem.h", "k < 15 && p->Sk >> (12 + k) > 1", "floor(log2 Sk) - 12, at most 15"),
        ("core/attention/problem.c", "MAX_POSITION", "0 to 2^29")):
    check(line in (ROOT / file).read_text(), f"{file} has no longer: {line}")
    check(said in TEXT, f"the text has no longer: {said}")

# Tiles of the 16-bit kernels.
column_of = {64: 0, 80: 1, 96: 1, 128: 2, 192: 3, 256: 4}
for family, title, ways in (("sm90", "Hopper", ("forward", "backward")), ("mma16", "mma16", ("forward", "backward")),
                            ("mma16_lean", "mma16_lean", ("forward", "backward")),
                            ("mma16_pairs", "mma16_pairs", ("forward",)), ("mma16_keys", "mma16_keys", ("backward",)),
                            ("mma16_ahead", "mma16_ahead", ("backward",)), ("mma16_mid", "mma16_mid", ("backward",)),
                            ("parts", "few rows", ("forward",))):
    for way in ways:
        row = re.search(rf"^\| {title} {way}[^|]*\|(.*)\|$", TEXT, re.M)
        check(row, f"no row of {title} {way}")
        said = [set(re.findall(r"\d+ x \d+", cell)) for cell in row[1].split("|")]
        have = [set() for _ in said]
        short = "fwd" if way == "forward" else "bwd"
        kernels = (ROOT / short / "cuda" / f"{short}_kernels.def").read_text()
        for cluster, dim, rows, keys in re.findall(
                rf"^K\(\d+, {family}(_cluster)?, +b?f16, +(\d+)(?:/\d+)?, +\w+, +(\d+), +(\d+)", kernels, re.M):
            beside = 2 if cluster and family == "sm90" else 1 # CTAs with the same rows
            have[column_of[int(dim)]].add(f"{rows} x {beside * int(keys)}")
        check(said == have, f"{title} {way}: {said}, the kernels have {have}")

for line in wrong:
    print(line)
raise SystemExit(1 if wrong else 0)
