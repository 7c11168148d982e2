"""fattn train --fp8: follows training without it, says so, can be resumed, and evaluates in the dtype."""
import json
import os
import subprocess
import sys
import tempfile

FATTN = os.path.join(os.environ["FATTN_BUILD"], "bin", "fattn")
TINY = ["--task", "tokens", "--vocab", "40", "--layers", "2", "--channels", "64", "--heads", "2", "--context", "64",
        "--batch", "4", "--warmup", "5", "--seed", "3", "--lr", "3e-3", "--threads", "1"]


def train(name, *options):
    p = subprocess.run([FATTN, "train", *TINY, *options, "--json", name, "--overwrite"], capture_output=True, text=True,
                       timeout=300)
    assert p.returncode == 0, (options, p.stdout, p.stderr)
    with open(name) as log:
        events = [json.loads(line) for line in log]
    return events[0], {e["step"]: e for e in events if e["event"] == "step"}, p.stdout


def follows():
    """Each output of attention is off by 6 % of the size of outputs (NUMERICS.md, FP8), in random directions, and
    attention is at most half of what a layer adds. So a logit is off by at most 3 % of its size, which is at most the
    loss here, and a loss by sqrt(2) times that: 4.3 %. Gradients by 14 %, and they go back through the layers."""
    for dtype in ("f32", "bf16", "f16"):
        run = ["--dtype", dtype, "--steps", "20", "--checkpoint", "-"]
        start, plain, said = train("plain.jsonl", *run)
        assert start["fp8"] is False and "8-bit" not in said, said
        start, fp8, said = train("fp8.jsonl", *run, "--fp8")
        assert start["fp8"] is True and "attention: on 8-bit copies in training" in said, said
        off = [max(abs(fp8[s][key] / plain[s][key] - 1) for s in plain) for key in ("loss", "grad_norm")]
        assert 0 < off[0] <= 0.043 and 0 < off[1] <= 0.14 * 2, (dtype, off)
        print(dtype, off)


def renews():
    """With --fp8-renew backward has the gradients of its dtype for what forward gave it: another run than either,
    and as close."""
    run = ["--dtype", "bf16", "--steps", "20", "--checkpoint", "-"]
    logs = [train("log.jsonl", *run, *options) for options in ([], ["--fp8"], ["--fp8", "--fp8-renew"])]
    assert [start["fp8_renew"] for start, _, _ in logs] == [False, False, True]
    assert "again without them for backward" in logs[2][2] and "again" not in logs[1][2], logs[2][2]
    plain, fp8, renewed = (steps for _, steps, _ in logs)
    off = max(abs(renewed[s]["loss"] / plain[s]["loss"] - 1) for s in plain)
    assert 0 < off <= 0.043, off
    assert renewed[1]["loss"] == fp8[1]["loss"] and renewed[1]["grad_norm"] != fp8[1]["grad_norm"], (renewed, fp8)
    print("renewed", off)


def with_integers():
    """--fp8-int8: another run than with --fp8 alone, within the same bounds, also beside --fp8-renew."""
    run = ["--dtype", "bf16", "--steps", "20", "--checkpoint", "-"]
    logs = [train("log.jsonl", *run, *options) for options in
            ([], ["--fp8"], ["--fp8", "--fp8-int8"], ["--fp8", "--fp8-int8", "--fp8-renew"])]
    assert [start["fp8_int8"] for start, _, _ in logs] == [False, False, True, True]
    assert "(FATTN_FP8, FATTN_FP8_INT8)" in logs[2][2] and "INT8" not in logs[1][2], logs[2][2]
    plain, fp8, integers, renewed = (steps for _, steps, _ in logs)
    for other in (integers, renewed):
        off = max(abs(other[s]["loss"] / plain[s]["loss"] - 1) for s in plain)
        assert 0 < off <= 0.043 and other[1]["loss"] != fp8[1]["loss"], off
    assert integers[1]["loss"] == renewed[1]["loss"], (integers, renewed)


def goes_on():
    """A run that is cut goes on bitwise, with the flag; one without it may go on with it."""
    run = ["--dtype", "bf16", "--checkpoint-every", "5", "--steps", "10"]
    _, whole, _ = train("whole.jsonl", *run, "--fp8", "--checkpoint", "whole")
    path = os.path.join("whole", "step-000000005.h5")
    start, part, _ = train("part.jsonl", "--resume", path, "--checkpoint", "-")
    assert start["fp8"] is True and list(part) == [6, 7, 8, 9, 10], part
    assert all(part[s]["loss"] == whole[s]["loss"] for s in part), (part, whole)
    train("plain.jsonl", *run, "--checkpoint", "plain")
    start, part, _ = train("part.jsonl", "--resume", os.path.join("plain", "step-000000005.h5"), "--fp8",
                           "--checkpoint", "-")
    assert start["fp8"] is True and list(part) == [6, 7, 8, 9, 10], part


def evaluates_in_the_dtype():
    """Without a step both evaluate the same model."""
    losses = []
    for option in ([], ["--fp8"]):
        train("eval.jsonl", "--steps", "1", "--lr", "0", "--weight-decay", "0", "--checkpoint", "-", *option)
        with open("eval.jsonl") as log:
            losses.append([e["val_loss"] for e in map(json.loads, log) if e["event"] == "end"])
    assert losses[0] == losses[1] and losses[0], losses


with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    follows()
    renews()
    with_integers()
    goes_on()
    evaluates_in_the_dtype()
sys.exit(0)
