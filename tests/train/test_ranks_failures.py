"""What ends a training of several ranks: wrong numbers, files, ranks that fail, stop, or are killed. All ranks end
within seconds, the reason is printed once, the newest checkpoint is whole and the run goes on from it."""
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True # the sources may be read-only
from ranks_runs import (FATTN, RECALL, TINY, after_signal, assert_same, built_with_mpi, can_mpirun, events, finish,
                        start, steps_in, stored, train)

# Steps of a few milliseconds: time for a signal in the middle. Its schedule does not depend on --steps.
LONG = ["--task", "recall", "--layers", "2", "--channels", "32", "--heads", "2", "--context", "32", "--batch", "4",
        "--total-batch", "512", "--steps", "100000", "--eval-every", "100000", "--checkpoint-every", "5",
        "--target", "0", "--threads", "1", "--deterministic", "--schedule", "constant"]
END = "--steps", 40


def ways(with_mpi):
    """Two ranks, and four."""
    return [(["--ranks", n], {}) for n in (2, 4)] + [([], {"processes": n}) for n in (2, 4) if with_mpi]


def rank_of(pid):
    """What mpirun has told the process: numbers of processes begin again at the largest one."""
    with open(f"/proc/{pid}/environ", encoding="utf-8", errors="replace") as file:
        told = dict(x.split("=", 1) for x in file.read().split("\0") if "=" in x)
    return int(next(told[x] for x in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK") if x in told))


def children(process):
    """The ranks' processes, in their order."""
    listed = subprocess.run(["ps", "--ppid", str(process.pid), "-o", "pid=,comm="], capture_output=True, text=True)
    ranks = [int(line.split()[0]) for line in listed.stdout.splitlines() if line.split()[1] == "fattn"]
    return sorted(ranks, key=rank_of)


def begin(folder, *words, **how):
    """A long run in a new folder, which has its first checkpoint."""
    shutil.rmtree(folder, ignore_errors=True)
    p = start(*LONG, *words, "--checkpoint", folder, **how)
    wait_for_checkpoint(p, folder)
    return p


def wait_for_checkpoint(process, folder, step=5):
    end = time.monotonic() + 60
    while not [s for s in steps_in(folder) if s >= step]:
        assert process.poll() is None and time.monotonic() < end, process.communicate()[0]
        time.sleep(0.01)


def goes_on(folder, undisturbed, *words, **how):
    """The rest of a run has the bits of one without a failure."""
    train("--resume", folder, *END, *words, **how)
    want, have = stored(undisturbed), stored(folder)
    names = [name for name in want if name.startswith(("params/", "adam/", "history/loss"))]
    assert_same({name: have[name] for name in names}, {name: want[name] for name in names})


def wrong_numbers(with_mpi):
    recall = RECALL[:-2]
    for way, how in ways(with_mpi)[::2]:
        train(*recall, *way, "--total-batch", 96, code=2, once="fattn train: ", **how,
              says="3 passes of --batch 2 x --context 16, which 2 ranks cannot divide: 64 or 128 tokens would fit")
        train(*way, code=2, says="no task given", once="fattn train: ", **how)
    train(*recall, "--ranks", 4, "--total-batch", 32, code=2,
          says="has 1 passes of --batch 2 x --context 16, which 4 ranks cannot divide: 128 tokens would fit")
    train(*recall, "--ranks", 4, "--total-batch", 33, code=2, says="33 is not a multiple of")
    train(*recall, "--ranks", 0, code=2, says="--ranks: \"0\" is not a whole number from 1 to 1024")
    train(*recall, "--gpus", 2, "--ranks", 3, code=2, says="--gpus 2 is 2 ranks, not --ranks 3")
    train(*recall, "--gpus", 2, "--device", "cpu", code=2, says="--gpus 2 is --device cuda, not cpu")
    if with_mpi:
        for option in "--ranks", "--gpus":
            train(*recall, option, 2, processes=2, code=2, once="--ranks 2: Open MPI's mpirun has started 2 processes")
    p = subprocess.run([FATTN, "info"], capture_output=True, text=True)
    assert p.returncode == 0, p.stderr
    train(*recall, "--gpus", 1024, code=1, once="GPU", says="of 1024: ") # nobody has as many
    # A step's tokens are the run's, whatever the ranks.
    train(*RECALL, "--checkpoint", "run", "--steps", 1)
    train("--resume", "run", "--ranks", 3, code=2, says="has 4 passes of --batch 2 x --context 16, which 3 ranks")
    train("--resume", "run", "--ranks", 2, "--total-batch", 64, code=1, says="--total-batch 64 differs")


def launchers():
    """Several processes without MPI would be as many runs; one process needs no MPI, whatever has started it."""
    mpi = built_with_mpi()
    for size, rank in (("PMI_SIZE", "PMI_RANK"), ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
                       ("MPI_LOCALNRANKS", "MPI_LOCALRANKID")):
        said = train(*RECALL, "--checkpoint", "-", **{size: "3", rank: "0"}, code=None, once="fattn train: ")
        want = "has started 3 processes, MPI knows of one" if mpi else "has started several processes, but"
        assert want in said, said
        train(*RECALL, "--checkpoint", "-", **{size: "1", rank: "0"})
    train(*RECALL, "--checkpoint", "-", SLURM_NTASKS="3", SLURM_PROCID="0") # a job's script


def files(with_mpi):
    open("file", "w").close()
    with open(FATTN, "rb") as program: # the thread sanitizer writes its own file
        limited = b"__tsan_init" not in program.read()
    for way, how in ways(with_mpi)[::2]:
        train("--task", "text", "--text", "nowhere", *way, code=1, once="nowhere", **how)
        train("--resume", "nowhere", *way, code=1, once="nowhere", **how)
        for zero in (["--zero"],) if how else ([], ["--zero"]):
            train(*RECALL, *way, *zero, "--checkpoint", "file/x", code=1, once="cannot write", **how)
            train(*RECALL, *way, *zero, "--checkpoint", "-", "--json", "/dev/full", code=1, once="/dev/full", **how)
            train(*RECALL, *way, *zero, "--checkpoint", "-", "--plot", "/dev/full", code=1, once="/dev/full", **how)
            if limited and not how: # mpirun has files of its own
                train(*RECALL, *way, *zero, "--checkpoint", "full", code=1, once="cannot write", largest_file=9000)


def one_folder(with_mpi):
    for way, how in ways(with_mpi)[::2]:
        first = begin("shared", *way, **how)
        for words in ([*LONG, "--checkpoint", "shared"], [*LONG, "--checkpoint", "shared", "--overwrite"],
                      ["--resume", "shared"]):
            train(*words, *way, code=1, once="another run (process", says="saves its checkpoints in shared", **how)
        first.send_signal(signal.SIGTERM)
        finish(first, None, once=after_signal(how, "interrupted after step"))
        # It can be read meanwhile, and belongs to a run.
        train(*LONG, *way, "--checkpoint", "shared", code=1, once="of another run", **how)
        train("--resume", "shared", *way, "--steps", steps_in("shared")[-1] + 3, **how)
        assert len(os.listdir("shared")) == 2, os.listdir("shared")


def a_rank_fails(with_mpi):
    """Damaged tokens are read by one rank only."""
    with open("text", "w") as f:
        f.writelines(f"line {i}: {i * i} is the square of {i}\n" for i in range(300))
    assert subprocess.run([FATTN, "tokens", "text", "--out", "t"], capture_output=True).returncode == 0
    shards = ["--data", "t_train_*.bin", "--val", "t_val_*.bin", "--vocab", "257", "--context", "16", *TINY,
              "--total-batch", "128", "--steps", "80"]
    with open("t_train_000001.bin", "rb") as f:
        whole = f.read()
    for way, how in ways(with_mpi)[:3]:
        at_fault = set()
        for sample in range(3, 60, 14 if way else 28):
            at = 1024 + 2 * 32 * sample
            with open("t_train_000001.bin", "wb") as f:
                f.write(whole[:at] + b"\xff\xff" + whole[at + 2:])
            shutil.rmtree("run", ignore_errors=True)
            said = train(*shards, *way, "--checkpoint", "run", "--checkpoint-every", "1", code=1, once="token 65535",
                         **how)
            assert "fattn train: rank " in said and f"offset {at}" in said, said
            at_fault.add(said[said.index("fattn train: rank ") + len("fattn train: rank "):][0])
        assert at_fault != {"0"}, at_fault
        with open("t_train_000001.bin", "wb") as f:
            f.write(whole)
        if steps_in("run"):
            train("--resume", "run", *way, **how)
    train(*RECALL, "--ranks", 2, "--lr", 10, "--clip", 0, "--dtype", "f16", "--loss-scale", 1e30, "--checkpoint", "-",
          "--steps", 100, code=1, once="fattn train: ")


# A busy machine needs more than mpirun's second to save. Open MPI 5 gives half a second whatever it is told.
PATIENT = {"OMPI_MCA_odls_base_sigkill_timeout": "4"}


def interrupted(undisturbed, with_mpi):
    """All stop after the same step, which is saved, unless mpirun kills them before (`once` empty: half a second)."""
    for way, how in ways(with_mpi):
        for number in (signal.SIGINT, signal.SIGTERM)[:1 if how else 2]:
            p = begin("stopped", *way, "--zero", "--json", "stopped.jsonl", **how, **PATIENT)
            p.send_signal(number)
            once = after_signal(how, "interrupted after step")
            said = finish(p, None if how else 130, once=once, timeout=20)
            step = steps_in("stopped")[-1]
            assert not once or f"{once} {step}; continue with --resume stopped" in said, said
            logged = events("stopped.jsonl", "step")[-1]["step"]
            assert logged == step or (not once and logged > step), (logged, step)
            if step < END[1]:
                goes_on("stopped", undisturbed)


def killed(undisturbed):
    """mpirun ends the others; a new run is not blocked by the files of the old one."""
    for processes, victim in ((2, 0), (4, 2)):
        p = begin("killed", *["--zero"][:victim], processes=processes)
        ranks = children(p)
        assert len(ranks) == processes, ranks
        os.kill(ranks[victim], signal.SIGKILL)
        finish(p, None, says="signal 9 (Killed)", timeout=20)
        if steps_in("killed")[-1] < END[1]:
            goes_on("killed", undisturbed, *["--ranks", 2][:2 * victim])
        assert not [name for name in os.listdir("killed") if not name.startswith("step-")], os.listdir("killed")


def stopped(undisturbed):
    """A process that stops, but does not end, makes the others end after the time limit."""
    for processes, victim in ((2, 0), (4, 3)):
        p = begin("stopped", "--time-limit", 6, processes=processes)
        os.kill(children(p)[victim], signal.SIGSTOP)
        finish(p, None, once=f"rank {victim} does not answer within 6 s", timeout=40)
        if steps_in("stopped")[-1] < END[1]:
            goes_on("stopped", undisturbed)


def main():
    with_mpi = can_mpirun()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        train(*LONG, *END, "--checkpoint", "calm")
        tests = [wrong_numbers, files, one_folder, a_rank_fails]
        for test in tests:
            test(with_mpi)
            print(test.__name__, "ok", flush=True)
        launchers()
        interrupted("calm", with_mpi)
        print("interrupted ok", flush=True)
        for test in (killed, stopped) if with_mpi else ():
            test("calm")
            print(test.__name__, "ok", flush=True)
        os.chdir("/")


sys.exit(main())
