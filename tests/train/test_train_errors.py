"""Error messages and exit codes of `fattn train`."""
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile

from checkpoint_seal import change

FATTN = os.path.join(os.environ["FATTN_BUILD"], "bin", "fattn")
TINY = ["--task", "recall", "--layers", "1", "--channels", "16", "--heads", "2", "--context", "16",
        "--batch", "4", "--steps", "4", "--checkpoint-every", "2", "--eval-every", "2",
        "--target", "0"]


def run(*options, code, says="", limit=None):
    def prepare():
        if limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    p = subprocess.run([FATTN, "train", *options], capture_output=True, encoding="utf-8",
                       errors="backslashreplace", timeout=120, preexec_fn=prepare)
    shown = f"{options}\nexit code {p.returncode}\n{p.stdout}{p.stderr}"
    assert p.returncode == code, shown
    assert says in p.stderr, shown
    assert code == 0 or p.stderr.startswith("fattn train: ") or "step" in p.stderr, shown
    return p


def usage(folder):
    off = ["--checkpoint", "-"]
    run(code=2, says="--task recall, text, tokens or shards")
    run("--task", "recall", "--vocab", "50", code=2, says="--vocab needs --task tokens or shards")
    run("--task", "tokens", "--vocab", "1", code=2, says="at least 2")
    run("--preset", "gpt2-124m", "--task", "recall", code=2, says="a --preset needs --task tokens or shards")
    run("--preset", "gpt3", code=2, says="gpt2-124m")
    run("--preset", "gpt2-124m", code=2, says="a preset's bf16 is for a GPU: add --device cuda, or --dtype")
    run(*TINY, *off, "--dtype", "bf16", "--steps", "2", code=0)
    p = run("--preset", "gpt2-124m", "--dtype", "f32", "--layers", "1", "--channels", "16", "--heads", "2",
            "--vocab", "50", "--context", "16", "--batch", "2", "--steps", "2", code=0)
    assert "1 layers, 16 channels" in p.stdout and "random tokens out of 50" in p.stdout, p.stdout
    run(*TINY, *off, "--fp8", "--algorithm", "standard", code=2, says="--fp8 needs --algorithm flash")
    run(*TINY, *off, "--fp8", "--dropout", "0.1", code=2,
        says="--fp8 with --dropout 0.1: attention on 8-bit copies has")
    run(*TINY, *off, "--tf32", "--dtype", "bf16", code=2, says="--tf32 needs --dtype f32")
    run(*TINY, *off, "--fp8-renew", code=2, says="--fp8-renew needs --fp8")
    run(*TINY, *off, "--fp8-int8", code=2, says="--fp8-int8 needs --fp8")
    tokens = ["--task", "tokens", "--vocab", "50", "--layers", "1", "--channels", "16", "--heads", "2", "--context",
              "16", "--batch", "2", "--checkpoint", "-"]
    run("--task", "shards", code=2, says="--data PATTERN")
    run("--data", "x", code=2, says="--val PATTERN")
    run("--task", "recall", "--val", "x", code=2, says="--val needs --task shards")
    run("--data", folder + "/none*", "--val", "x", code=1, says="/none*: there is no such file")
    run(*tokens, "--arch", "gpt2", "--kv-heads", "1", code=2, says="as many --kv-heads as --heads")
    run(*tokens, "--arch", "gpt2", "--mlp", "2", code=2, says="--mlp 4")
    run(*tokens, "--arch", "gpt2", "--positions", "12", code=2, says="--positions 12 is less than --context 16")
    run(*tokens, "--positions", "16", code=2, says="--positions needs --arch gpt2")
    run(*tokens, "--arch", "gpt2", "--channels", "17", code=2, says="--channels 17 is not a multiple of --heads 2")
    run(*tokens, "--total-batch", "48", code=2, says="48 is not a multiple of --batch 2 x --context 16 = 32")
    run(*tokens, "--steps", "0", "--seconds", "1", "--schedule", "wsd", code=2, says="--schedule needs --steps")
    run("--task", "sums", code=2, says="recall|text")
    run("--task", "recall", "--layers", "0", code=2, says="--layers")
    run("--task", "recall", "--layers", "many", code=2, says="--layers")
    run("--task", "recall", "--lr", "nan", code=2, says="--lr")
    run("--task", "recall", "--bananas", code=2, says="--bananas")
    run("--task", "recall", "extra", code=2, says="extra")
    run(*TINY, *off, "--heads", "3", code=2, says="--heads 3")
    run(*TINY, *off, "--heads", "4", "--kv-heads", "3", code=2, says="--kv-heads 3")
    run(*TINY, *off, "--context", "18", code=2, says="--context 18")
    run(*TINY, *off, "--steps", "0", code=2, says="--steps")
    run(*TINY, *off, "--text", "x", code=2, says="--text")
    p = run("--help", code=0)
    assert "--kv-heads" in p.stdout and "-1]" not in p.stdout, p.stdout


def texts(folder):
    missing, short = os.path.join(folder, "missing"), os.path.join(folder, "short")
    with open(short, "w") as f:
        f.write("a few words\n")
    off = ["--task", "text", "--checkpoint", "-"]
    run(*off, "--text", missing, code=1, says="No such file")
    run(*off, "--text", short, code=1, says="too short")
    if os.geteuid() != 0:
        os.chmod(short, 0)
        run(*off, "--text", short, code=1, says="Permission denied")


def spared(path, option, *options):
    """Nothing happens to an input that is named as an output."""
    with open(path, "rb") as f:
        before = f.read()
    run(*options, option, path, code=2, says=f"{option} {path} is the input ")
    with open(path, "rb") as f:
        assert f.read() == before, path


def outputs_spare_texts(folder):
    text, folder_of_texts = os.path.join(folder, "long"), os.path.join(folder, "texts")
    here = os.path.join(folder, "unborn")
    small = ["--task", "text", "--layers", "1", "--channels", "16", "--heads", "2", "--context", "16", "--batch", "2",
             "--steps", "1", "--checkpoint", here]
    os.mkdir(folder_of_texts)
    for path in (text, os.path.join(folder_of_texts, "a.txt"), os.path.join(folder_of_texts, "b.txt")):
        with open(path, "w") as f:
            f.writelines(f"{i} and {i * i}\n" for i in range(300))
    link = os.path.join(folder, "link")
    os.symlink(text, link)
    for option in "--json", "--plot":
        for path in text, link:
            spared(path, option, *small, "--text", text)
        spared(os.path.join(folder_of_texts, "b.txt"), option, *small, "--text", folder_of_texts)
    assert not os.path.exists(here)
    # A file of the folder that is not read.
    run(*small, "--text", folder_of_texts, "--json", os.path.join(folder_of_texts, "log.dat"), code=0)


def full_disks(folder):
    here = os.path.join(folder, "full")
    run(*TINY, "--checkpoint", here, "--json", "/dev/full", code=1, says="/dev/full")
    shutil.rmtree(here, ignore_errors=True)
    p = run(*TINY, "--checkpoint", here, "--plot", "/dev/full", code=1, says="/dev/full")
    assert "loss curve" not in p.stdout, p.stdout
    shutil.rmtree(here, ignore_errors=True)
    with open(FATTN, "rb") as program: # the thread sanitizer writes its own file
        limited = b"__tsan_init" not in program.read()
    if limited:
        said = run(*TINY, "--checkpoint", here, code=1, says="cannot write", limit=1024).stderr
        assert said.count("cannot write") == 1, said
        assert os.listdir(here) == [], os.listdir(here)
    file = os.path.join(folder, "file")
    open(file, "w").close()
    run(*TINY, "--checkpoint", os.path.join(file, "inside"), code=1, says="cannot write")


def checkpoints(folder):
    here, log = os.path.join(folder, "run"), os.path.join(folder, "log", "run.jsonl")
    plot = os.path.join(folder, "curve.svg")
    run(*TINY, "--checkpoint", here, "--json", log, "--plot", plot, code=0)
    names = sorted(os.listdir(here))
    assert names == ["step-000000002.h5", "step-000000004.h5"], names
    with open(log) as f:
        events = [json.loads(line) for line in f]
    assert [e["step"] for e in events if e["event"] == "step"] == [1, 2, 3, 4], events
    assert events[-1]["event"] == "end" and events[-1]["val_targets"] > 0, events[-1]
    with open(plot) as f:
        assert "<svg" in f.read()

    run(*TINY, "--checkpoint", here, code=1, says="--overwrite")
    run("--resume", here, "--layers", "2", code=1, says="--layers")
    run("--resume", here, "--seed", "2", code=1, says="--seed")
    run("--resume", here, "--schedule", "wsd", code=1, says="--schedule")
    run("--resume", here, "--arch", "gpt2", code=1, says="--arch")
    run("--resume", here, "--preset", "gpt2-124m", code=2, says="--preset needs a new run")
    run("--resume", here, "--steps", "6", code=0)
    names = sorted(os.listdir(here))
    assert names == ["step-000000004.h5", "step-000000006.h5"], names
    run(*TINY, "--checkpoint", here, "--overwrite", code=0)
    assert sorted(os.listdir(here)) == ["step-000000002.h5", "step-000000004.h5"]

    # No output is a file of the resumed run.
    for option in "--json", "--plot":
        for file in sorted(os.listdir(here)):
            spared(os.path.join(here, file), option, "--resume", here, "--steps", "8")

    # Counters that are out of range.
    for name, value, says in (("adam_step", 2**63 - 1, "9223372036854775807 is not in 0.."),
                              ("adam_step", 2**53 + 1, "9007199254740993 is not in 0.."),
                              ("adam_step", -1, "-1 is not in 0.."),
                              ("step", 2**63 - 1, "state of a run")):
        spoilt = os.path.join(folder, "spoilt")
        shutil.copytree(here, spoilt)
        for file in os.listdir(spoilt):
            change(os.path.join(spoilt, file), lambda f: f["state"].attrs.modify(name, value))
        run("--resume", spoilt, "--steps", "6", code=1, says=says)
        shutil.rmtree(spoilt)

    # A checkpoint of a version without GPT-2 goes on as it did; one without a task was never written.
    old = os.path.join(folder, "old")
    shutil.copytree(here, old)
    for file in os.listdir(old):
        change(os.path.join(old, file), lambda f: [f["config"].attrs.__delitem__(name) for name in
                                                  ("arch", "schedule", "final-lr", "beta2", "total-batch", "positions",
                                                   "examples")])
    logs = [os.path.join(folder, name) for name in ("old.jsonl", "new.jsonl")]
    shutil.copytree(here, here + "-new")
    run("--resume", old, "--steps", "6", "--json", logs[0], code=0)
    run("--resume", here + "-new", "--steps", "6", "--json", logs[1], code=0)
    losses = []
    for log_of in logs:
        with open(log_of) as f:
            losses.append([e["loss"] for e in map(json.loads, f) if e["event"] == "step"])
    assert losses[0] == losses[1] and len(losses[0]) == 2, losses
    for file in os.listdir(old):
        change(os.path.join(old, file), lambda f: f["config"].attrs.__delitem__("task"))
    run("--resume", old, code=1, says="it has no task")

    run("--resume", os.path.join(folder, "nowhere"), code=1, says="No such file")
    run("--resume", folder, code=1, says="no checkpoint")
    run("--resume", log, code=1, says="not a checkpoint of fattn")
    for name in os.listdir(here):
        os.truncate(os.path.join(here, name), 3000)
    run("--resume", here, code=1, says="is truncated")

    # A text that has changed since.
    text = os.path.join(folder, "text")
    lines = [f"{i} and {i * i}\n" for i in range(3000)]
    with open(text, "w") as f:
        f.writelines(lines)
    small = ["--task", "text", "--layers", "1", "--channels", "16", "--heads", "2", "--context",
             "32", "--batch", "2", "--steps", "2", "--sample", "8"]
    other = os.path.join(folder, "other")
    p = run(*small, "--text", text, "--checkpoint", other, code=0)
    assert "6-gram" in p.stdout and "sample" in p.stdout, p.stdout
    with open(text, "w") as f:
        f.writelines(lines[1:])
    run("--resume", other, code=1, says="trained on other data")


def main():
    with tempfile.TemporaryDirectory() as folder:
        for test in (usage, texts, outputs_spare_texts, full_disks, checkpoints):
            test(folder)
            print(test.__name__, "ok")


sys.exit(main())
