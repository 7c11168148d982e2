"""Only one run at a time uses a folder of checkpoints, and nothing in it is removed without --overwrite."""
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

FATTN = os.path.join(os.environ["FATTN_BUILD"], "bin", "fattn")
TINY = ["--task", "recall", "--layers", "1", "--channels", "16", "--heads", "2", "--context", "16",
        "--batch", "4", "--checkpoint-every", "2", "--eval-every", "1000000", "--eval-sequences", "4",
        "--target", "0"]
ENDLESS = [*TINY, "--steps", "0", "--seconds", "600"]


def start(*options):
    return subprocess.Popen([FATTN, "train", *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            encoding="utf-8", errors="backslashreplace",
                            env=dict(os.environ, OMP_NUM_THREADS="1"))


def finish(process, code=0, says=""):
    output = process.communicate(timeout=120)[0]
    assert process.returncode == code and says in output, (process.args, process.returncode, output)
    return output


def run(*options, code=0, says=""):
    return finish(start(*options), code, says)


def state(folder):
    """Names and contents."""
    found = {}
    for name in sorted(os.listdir(folder)):
        with open(os.path.join(folder, name), "rb") as f:
            found[name] = f.read()
    return found


def wait_for_checkpoint(process, folder):
    while not [n for n in (os.listdir(folder) if os.path.isdir(folder) else []) if n.startswith("step-")]:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.005)


def later_checkpoints_stay(folder):
    here, other, fresh = (os.path.join(folder, x) for x in ("run", "other", "fresh"))
    run(*TINY, "--steps", "8", "--checkpoint", here)
    run(*TINY, "--steps", "2", "--checkpoint", other)
    before, of_other = state(here), state(other)
    assert list(before) == ["step-000000006.h5", "step-000000008.h5"], list(before)
    older = os.path.join(here, "step-000000006.h5")
    for words in (["--steps", "10"], ["--steps", "7"], ["--checkpoint", here + "/../run"]):
        run("--resume", older, *words, code=1, says="step-000000008.h5")
        assert state(here) == before
    # In another folder: checkpoints of this run and of another run are kept.
    run("--resume", older, "--steps", "10", "--checkpoint", other, code=1, says="step-000000002.h5")
    run("--resume", here, "--steps", "10", "--checkpoint", other, code=1, says="--overwrite")
    assert state(other) == of_other
    run("--resume", older, "--steps", "10", "--checkpoint", fresh)
    assert state(here) == before and list(state(fresh)) == ["step-000000008.h5", "step-000000010.h5"]
    # A link to the folder is the folder; a file may have any name.
    os.symlink("run", os.path.join(folder, "link"))
    run("--resume", os.path.join(folder, "link", "step-000000006.h5"), code=1, says="step-000000008.h5")
    shutil.copy(older, os.path.join(here, "best.h5"))
    run("--resume", os.path.join(here, "best.h5"), "--steps", "10", code=1, says="step-000000008.h5")
    os.remove(os.path.join(here, "best.h5"))
    # With --overwrite, but only after all other checks.
    run("--resume", older, "--steps", "9", "--overwrite", "--json", "/proc/none/log", code=1)
    run(*TINY, "--overwrite", "--checkpoint", here, "--json", "/proc/none/log", code=1)
    run("--task", "text", "--text", "/nonexistent", "--overwrite", "--checkpoint", here, code=1)
    assert state(here) == before
    run("--resume", older, "--steps", "7", "--overwrite")
    assert list(state(here)) == ["step-000000006.h5", "step-000000007.h5"], list(state(here))
    run("--resume", here, "--steps", "12")
    assert list(state(here)) == ["step-000000010.h5", "step-000000012.h5"], list(state(here))


def two_runs_do_not_share(folder):
    here = os.path.join(folder, "run")
    os.symlink("run", os.path.join(folder, "link"))
    first = start(*ENDLESS, "--checkpoint", here)
    wait_for_checkpoint(first, here)
    for words in ([*TINY, "--checkpoint", here], [*TINY, "--checkpoint", here, "--overwrite"],
                  [*TINY, "--checkpoint", os.path.join(folder, "link"), "--overwrite"],
                  ["--resume", here], ["--resume", here, "--overwrite"]):
        for attempt in range(2): # the second finds the files of the first
            said = run(*words, "--steps", "4", code=1, says=here if "link" not in words[-2] else "link")
            assert f"process {first.pid}" in said, said
    # Its checkpoints can be read at any time.
    for attempt in range(10):
        run("--resume", here, "--seconds", "0.001", "--checkpoint", os.path.join(folder, f"copy{attempt}"))
    # A killed run, and the files it leaves, do not block the next one.
    for name in ("unfinished.tmp", "unfinished-123-0.tmp"):
        with open(os.path.join(here, name), "w") as f:
            f.write("half")
    first.kill()
    first.communicate()
    second = start("--resume", here)
    time.sleep(0.3)
    second.send_signal(signal.SIGTERM)
    finish(second, 130)
    names = os.listdir(here)
    assert len(names) == 2 and all(n.startswith("step-") for n in names), names


def one_of_two_wins(folder):
    """Two runs started at the same time, also while the lock's file is being removed."""
    here = os.path.join(folder, "run")
    for attempt in range(6):
        runs = [start(*TINY, "--steps", "100", "--overwrite", "--checkpoint", here) for _ in range(3)]
        said = [(p.communicate(timeout=120)[0], p.returncode) for p in runs]
        for text, code in said:
            assert code == 0 or (code == 1 and "another run" in text and here in text), text
        assert 0 in [code for _, code in said], said
        assert sorted(os.listdir(here)) == ["step-000000098.h5", "step-000000100.h5"], os.listdir(here)


def links_are_not_followed(folder):
    here, victim = os.path.join(folder, "run"), os.path.join(folder, "victim")
    with open(victim, "w") as f:
        f.write("precious")
    os.mkdir(here)
    os.symlink(victim, os.path.join(here, "unfinished.tmp"))
    os.symlink(victim, os.path.join(here, "step-000000002.h5.tmp"))
    run(*TINY, "--steps", "2", "--checkpoint", here)
    os.symlink(victim, os.path.join(here, "running.lock"))
    run(*TINY, "--steps", "2", "--checkpoint", here, "--overwrite", code=1, says="cannot write")
    with open(victim) as f:
        assert f.read() == "precious"


def a_folder_that_goes_away(folder):
    """A folder removed during a run is created again; if its name is a file's, the run ends with an error message."""
    here, moved = os.path.join(folder, "run"), os.path.join(folder, "moved")
    process = start(*ENDLESS, "--checkpoint", here)
    for _ in range(3):
        wait_for_checkpoint(process, here)
        os.rename(here, moved) # rmtree would fail on files that are created meanwhile
        shutil.rmtree(moved)
    wait_for_checkpoint(process, here)
    run(*TINY, "--checkpoint", here, "--overwrite", code=1, says=f"process {process.pid}")
    process.send_signal(signal.SIGSTOP) # otherwise it creates the folder again first
    os.rename(here, moved)
    open(here, "w").close()
    process.send_signal(signal.SIGCONT)
    said = finish(process, 1, "cannot write")
    assert said.count("cannot write") == 1, said


def folders_that_cannot_be_written(folder):
    file = os.path.join(folder, "file")
    open(file, "w").close()
    for path in ("/proc/fattn", "/sys/kernel", "/dev/null", os.path.join(file, "in"), "/proc/self/fd",
                 os.path.join(folder, "x" * 300), os.path.join(folder, *["d" * 200] * 30)):
        started = time.monotonic()
        run(*ENDLESS, "--checkpoint", path, code=1, says="cannot write")
        assert time.monotonic() - started < 10


def texts_of_any_length_are_saved(folder):
    """Option values are stored in the checkpoint completely, or the run does not start."""
    here, text = os.path.join(folder, "run"), os.path.join(folder, "text")
    with open(text, "w") as f:
        f.writelines(f"{i} and {i * i}\n" for i in range(3000))
    words = ["--task", "text", *TINY[2:-2], "--steps", "2", "--sample", "2", "--text", text]
    for length in (1, 4095, 4096, 4097, 70000, 131000):
        prompt = ("é" * (length // 2) + "x" * (length % 2))
        run(*words, "--prompt", prompt, "--checkpoint", here, "--overwrite")
        said = run("--resume", here, "--steps", "3")
        assert prompt + "\n" not in said and prompt in said, (length, said[-300:])


def main():
    for test in (later_checkpoints_stay, two_runs_do_not_share, one_of_two_wins, links_are_not_followed,
                 texts_of_any_length_are_saved,
                 a_folder_that_goes_away, folders_that_cannot_be_written):
        with tempfile.TemporaryDirectory() as folder:
            test(folder)
            print(test.__name__, "ok")


sys.exit(main())
