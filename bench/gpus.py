#!/usr/bin/env python3
"""Everything about several GPUs in one command: results that must be equal, transfers, attention over ranks, training,
faults. For a machine with two GPUs or more.

    python3 bench/gpus.py BUILD [PART...] > results.txt

BUILD is a build folder with the program fattn, with MPI (build/release). Parts, all of them if none is named:

moves    messages of 64 KB to 512 MB between ranks, by copy engines (threads) and by NCCL
bits     o, lse, dq, dk, dv on 1, 2, 4 ... ranks: bits beside one rank's, errors against F64 (bench/ranks.c)
speed    attention over the GPUs beside one GPU, with and without transfers; 16384 and 65536 rows five times
peers    the same by PyTorch (bench/peers_ranks.py)
train    GPT-2 124M, 64 sequences a GPU: tokens per second, and their share of the sum of those of each GPU alone, and
         of as many of the slowest, for which the others wait in each step; medians of 3 rounds; "at once" is each
         alone, but all GPUs at the same time; losses, which with
         --deterministic must be those of one GPU bit for bit
faults   a rank that is killed, one that stops, one with another batch: what is said, and after how long
"""
import concurrent.futures
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PARTS = ("moves", "bits", "speed", "peers", "train", "faults")
CUDA = pathlib.Path(os.environ.get("CUDA_PATH", "/usr/local/cuda"))
MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
       "OMPI_MCA_hwloc_base_binding_policy": "none"}
TRAIN = ("train", "--preset", "gpt2-124m")


def output_of(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def title(text):
    print(f"\n== {text} ==\n", flush=True)


def show(*command):
    """Runs it with its output in ours."""
    sys.stdout.flush()
    code = subprocess.run([str(c) for c in command], check=False).returncode
    if code:
        print(f"failed with exit code {code}: {' '.join(map(str, command))}", flush=True)
    return code == 0


def build_ranks(build, folder):
    program = folder / "ranks"
    libraries = [f"-L{build / 'lib'}", "-lfattn", f"-Wl,-rpath,{build / 'lib'}", f"-L{CUDA / 'lib64'}",
                 "-lcudart_static", "-ldl", "-lrt", "-lpthread", "-lm"]
    subprocess.run(["cc", "-O2", "-std=c11", "-D_POSIX_C_SOURCE=200809L", f"-I{ROOT / 'include'}",
                    f"-I{CUDA / 'include'}", str(ROOT / "bench/ranks.c"), "-o", str(program), *libraries], check=True)
    return program


# ---- training ----

class Training:
    """A run of fattn train on some GPUs, by threads or by mpirun, or on one of them; its log."""

    def __init__(self, fattn, folder, gpus, *options, mpi=False, device=None):
        self.log = folder / "log.jsonl"
        ranks = ("--device", "cuda") if mpi else ("--gpus", str(gpus))
        command = (*(("mpirun", "-n", str(gpus)) if mpi else ()), str(fattn), *TRAIN, *ranks, *options, "--json",
                   str(self.log), "--overwrite")
        one = {} if device is None else {"CUDA_VISIBLE_DEVICES": str(device)}
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **MPI, **one}, check=False)
        self.error = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["?"])[-1]
        events = [json.loads(line) for line in self.log.read_text().splitlines()] if not self.error else []
        self.losses = [e["loss"] for e in events if e["event"] == "step"]
        speed = next((e for e in events if e["event"] == "speed"), {"tokens_per_second": 0.0, "peak_bytes": 0})
        self.speed, self.peak = speed["tokens_per_second"], speed["peak_bytes"]


def at_once(fattn, folder, gpus):
    """Runs that know nothing of each other: what GPUs of one machine take from each other."""
    def run(n):
        own = folder / f"gpu{n}"
        own.mkdir(exist_ok=True)
        return Training(fattn, own, 1, "--steps", "30", device=n)
    with concurrent.futures.ThreadPoolExecutor(gpus) as pool:
        return list(pool.map(run, range(gpus)))


def train(fattn, folder, gpus):
    alone = [(f"GPU {n} alone", 1, (), False, n) for n in range(gpus)]
    ways = [("threads, copy engines", gpus, (), False, None), ("the same, --zero", gpus, ("--zero",), False, None),
            ("mpirun, NCCL", gpus, (), True, None)]
    runs = {way[0]: [] for way in alone + ways}
    together = []
    for _ in range(3):
        together.append(sum(r.speed for r in at_once(fattn, folder, gpus)))
        for name, n, options, mpi, device in alone + ways:
            if not runs[name] or not runs[name][-1].error:
                runs[name].append(Training(fattn, folder, n, "--steps", "30", *options, mpi=mpi, device=device))
    speed = {name: statistics.median(r.speed for r in each) for name, each in runs.items()}
    each = [speed[a[0]] for a in alone]
    of_all, of_slowest = sum(each) or 1, gpus * min(each) or 1
    shares = {name: f"{rate / of_all:>6.3f} {rate / of_slowest:>7.3f}" for name, rate in speed.items()}
    print(f"{'':<24} {'GPUs':>4} {'tokens/s':>10} {'eff.':>6} {'slowest':>7} {'GiB':>5}")
    for name, n, *_ in alone + ways:
        last = runs[name][-1]
        share = shares[name] if n > 1 else f"{'':>14}"
        print(f"{name:<24} {n:>4} " + (f"failed: {last.error}" if last.error else
                                       f"{speed[name]:>10.0f} {share} {last.peak / 2**30:>5.1f}"), flush=True)
    rate = statistics.median(together)
    print(f"{'at once':<24} {gpus:>4} {rate:>10.0f} {rate / of_all:>6.3f}", flush=True)
    passes = max(2, gpus)
    print(f"\n--deterministic, {passes} passes of 64 x 1024 tokens a step, 10 steps: losses beside one GPU's")
    options = ("--steps", "10", "--deterministic", "--total-batch", str(passes * 65536))
    truth = Training(fattn, folder, 1, *options)
    print(f"{'one GPU':<24} {truth.error or ' '.join(f'{x:.6f}' for x in truth.losses)}")
    for name, n, more, mpi, _ in ways:
        run = Training(fattn, folder, n, *options, *more, mpi=mpi)
        same = "the same bits" if run.losses == truth.losses and truth.losses else f"OTHER: {run.losses}"
        print(f"{name:<24} {run.error or same}", flush=True)


# ---- faults ----

def children(parent):
    """Processes of ranks under mpirun, by number."""
    found = output_of("pgrep", "-P", str(parent))
    return [int(pid) for pid in found.split()]


def fault(fattn, folder, name, gpus, send, options=(), other=()):
    """Starts a training by mpirun, does something to the last rank after some steps, waits for the end of all."""
    command = ["mpirun", "-n", str(gpus - 1), str(fattn), *TRAIN, "--device", "cuda", "--steps", "1000000", *options]
    command += [":", "-n", "1", str(fattn), *TRAIN, "--device", "cuda", "--steps", "1000000", *options, *other]
    log = folder / "fault.txt"
    with log.open("w", encoding="utf-8") as out:
        run = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **MPI})
        begin = time.monotonic()
        victim = None
        if send:
            time.sleep(12)
            begin = time.monotonic()
            victim = children(run.pid)[-1]
            os.kill(victim, send)
        try:
            run.wait(60)
            ended = f"ends after {time.monotonic() - begin:.1f} s with exit code {run.returncode}"
        except subprocess.TimeoutExpired:
            run.kill()
            ended = "DOES NOT END within 60 s"
        if send == signal.SIGSTOP and victim in children(run.pid):
            os.kill(victim, signal.SIGKILL)
    lines = log.read_text(errors="replace").splitlines()
    said = [line for line in lines if "fattn train:" in line or "noticed" in line]
    print(f"{name}: {ended}\n    " + "\n    ".join(said[:3]), flush=True)


def faults(fattn, folder, gpus):
    small = ("--batch", "8", "--time-limit", "10")
    fault(fattn, folder, "the last rank is killed", gpus, signal.SIGKILL, small)
    fault(fattn, folder, "the last rank stops (--time-limit 10)", gpus, signal.SIGSTOP, small)
    fault(fattn, folder, "the last rank has --batch 4, the others 8", gpus, None, small,
          ("--batch", "4", "--total-batch", str(8 * 1024 * gpus)))


def main():
    if len(sys.argv) < 2 or any(p not in PARTS for p in sys.argv[2:]):
        sys.exit(__doc__)
    build, parts = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2:] or PARTS
    fattn = build / "bin/fattn"
    names = output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()
    gpus = len(names)
    if gpus < 2:
        sys.exit(f"gpus.py: {gpus} GPUs are too few")
    topology = output_of("nvidia-smi", "topo", "-m").splitlines()
    link = next((word for line in topology if "GPU0" in line.split()[:1] for word in line.split()[2:3]), "?")
    commit = os.environ.get("FATTN_COMMIT") or output_of("git", "-C", str(ROOT), "log", "-1", "--format=%h")
    print(f"{gpus} x {names[0]}, link {link}, {time.strftime('%Y-%m-%d')}, commit {commit}")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        ranks = build_ranks(build, folder) if {"moves", "bits", "speed"} & set(parts) else None
        for part in parts:
            title(part)
            if part == "moves":
                show(ranks, "moves", gpus, "threads") and show(ranks, "moves", gpus, "nccl")
            elif part == "bits":
                show(ranks, "bits", max(4, gpus), "threads")
            elif part == "speed":
                show(ranks, "speed", gpus, "threads", 16384, 65536, "repeats=5")
                show(ranks, "speed", gpus, "threads", 8192, 32768, 131072)
                show(ranks, "speed", gpus, "threads", 262144, "32x8x128")
                show(ranks, "speed", gpus, "nccl", 16384, 65536, "16x16x128", "32x8x128")
            elif part == "peers":
                show(sys.executable, ROOT / "bench/peers_ranks.py", 16384, 65536)
            elif part == "train":
                train(fattn, folder, gpus)
            else:
                faults(fattn, folder, gpus)


if __name__ == "__main__":
    main()
