"""The log of a run that was killed and resumed has every step once, and no other log is cut."""
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

FATTN = os.path.join(os.environ["FATTN_BUILD"], "bin", "fattn")
STEPS, EVERY = 60, 7
RUN = ["--task", "recall", "--layers", "1", "--channels", "16", "--heads", "2", "--context", "16", "--batch",
       "64", "--checkpoint-every", str(EVERY), "--eval-every", "5", "--target", "0", "--steps", str(STEPS)]


def start(*options):
    return subprocess.Popen([FATTN, "train", *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True, env=dict(os.environ, OMP_NUM_THREADS="1"))


def run(*options, code=0, says=""):
    process = start(*options)
    said = process.communicate(timeout=120)[0]
    assert process.returncode == code and says in said, (options, process.returncode, said)
    return said


def lines(path):
    with open(path) as f:
        return [json.loads(line) for line in f]


def facts(path):
    """The values of steps and evaluations that do not depend on time."""
    return [{k: e[k] for k in ("event", "step", "loss", "lr", "val_loss") if k in e} for e in lines(path)
            if e["event"] in ("step", "eval")]


def content(path):
    with open(path, "rb") as f:
        return f.read()


def steps_of(path):
    return [e["step"] for e in lines(path) if e["event"] == "step"]


def killed_and_resumed(folder):
    calm, log, here = (os.path.join(folder, x) for x in ("calm.jsonl", "log.jsonl", "run"))
    run(*RUN, "--checkpoint", here, "--json", calm)
    want = facts(calm)
    assert steps_of(calm) == list(range(1, STEPS + 1))
    shutil.rmtree(here)
    process = start(*RUN, "--checkpoint", here, "--json", log)
    for at, torn in ((EVERY + 3, b""), (3 * EVERY + 5, b'{"event": "st'), (5 * EVERY + 3, b"\0\0\0")):
        while not os.path.exists(log) or content(log).count(b'"event": "step"') < at:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.001)
        process.kill()
        process.communicate()
        with open(log, "ab") as f:
            f.write(torn)
        process = start("--resume", here, *(["--json", log] if torn else []))
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 0, said
    assert facts(log) == want, [e["step"] for e in facts(log)]
    assert [e["event"] for e in lines(log)].count("resume") >= 1
    # After SIGTERM nothing is cut.
    os.remove(log)
    process = start(*RUN, "--checkpoint", here, "--json", log, "--overwrite")
    while not os.path.exists(log) or content(log).count(b'"event": "step"') < 10:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    before = content(log)
    run("--resume", here)
    assert content(log).startswith(before) and facts(log) == want


def what_is_not_the_runs_stays(folder):
    here, log, other, branch = (os.path.join(folder, x) for x in ("run", "log", "other", "branch"))
    run(*RUN, "--checkpoint", here, "--json", log)
    with open(other, "w") as f:
        f.write('notes\n{"event": "step", "step": 3}\n{"event": "step", "step": 90}\n{"event": "end"}\n')
    older = os.path.join(here, sorted(os.listdir(here))[0])
    before, of_other = content(log), content(other)
    for words in (["--checkpoint", branch], ["--checkpoint", "-"], ["--checkpoint", branch, "--json", other]):
        run("--resume", older, *words, "--steps", str(STEPS + 1), code=1, says="--json")
    run("--resume", here, "--json", other, code=1, says="--json")
    assert content(log) == before and content(other) == of_other
    # Another name, standard output and a device are allowed.
    fresh = os.path.join(folder, "fresh")
    run("--resume", older, "--checkpoint", branch, "--json", fresh)
    assert steps_of(fresh) == list(range(57, STEPS + 1)) and content(log) == before
    run("--resume", older, "--checkpoint", "-", "--json", "-")
    run("--resume", older, "--checkpoint", "-", "--json", "/dev/null")
    said = os.path.join(folder, "said") # a file as standard output, of a shell's >>
    with open(said, "w") as f:
        f.write('{"event": "step", "step": 90}\n')
    with open(said, "a") as f:
        subprocess.run([FATTN, "train", "--resume", older, "--checkpoint", "-", "--json", "-"], stdout=f,
                       stderr=subprocess.DEVNULL, timeout=120, check=True)
    assert steps_of(said) == [90, *range(57, STEPS + 1)], steps_of(said)
    # With --overwrite the log is cut where the run resumes.
    run("--resume", older, "--overwrite")
    assert steps_of(log) == list(range(1, STEPS + 1)), steps_of(log)
    run("--resume", here, "--json", other, "--overwrite", "--steps", str(STEPS + 2))
    assert content(other).startswith(b'notes\n{"event": "step", "step": 3}\n{"event": "resume"')
    # A string that looks like a step is not a step.
    run(*RUN[:-1], "3", "--checkpoint", here, "--overwrite", "--json", log, "--prompt", ', "step": 99')
    before = content(log)
    run("--resume", here, "--steps", "5")
    assert content(log).startswith(before) and steps_of(log) == [1, 2, 3, 4, 5]


def another_run_of_that_name(folder):
    """A log is this run's by its losses: another run may have written one of the same name since, or in another
    working directory."""
    a, b, log = (os.path.join(folder, x) for x in ("a", "b", "log"))
    run(*RUN[:-1], "20", "--checkpoint", a, "--json", log)
    run(*RUN, "--seed", "7", "--checkpoint", b, "--json", log)
    before = content(log)
    for words in ([], ["--json", log]):
        run("--resume", a, "--steps", "30", *words, code=1, says="--json")
    assert content(log) == before
    # One that begins after the step has nothing to compare.
    os.remove(log)
    run("--resume", b, "--steps", str(STEPS + 2))
    before = content(log)
    run("--resume", a, "--steps", "30", code=1, says="--json")
    assert content(log) == before and steps_of(log) == [STEPS + 1, STEPS + 2]
    run("--resume", a, "--steps", "30", "--overwrite")
    assert steps_of(log) == list(range(21, 31)), steps_of(log)
    for place, seed in (("here", "1"), ("there", "7")):
        os.mkdir(os.path.join(folder, place))
        os.chdir(os.path.join(folder, place))
        run(*RUN, "--seed", seed, "--checkpoint", "run", "--json", "log")
    before = content("log")
    first = os.path.join("..", "here", "run", sorted(os.listdir("../here/run"))[0])
    os.remove(os.path.join("..", "here", "run", sorted(os.listdir("../here/run"))[1]))
    run("--resume", first, code=1, says="--json")
    assert content("log") == before
    os.chdir(os.path.join(folder, "here"))
    run("--resume", "run")
    assert steps_of("log") == list(range(1, STEPS + 1))
    os.chdir("/")


def main():
    for test in (killed_and_resumed, what_is_not_the_runs_stays, another_run_of_that_name):
        with tempfile.TemporaryDirectory() as folder:
            test(folder)
            print(test.__name__, "ok")


sys.exit(main())
