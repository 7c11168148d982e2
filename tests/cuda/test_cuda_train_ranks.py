"""fattn train on ranks that are threads, on the GPUs in turn: with --deterministic the same bits as on one rank, also
from a checkpoint; without it losses as close as those of two runs. FATTN_BUILD/bin/fattn; 77 without a device."""
import json
import os
import subprocess
import sys
import tempfile

FATTN = os.path.join(os.environ["FATTN_BUILD"], "bin", "fattn")
GPT2 = ["--task", "tokens", "--arch", "gpt2", "--vocab", "300", "--layers", "2", "--channels", "64", "--heads", "4",
        "--batch", "4", "--context", "64", "--total-batch", "1024", "--schedule", "constant", "--steps", "10",
        "--checkpoint-every", "5", "--eval-every", "5", "--eval-sequences", "20", "--dropout", "0.1",
        "--device", "cuda"]
SKIPPED = 77


def train(name, *options, code=0):
    """The log, without clocks and memory."""
    p = subprocess.run([FATTN, "train", *options, "--checkpoint", name, "--json", name + ".jsonl", "--overwrite"],
                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    assert p.returncode == code, f"{p.args}: exit code {p.returncode}\n{p.stdout}"
    if code:
        return p.stdout
    with open(name + ".jsonl") as lines:
        events = [json.loads(line) for line in lines]
    return [{k: e[k] for k in e if k not in ("elapsed", "tokens_per_second", "peak_bytes", "flops")} for e in events
            if e["event"] in ("step", "eval", "end")]


def same_bits(dtype):
    words = [*GPT2, "--dtype", dtype, "--deterministic"]
    want = train("one", *words)
    for way in (["--ranks", "2"], ["--ranks", "4", "--zero"]):
        have = train("many", *words, *way)
        assert have == want, (dtype, way, have, want)
        train("half", *words, *way, "--steps", "5")
        rest = train("rest", "--resume", "half", "--steps", "10", "--device", "cuda")
        assert [e for e in rest if e["event"] == "step"] == [e for e in want if e["event"] == "step"][5:], (dtype, way)
    return want[0]["val_loss"]


def without_deterministic():
    losses = [[e["loss"] for e in train("loose", *GPT2, *way) if e["event"] == "step"]
              for way in ([], ["--ranks", "2"], ["--ranks", "2", "--zero"])]
    # A run's gradients are sums of 1024 tokens, in any order (test_cuda_train.py).
    bound = 4 * 1024**0.5 * 2.0**-24 * (losses[0][0] + abs(losses[0][0] - losses[0][-1]))
    assert max(abs(a - b) for other in losses[1:] for a, b in zip(losses[0], other)) <= bound, (losses, bound)


def main():
    probe = subprocess.run([FATTN, "train", *GPT2, "--steps", "1", "--checkpoint", "-"], capture_output=True, text=True)
    if probe.returncode:
        print(probe.stderr)
        return SKIPPED
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for dtype in "f32", "bf16", "f16":
            print(dtype, same_bits(dtype))
        without_deterministic()
        one_pass = [word for word in GPT2 if word not in ("--total-batch", "1024")]
        assert "this machine has" in train("none", *one_pass, "--gpus", "1024", code=1)
        os.chdir("/")
    return 0


sys.exit(main())
