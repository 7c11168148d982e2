"""Evaluations, and how `fattn train` ends: batches too large to count answers, weights that are no numbers, nothing to
save, a signal after the last step, an error message on a terminal."""
import json
import os
import pty
import signal
import subprocess
import sys
import tempfile

FATTN = os.path.join(os.environ["FATTN_BUILD"], "bin", "fattn")
SMALL = ["--layers", "1", "--channels", "16", "--heads", "2", "--threads", "1"]
TEXT = ["--task", "text", "--text", "text", *SMALL, "--context", "32", "--batch", "4", "--schedule", "constant"]


def run(*options, code=0, says=""):
    p = subprocess.run([FATTN, *options], capture_output=True, text=True, errors="backslashreplace", timeout=300)
    shown = f"{options}\nexit code {p.returncode}\n{p.stdout}{p.stderr}"
    assert p.returncode == code and says in p.stdout + p.stderr, shown
    return p


def evaluation(*options):
    run("train", *options, "--checkpoint", "-", "--json", "log")
    with open("log") as f:
        return next(e for e in map(json.loads, f) if e["event"] == "eval")


def large_batches():
    """The loss of a batch of more than 2^26 logits is that of its targets; which are right is not known."""
    recall = ["--task", "recall", *SMALL, "--channels", "4", "--context", "512", "--steps", "1",
              "--eval-sequences", "3", "--target", "0"]
    large, small = (evaluation(*recall, "--batch", n) for n in ("260", "4"))
    assert large["val_targets"] == small["val_targets"] > 0, (large, small)
    assert abs(large["val_loss"] - small["val_loss"]) < 1e-5 * small["val_loss"], (large, small)
    assert large["val_accuracy"] is None and small["val_accuracy"] is not None, (large, small)
    run("train", *recall[:-2], "--batch", "260", code=2,
        says="--target: of batches of 260 x 512 tokens with 512 symbols right answers are not counted; --batch 256 ")
    run("train", "--task", "tokens", "--vocab", "1048576", *SMALL, "--channels", "4", "--context", "128", "--batch",
        "1", "--steps", "1", "--target", "0.5", "--checkpoint", "-", code=2, says="; no batch would be counted")


def no_numbers():
    """The last step's weights give no loss, those before it did."""
    grows = ["train", *TEXT, "--arch", "gpt2", "--dtype", "bf16", "--lr", "10", "--weight-decay", "10", "--clip", "0",
             "--sample", "0", "--checkpoint", "-"]
    said = run(*grows, "--steps", "1000", code=1, says="the loss of step ").stderr
    last = int(said.split("the loss of step ")[1].split()[0]) - 1
    run(*grows, "--steps", str(last), code=1, says=f"the loss on held-out data after step {last} is ")


def nothing_to_save():
    """A run that fails before its first step leaves no checkpoint, and its folder is free."""
    assert run("tokens", "text", "--out", "t").returncode == 0
    shards = ["train", "--data", "t_train_*.bin", "--val", "t_val_*.bin", *SMALL, "--context", "32", "--batch", "4",
              "--steps", "1", "--checkpoint", "run"]
    run(*shards, "--vocab", "110", code=1, says="the vocabulary has 0..109")
    assert os.listdir("run") == [], os.listdir("run")
    run(*shards, "--vocab", "257")


def interrupted_summary():
    """The checkpoint is there: a signal ends the program."""
    p = subprocess.Popen([FATTN, "train", *TEXT, "--steps", "1", "--sample", "60000", "--checkpoint", "whole"],
                         stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    said = b""
    while b"sample (" not in said:
        said += os.read(p.stdout.fileno(), 1000)
    p.send_signal(signal.SIGINT)
    p.communicate(timeout=60)
    assert p.returncode == -signal.SIGINT and "step-000000001.h5" in os.listdir("whole"), p.returncode


def on_a_terminal():
    """A message does not stand behind the bar."""
    ours, theirs = pty.openpty()
    p = subprocess.Popen([FATTN, "train", *TEXT, "--dtype", "f16", "--loss-scale", "8e37", "--steps", "100", "--sample",
                          "0", "--checkpoint", "-"], stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    said = b""
    try:
        while part := os.read(ours, 1000):
            said += part
    except OSError: # the other end is closed
        pass
    assert p.wait(60) == 1 and b"step " in said and b"\r\nfattn train: " in said, said[-500:]


def options():
    run("train", "--task", "recall", *SMALL, "--sample", "5", code=2, says="--sample 5 needs --task text or shards")
    run("train", "--task", "recall", *SMALL, "--channels", "514", "--heads", "1", code=2,
        says="--channels 514 --heads 1: channels/heads are 514, 256 are possible")
    said = run("train", *TEXT, "--tf32", "--steps", "3", "--sample", "0", "--checkpoint", "tf").stdout
    assert "tokens:" not in said or "no speed before step 6" in said, said
    run("train", "--resume", "tf", "--dtype", "bf16", "--steps", "4", "--sample", "0", "--checkpoint", "-")
    run("sample", "--checkpoint", "tf", "--dtype", "bf16", "--prompt", "a", "--tokens", "3")
    run("train", "--resume", "tf", "--ranks", "3", "--checkpoint", "-", code=2,
        says="1 passes of --batch 4 x --context 32, which 3 ranks cannot divide: --ranks 1 can")


def main():
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        with open("text", "w") as f:
            f.writelines(f"line {i}: {i * i} is the square of {i}\n" for i in range(300))
        for test in (large_batches, no_numbers, nothing_to_save, interrupted_summary, on_a_terminal, options):
            test()
            print(test.__name__, "ok", flush=True)
        os.chdir("/")


sys.exit(main())
