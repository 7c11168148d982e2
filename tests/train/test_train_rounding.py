"""fattn train --rounding: 16-bit weights without masters learn as with them, but not to nearest; memory, runs that go
on, ranks, and what is refused."""
import json
import os
import subprocess
import sys
import tempfile

import h5py
import numpy as np

FATTN = os.path.join(os.environ["FATTN_BUILD"], "bin", "fattn")
TINY = ["--task", "recall", "--context", "16", "--layers", "1", "--channels", "32", "--heads", "2", "--kv-heads", "2",
        "--batch", "8", "--schedule", "constant", "--lr", "2e-4", "--target", "0", "--seed", "3",
        "--threads", "1"]


def fattn(*options, code=0, says=""):
    p = subprocess.run([FATTN, "train", *options], capture_output=True, text=True, timeout=300)
    shown = f"{options}\nexit code {p.returncode}\n{p.stdout}{p.stderr}"
    assert p.returncode == code and says in p.stdout + p.stderr, shown
    return p.stdout + p.stderr


def train(*options, says=""):
    """The log, and what was printed."""
    said = fattn(*options, "--json", "log.jsonl", "--overwrite", says=says)
    with open("log.jsonl") as lines:
        log = [json.loads(line) for line in lines]
    os.remove("log.jsonl")  # a resumed run would add to it
    return log, said


def losses(log):
    return {e["step"]: e["loss"] for e in log if e["event"] == "step"}


def learns():
    """At this rate most updates are below half of the distance between BF16 numbers. To nearest the run falls behind;
    stochastically the difference from masters is less than a tenth of that."""
    end, peak = {}, {}
    run = [*TINY, "--batch", "16", "--steps", "300", "--dtype", "bf16", "--checkpoint", "-"]
    for rounding in ("masters", "stochastic", "nearest", "stochastic-masters"):
        log, said = train(*run, "--rounding", rounding)
        assert log[0]["rounding"] == rounding and log[-1]["event"] == "end", log[0]
        assert ("without F32 masters" in said) == (rounding in ("stochastic", "nearest")), said
        end[rounding] = log[-1]["val_loss"]
        peak[rounding] = max(e["peak_bytes"] for e in log if e["event"] == "step")
        parameters = log[0]["parameters"]
    print(end, peak, parameters)
    behind = end["nearest"] - end["masters"]
    assert behind > 0.05 * end["masters"], end
    assert abs(end["stochastic"] - end["masters"]) < 0.1 * behind, end
    assert abs(end["stochastic-masters"] - end["masters"]) < 0.1 * behind, end
    assert peak["stochastic-masters"] == peak["masters"], peak
    assert peak["stochastic"] == peak["nearest"] <= peak["masters"] - 4 * parameters, (peak, parameters)


def goes_on():
    """To the same bits, from the file's options and with its seed; F16 with its loss scale, too."""
    for dtype, rounding in ("bf16", "stochastic"), ("bf16", "stochastic-masters"), ("f16", "stochastic"):
        run = [*TINY, "--dtype", dtype, "--checkpoint-every", "5", "--steps", "10", "--rounding", rounding]
        whole, _ = train(*run, "--checkpoint", "whole")
        path = os.path.join("whole", "step-000000005.h5")
        with h5py.File(path) as f:
            assert f["state"].attrs["rounding_seed"] == 3, dict(f["state"].attrs)
        part, _ = train("--resume", path, "--checkpoint", "part", says="rounded stochastically")
        assert list(losses(part)) == [6, 7, 8, 9, 10], part
        assert all(losses(whole)[s] == loss for s, loss in losses(part).items()), (part, whole)
        same("whole", "part")
        for option, value, stored in ("seed", "4", "3"), ("lr", "0.25", "0.0002"), ("schedule", "wsd", "constant"):
            fattn("--resume", path, "--" + option, value, "--checkpoint", "-", code=1,
                  says=f"--{option} {value} differs from the checkpoint's {stored}: a resumed run cannot change it")
        # Another rounding is another run, which the header tells; so is another dtype, and F32 has none.
        for other in ("nearest", "masters"):
            log, said = train("--resume", path, "--rounding", other, "--checkpoint", "-")
            assert log[0]["rounding"] == other and ("rounded to nearest" in said) == (other == "nearest"), said
            # Masters are rounded anew.
            assert (losses(log)[6] == losses(whole)[6]) == (rounding == "stochastic"), log
            assert losses(log)[8] != losses(whole)[8], log
        log, _ = train("--resume", path, "--dtype", "f32", "--checkpoint", "-")
        assert log[0]["rounding"] == "masters", log[0]
    run = [*TINY, "--dtype", "bf16", "--checkpoint-every", "5", "--steps", "10"]
    train(*run, "--checkpoint", "masters")
    log, _ = train("--resume", os.path.join("masters", "step-000000005.h5"), "--rounding", "stochastic",
                   "--checkpoint", "-", says="rounded stochastically")
    assert list(losses(log)) == [6, 7, 8, 9, 10], log


def same(one, other, step=10):
    files = [h5py.File(os.path.join(folder, f"step-{step:09d}.h5")) for folder in (one, other)]
    sets = []
    files[0].visititems(lambda name, x: sets.append(name) if isinstance(x, h5py.Dataset) else None)
    sets = [s for s in sets if s.startswith(("params", "adam"))]
    assert len(sets) > 9, sets
    for s in sets:
        assert np.array_equal(files[0][s][()], files[1][s][()]), s
    for f in files:
        f.close()


def ranks():
    """The bits of one rank, whoever owns an element."""
    run = [*TINY, "--dtype", "bf16", "--rounding", "stochastic", "--deterministic", "--steps", "10", "--total-batch",
           str(4 * 8 * 16)]
    one, _ = train(*run, "--checkpoint", "one")
    for way in (["--ranks", "2"], ["--ranks", "2", "--zero"], ["--ranks", "4", "--zero"]):
        log, _ = train(*run, *way, "--threads", "4", "--checkpoint", "some")
        assert losses(log) == losses(one), way
        same("one", "some")


def refuses():
    for rounding in ("stochastic", "nearest"):
        fattn(*TINY, "--rounding", rounding, "--checkpoint", "-", code=2,
              says=f"--rounding {rounding} is for --dtype bf16 and f16: weights in f32 have no masters")
    fattn(*TINY, "--dtype", "bf16", "--rounding", "up", "--checkpoint", "-", code=2,
          says="masters|stochastic|nearest|stochastic-masters")


with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    learns()
    goes_on()
    ranks()
    refuses()
sys.exit(0)
