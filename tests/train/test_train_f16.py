"""fattn train --dtype f16: follows F32, its loss scale, what stops it, and runs that go on."""
import json
import math
import os
import subprocess
import sys
import tempfile

import h5py

from checkpoint_seal import change

FATTN = os.path.join(os.environ["FATTN_BUILD"], "bin", "fattn")
STEPS = 30
TINY = ["--task", "tokens", "--vocab", "40", "--layers", "1", "--channels", "32", "--heads", "2", "--context", "32",
        "--batch", "4", "--steps", str(STEPS), "--warmup", "5", "--seed", "3", "--lr", "3e-3",
        "--threads", "1"]
UNIT = 2**-11


def fattn(*options, code=0, says=""):
    p = subprocess.run([FATTN, "train", *options], capture_output=True, text=True, timeout=300)
    shown = f"{options}\nexit code {p.returncode}\n{p.stdout}{p.stderr}"
    assert p.returncode == code and says in p.stdout + p.stderr, shown
    return p.stdout + p.stderr


def train(name, *options, **more):
    """The log's steps, by number, and what was printed."""
    said = fattn(*options, "--json", name + ".jsonl", "--overwrite", **more)
    with open(name + ".jsonl") as lines:
        return {e["step"]: e for e in map(json.loads, lines) if e["event"] == "step"}, said


def follows_f32():
    """F16 rounds every result to UNIT. Some ten follow each other from the table to a logit, so a logit is off by
    sqrt(10) UNIT, and a loss, a logit less a mean of logits, by sqrt(2) times that. Logits are not larger than the loss
    here. A gradient goes as far back again: its norm is off by at most sqrt(20) UNIT."""
    bound = math.sqrt(20) * UNIT
    for arch in ("fattn", "gpt2"):
        for passes in ([], ["--total-batch", str(2 * 4 * 32)]):
            run = [*TINY, "--arch", arch, *passes, "--checkpoint", "-"]
            wide, _ = train("wide", *run)
            for scale in ("auto", "1000"):
                narrow, said = train("narrow", *run, "--dtype", "f16", "--loss-scale", scale)
                assert narrow.keys() == wide.keys()
                off = [max(abs(narrow[s][key] / wide[s][key] - 1) for s in wide) for key in ("loss", "grad_norm")]
                assert 0 < off[0] <= bound and 0 < off[1] <= bound, (arch, scale, off, bound)
                fixed = 65536 if scale == "auto" else 1000
                assert all(e["loss_scale"] == fixed and e["skipped_steps"] == 0 for e in narrow.values())
                assert f"loss scale {fixed}, 0 steps skipped" in said and f"scale {fixed} skipped 0" in said, said
        assert "loss_scale" not in wide[1], wide[1]
        # Without the scale, and more so below it, gradients are 0: the test above is one of the scale.
        lost, _ = train("lost", *run, "--dtype", "f16", "--loss-scale", "1e-9")
        assert lost[1]["grad_norm"] < 0.9 * wide[1]["grad_norm"], (lost[1], wide[1])


def file_of(folder, step):
    return os.path.join(folder, f"step-{step:09d}.h5")


def state_of(folder, step):
    with h5py.File(file_of(folder, step), "r") as f:
        return {key: value.item() for key, value in f["state"].attrs.items() if key != "elapsed"}


def enlarge(f):
    f["state"].attrs.modify("loss_scale", 2.0**24)


def resume():
    """From a scale that is far too large, which skipped steps halve: a run that is cut there goes on bitwise."""
    fattn(*TINY, "--dtype", "f16", "--schedule", "constant", "--steps", "10", "--checkpoint-every", "10",
          "--checkpoint", "start")
    begun = state_of("start", 10)
    assert begun["loss_scale"] == 65536 and begun["finite_steps"] == 10 and begun["skipped_steps"] == 0, begun
    change(file_of("start", 10), enlarge)
    def part(name, path, end):
        return train(name, "--resume", path, "--steps", str(end), "--checkpoint", name, "--checkpoint-every", str(end))
    whole, said = part("whole", file_of("start", 10), 40)
    scales, skipped = [whole[s]["loss_scale"] for s in whole], whole[40]["skipped_steps"]
    assert whole[12]["skipped_steps"] == 2 and scales[1] == 2.0**22, whole[12]
    assert 3 <= skipped <= 12 and scales[-1] == 2.0**(24 - skipped), (scales, skipped)
    assert f"loss scale {scales[-1]:g}, {skipped} steps skipped" in said, said
    assert whole[11]["grad_norm"] is None and whole[40]["grad_norm"] > 0, whole[11]
    path = file_of("start", 10)
    for end in (12, 10 + skipped + 2, 40): # among skipped steps, and after them
        steps, _ = part("cut", path, end)
        for s in steps:
            for key in ("loss", "grad_norm", "loss_scale", "skipped_steps"):
                assert steps[s][key] == whole[s][key], (end, s, key, steps[s], whole[s])
        path = file_of("cut", end)
    assert state_of("cut", 40) == state_of("whole", 40)
    assert state_of("cut", 40)["finite_steps"] == 30 - skipped


def other_dtypes():
    """A run goes on in another dtype; files that know no scale begin with 65536."""
    run = [*TINY, "--steps", "4", "--checkpoint-every", "4"]
    fattn(*run, "--dtype", "f16", "--loss-scale", "512", "--checkpoint", "fixed")
    assert "loss_scale" not in state_of("fixed", 4) and state_of("fixed", 4)["skipped_steps"] == 0
    on, _ = train("on", "--resume", file_of("fixed", 4), "--steps", "6", "--checkpoint", "-")
    assert on[6]["loss_scale"] == 512, on
    wide, _ = train("on", "--resume", file_of("fixed", 4), "--steps", "6", "--dtype", "f32", "--checkpoint", "-")
    assert "loss_scale" not in wide[6] and abs(wide[6]["loss"] / on[6]["loss"] - 1) < math.sqrt(20) * UNIT
    on, _ = train("on", "--resume", file_of("fixed", 4), "--steps", "6", "--loss-scale", "auto", "--checkpoint", "-")
    assert on[6]["loss_scale"] == 65536, on
    fattn("--resume", file_of("fixed", 4), "--steps", "6", "--dtype", "f32", "--loss-scale", "8", "--checkpoint", "-",
          code=2, says="--loss-scale 8 needs --dtype f16")
    fattn(*run, "--checkpoint", "f32")
    def older(f):
        del f["state"].attrs["skipped_steps"]
    change(file_of("f32", 4), older)
    on, _ = train("on", "--resume", file_of("f32", 4), "--steps", "6", "--dtype", "f16", "--checkpoint", "-")
    assert on[6]["loss_scale"] == 65536 and on[6]["skipped_steps"] == 0, on


def errors():
    off = [*TINY, "--checkpoint", "-"]
    for scale in ("0", "-2", "nan", "inf", "big", "64k", "1e39", "1e-39", "auto2"):
        fattn(*off, "--dtype", "f16", "--loss-scale=" + scale, code=2,
              says=f"--loss-scale {scale} is neither auto nor a number in 2^-126 to 2^126")
    fattn(*off, "--loss-scale", "auto", code=2, says="--loss-scale auto needs --dtype f16")
    fattn(*off, "--dtype", "f8", code=2, says="f32|bf16|f16")
    # Gradients that always overflow, with a finite loss: the run ends, and says why.
    said = fattn(*off, "--dtype", "f16", "--loss-scale", "1e30", "--steps", "100", code=1,
                 says="the gradients of 32 steps one after the other, to step 32, overflow or are NaN")
    assert "loss scale of 1e+30: lower --lr or --loss-scale?" in said, said
    fattn(*off, "--dtype", "f16", "--lr", "10", "--clip", "0", "--warmup", "0", "--steps", "400", code=1,
          says="lower --lr, or a dtype of more range than f16?")


def main():
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for test in (follows_f32, resume, other_dtypes, errors):
            test()
            print(test.__name__, "ok")


sys.exit(main())
