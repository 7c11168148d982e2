"""Runs libFuzzer's targets of a build, one after the other: fuzz.py BUILD SECONDS [--keep] [TARGET...]

Each starts from its seeds, seeds/<target>.txt (one input per line, hexadecimal), and from what earlier
runs in this build have found. --keep writes the smallest set of small inputs with the same coverage
back to the seeds. An input that fails stays in BUILD/fuzz/<target>/; bin/fuzz_<target> FILE repeats it.
"""
import hashlib
import os
import pathlib
import re
import subprocess
import sys

SEEDS = pathlib.Path(__file__).parent / "seeds"
LONGEST, SEED_BYTES, MOST_SEEDS = 160, 64, 200  # bytes, bytes, inputs
OPTIONS = [f"-max_len={LONGEST}", "-len_control=0", "-rss_limit_mb=3000", "-timeout=60",
           "-print_final_stats=1",
           "-detect_leaks=0"]  # HDF5 keeps pools; the targets count memory and objects themselves
QUIET = {"checkpoint"}  # prints an error message for every error
ENVIRONMENT = {"ASAN_OPTIONS": "allocator_may_return_null=1:malloc_context_size=4",
               "UBSAN_OPTIONS": "print_stacktrace=1", "OMP_WAIT_POLICY": "passive"}


def write_corpus(target, folder):
    folder.mkdir(parents=True, exist_ok=True)
    for line in (SEEDS / f"{target}.txt").read_text().split("\n"):
        if line and not line.startswith("#"):
            data = b"" if line == "-" else bytes.fromhex(line)
            (folder / hashlib.sha1(data).hexdigest()).write_bytes(data)


def run(program, options, log):
    command = [program, *OPTIONS, *options]
    with open(log, "w") as out:
        return subprocess.run(command, stdout=out, stderr=out,
                              env={**os.environ, **ENVIRONMENT}).returncode


def summary(log):
    text = log.read_text(errors="replace")
    done = re.findall(r"^#(\d+)\s+DONE\s+cov: (\d+) ft: (\d+)", text, re.M)
    return "{} executions, coverage {}, features {}".format(*done[-1]) if done else "did not finish"


def keep(target, program, folder):
    """The seeds become a minimal corpus of inputs of up to SEED_BYTES bytes, the smallest first."""
    small, least = folder / "small", folder / "least"
    for x in (small, least):
        subprocess.run(["rm", "-rf", x], check=True)
        x.mkdir()
    for file in (folder / "corpus").iterdir():
        if file.stat().st_size <= SEED_BYTES:
            (small / file.name).write_bytes(file.read_bytes())
    if run(program, ["-merge=1", least, small], folder / "merge.log"):
        sys.exit(f"{target}: merging failed, see {folder}/merge.log")
    inputs = sorted({file.read_bytes() for file in least.iterdir()} | {b""},
                    key=lambda data: (len(data), data))
    step = max(1, -(-len(inputs) // MOST_SEEDS))
    (SEEDS / f"{target}.txt").write_text("".join((data.hex() or "-") + "\n"
                                                 for data in inputs[::step]))


def main(build, seconds, *rest):
    targets = [x for x in rest if x != "--keep"] or sorted(x.stem for x in SEEDS.glob("*.txt"))
    failed = []
    for target in targets:
        program = pathlib.Path(build, "bin", f"fuzz_{target}").resolve()
        folder = pathlib.Path(build, "fuzz", target).resolve()
        write_corpus(target, folder / "corpus")
        options = [folder / "corpus", f"-max_total_time={seconds}", f"-artifact_prefix={folder}/"]
        code = run(program, options + ["-close_fd_mask=2"] * (target in QUIET), folder / "log.txt")
        print(f"{target}: {summary(folder / 'log.txt')}" + (f"; FAILED, see {folder}" if code else ""),
              flush=True)
        if code:
            failed.append(target)
        elif "--keep" in rest:
            keep(target, program, folder)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main(*sys.argv[1:])
