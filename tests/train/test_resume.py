"""A run that is killed at random times and resumed ends with the same bits as an undisturbed one."""
import os
import random
import signal
import subprocess
import sys
import tempfile
import time

import h5py
import numpy as np

FATTN = os.path.join(os.environ["FATTN_BUILD"], "bin", "fattn")
STEPS, EVERY = 60, 5
RUN = ["--task", "text", "--layers", "2", "--channels", "32", "--heads", "4", "--kv-heads", "2",
       "--context", "64", "--batch", "4", "--steps", str(STEPS), "--warmup", "10",
       "--eval-every", "20", "--checkpoint-every", str(EVERY), "--sample", "0", "--seed", "11"]


def train(*options):
    return subprocess.Popen([FATTN, "train", *options], stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)


def finish(process, code=0):
    output = process.communicate(timeout=120)[0]
    assert process.returncode == code, f"exit code {process.returncode}, not {code}:\n{output}"
    return output


def steps_in(folder):
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(int(name[5:-3]) for name in names if name.startswith("step-"))


def datasets(folder, step):
    found = {}
    with h5py.File(os.path.join(folder, f"step-{step:09d}.h5"), "r") as f:
        f.visititems(lambda name, x: found.update({name: x[()]}) if isinstance(x, h5py.Dataset)
                     and not name.startswith("config/") else None)
        found.update({"state/" + key: value for key, value in f["state"].attrs.items()
                      if key != "elapsed"})
    return found


def assert_same(a, b):
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    for name in a:
        x, y = np.asarray(a[name]), np.asarray(b[name])
        assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes(), name


def interrupt(process, folder, at, how):
    """Waits for a checkpoint of step `at` or later, then for a random time, then sends the signal."""
    while not [step for step in steps_in(folder) if step >= at]:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.001)
    time.sleep(random.random() * 0.02)
    process.send_signal(how)


def main():
    seed = int(os.environ.get("FATTN_TEST_SEED", time.time_ns() % 10**6))
    random.seed(seed)
    print("FATTN_TEST_SEED =", seed)
    with tempfile.TemporaryDirectory() as folder:
        text = os.path.join(folder, "text")
        with open(text, "w") as f:
            f.writelines(f"line {i}: {i * i} is the square of {i}\n" for i in range(2000))
        calm, struck, single = (os.path.join(folder, x) for x in ("calm", "struck", "single"))
        finish(train(*RUN, "--text", text, "--checkpoint", calm))
        assert steps_in(calm) == [STEPS - EVERY, STEPS], steps_in(calm)
        want = datasets(calm, STEPS)
        assert len(want["history/loss"]) == STEPS
        assert want["history/loss"][-1] < want["history/loss"][0] - 0.5, "it learns"

        process, kills = train(*RUN, "--text", text, "--checkpoint", struck), 0
        for at in (EVERY, 4 * EVERY, 8 * EVERY):
            interrupt(process, struck, at, signal.SIGKILL)
            process.communicate(timeout=120)
            kills += process.returncode == -signal.SIGKILL
            assert len(steps_in(struck)) <= 3  # killed before the oldest was removed
            process = train("--resume", struck)
        finish(process)
        assert kills == 3, f"{kills} of 3 kills came before the end"
        assert_same(datasets(struck, STEPS), want)

        # After SIGTERM the current step is saved; another number of threads changes no bit.
        process = train(*RUN, "--text", text, "--checkpoint", single, "--threads", "1")
        interrupt(process, single, EVERY, signal.SIGINT)
        output = finish(process, 130)
        assert "interrupted after step" in output, output
        stopped = steps_in(single)[-1]
        assert_same({"cursor": datasets(single, stopped)["state/cursor"]}, {"cursor": 4 * stopped})
        process = train("--resume", single, "--threads", "3")
        interrupt(process, single, min(stopped + 2 * EVERY, STEPS - 2 * EVERY), signal.SIGTERM)
        finish(process, 130)
        finish(train("--resume", single))
        assert_same(datasets(single, STEPS), want)

        # The newest checkpoint is damaged: the run resumes from the one before, with the same results.
        newest = os.path.join(single, f"step-{STEPS:09d}.h5")
        with open(newest, "r+b") as f:
            f.seek(5000)
            byte = f.read(1)
            f.seek(5000)
            f.write(bytes([byte[0] ^ 1]))
        output = finish(train("--resume", single))
        assert "damaged" in output and f"going back to step {STEPS - EVERY}" in output, output
        assert_same(datasets(single, STEPS), want)
    print("resumed runs are bitwise equal")


sys.exit(main())
