"""Files that commands write: - is standard output, and only that; unwritable files are reported before the work."""
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree

FATTN = os.path.join(os.environ["FATTN_BUILD"], "bin", "fattn")
RECALL = ["train", "--task", "recall", "--layers", "1", "--channels", "16", "--heads", "2", "--context", "16",
          "--batch", "4", "--eval-every", "2", "--target", "0", "--checkpoint", "-"]
QUICK = {"train": [*RECALL, "--steps", "4"],
         "check": ["check", "attention/one_key", "attention/one_row"],
         "memory": ["memory", "--n", "32", "--layers", "0"],
         "bench": ["bench", "--n", "16", "--heads", "1", "--repeat", "1", "--algorithm", "auto"]}
# Runs that would take minutes if they were started.
LONG = {"train": [*RECALL, "--steps", "0", "--seconds", "600"], "check": ["check"],
        "memory": ["memory", "--n", "16,128,1024,8192", "--layers", "8"],
        "bench": ["bench", "--n", "128,65536"]}
PLOTS = ("train", "memory")


def run(*words, code=0, **more):
    done = subprocess.run([FATTN, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          timeout=60, env=dict(os.environ, OMP_NUM_THREADS="1"), **more)
    assert done.returncode == code, (words, done)
    return done


def dash_is_standard_output():
    for command, words in QUICK.items():
        log = f"{command}.jsonl"
        plain = run(*words, "--json", log)
        with open(log) as f:
            want = [list(json.loads(line)) for line in f]
        done = run(*words, "--json", "-")
        assert [list(json.loads(line)) for line in done.stdout.splitlines()] == want and want, (command, done)
        heading = plain.stdout.splitlines()[0]
        assert heading in done.stderr, (heading, done.stderr)
        text = run(command, "--help").stdout
        assert text.count("standard output") == (3 if command == "train" else 1 + (command in PLOTS)), text
        if command in PLOTS:
            done = run(*words, "--plot", "-")
            assert xml.etree.ElementTree.fromstring(done.stdout).tag.endswith("svg"), done
            for said in ("curve: -", "picture: -", "log: -"):
                assert said not in done.stderr, done
            for path in ("-", "both"):
                done = run(*words, "--plot", path, "--json", path, code=2)
                assert f"both {path}" in done.stderr and done.stdout == "", done
    assert "-" not in os.listdir(".")
    # No reader, or a full disk: a failure whose error message names it.
    for command, words in QUICK.items():
        with open("/dev/full", "w") as full:
            done = subprocess.run([FATTN, *words, "--json", "-"], stdout=full, stderr=subprocess.PIPE)
            text = subprocess.run([FATTN, *words], stdout=full, stderr=subprocess.PIPE)
        assert done.returncode == 1 and b"cannot write standard output: No space left" in done.stderr, done
        assert text.returncode == 1 and b"cannot write to standard output: No space left" in text.stderr, text


def other_names_of_standard_output():
    """Text and JSON at places of their own would overwrite one another."""
    for command, words in QUICK.items():
        with open(f"{command}.jsonl") as f:
            want = [list(json.loads(line)) for line in f]
        for path in ("/dev/stdout", "both.txt"):
            with open("both.txt", "w") as f:
                done = subprocess.run([FATTN, *words, "--json", path], stdout=f, stderr=subprocess.PIPE, text=True,
                                      timeout=60)
            with open("both.txt") as f:
                assert [list(json.loads(line)) for line in f] == want and done.returncode == 0, (command, path, done)
            assert f"log: {path}" not in done.stderr, done
        done = run(*words, "--json", "/dev/stdout")
        assert [list(json.loads(line)) for line in done.stdout.splitlines()] == want, (command, done)
    for command in PLOTS:
        for log, plot in (("-", "/dev/stdout"), ("/dev/stdout", "-"), ("/dev/stdout", "/dev/stdout")):
            run(*QUICK[command], "--json", log, "--plot", plot, code=2)
        done = run(*QUICK[command], "--plot", "/dev/stdout")
        assert xml.etree.ElementTree.fromstring(done.stdout).tag.endswith("svg"), done


def unwritable_is_known_before():
    open("file", "w").close()
    os.mkdir("folder")
    bad = ["/proc/none/x", "file/x", "folder", "x" * 300, "d/" * 3000 + "x", "/sys/x", "."]
    for command, words in LONG.items():
        for option in ("--json", "--plot") if command in PLOTS else ("--json",):
            for path in bad + ["/dev/full"] * (option == "--json"):
                began = time.monotonic()
                done = run(*words, option, path, code=1)
                assert time.monotonic() - began < 20, (words, path)
                assert done.stderr.count(f"cannot write {path}: ") == 1, done
                assert "curve:" not in done.stdout and "log:" not in done.stdout, done


def what_was_there_stays():
    """An existing file is kept until there is something to replace it with."""
    with open("old.svg", "w") as f:
        f.write("<old/>")
    os.symlink("new.svg", "dangling")
    run(*QUICK["train"], "--plot", "old.svg", "--json", "/proc/none/x", code=1)
    run(*QUICK["memory"], "--plot", "old.svg", "--json", "/proc/none/x", code=1)
    run(*QUICK["train"], "--plot", "made/new.svg", "--json", "/proc/none/x", code=1)
    assert not os.path.exists("made/new.svg")
    with open("old.svg") as f:
        assert f.read() == "<old/>"
    for command in PLOTS:
        for path in ("old.svg", "dangling"):
            run(*QUICK[command], "--plot", path)
            xml.etree.ElementTree.parse(path)


def a_log_stays_until_its_first_line():
    """Commands that fail before it, or have nothing to log."""
    for words in (["check", "nosuch"], ["check", "--list"], ["bench", "cake"],
                  ["bench", "--device", "cuda", "--n", "64", "--d", "64", "--repeat", "1"]):
        with open("res.json", "w") as f:
            f.write('{"old": 1}\n')
        done = subprocess.run([FATTN, *words, "--json", "res.json"], capture_output=True, text=True, timeout=60)
        with open("res.json") as f:
            kept = f.read() == '{"old": 1}\n'
        assert kept or (words[0] == "bench" and done.returncode == 0), (words, done) # a GPU
    run(*QUICK["check"], "--json", "res.json")
    with open("res.json") as f:
        assert "old" not in f.read()


def one_file_by_two_names():
    """Of which neither is there yet, in a folder that is not, either; nothing is made of them."""
    os.mkdir("real")
    os.symlink("real", "link")
    for command in PLOTS:
        for log, plot in (("one.log", "./one.log"), (f"real/{command}/one", f"link/{command}/one")):
            done = run(*QUICK[command], "--json", log, "--plot", plot, code=2)
            assert f"both {log}" in done.stderr and not os.path.exists(log), done
        run(*QUICK[command], "--json", f"real/{command}/one", "--plot", f"link/{command}/two")
        run(*QUICK[command], "--json", "/dev/null", "--plot", "/dev/null") # a device is no file


def what_standard_output_holds_stays():
    """A shell's >>, also to a plot or a log."""
    for option in ("--plot", "--json"):
        with open("appended", "w") as f:
            f.write("before\n")
        with open("appended", "a") as f:
            assert subprocess.run([FATTN, *QUICK["memory"], option, "-"], stdout=f,
                                  stderr=subprocess.DEVNULL).returncode == 0
        with open("appended") as f:
            assert f.read().startswith("before\n" + ("<" if option == "--plot" else "{")), option


def a_plot_that_failed_is_not_named():
    done = run(*QUICK["train"], "--plot", "/dev/full", "--json", "kept.jsonl", code=1)
    assert done.stderr.count("cannot write /dev/full") == 1, done
    assert "loss curve" not in done.stdout and "log: kept.jsonl" in done.stdout, done
    assert "picture" not in run(*QUICK["memory"], "--plot", "/dev/full", code=1).stdout


def a_limit_on_sizes_is_a_full_disk():
    """With the default action of the signal, as in a shell."""
    with open(FATTN, "rb") as program: # the thread sanitizer and LLVM's OpenMP write files of their own
        code = program.read()
    if b"__tsan_init" in code or b"libomp.so" in code:
        return
    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    for command, words in QUICK.items():
        done = run(*words, "--json", "limited", code=1, preexec_fn=limit)
        assert "cannot write limited: File too large" in done.stderr, done


def closed_streams_are_not_files():
    """A shell's >&- : no file gets the stream's number and what is printed."""
    def close():
        os.close(1)
        os.close(2)
    for command, words in QUICK.items():
        done = subprocess.run([FATTN, *words, "--json", "closed"], preexec_fn=close)
        assert done.returncode == 1, (command, done)
        with open("closed") as f:
            assert [json.loads(line) for line in f], command
        done = subprocess.run([FATTN, *words, "--json", "-"], preexec_fn=lambda: os.close(1), stderr=subprocess.PIPE)
        assert done.returncode == 1 and b"cannot write standard output: Bad file descriptor" in done.stderr, done


def main():
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for test in (dash_is_standard_output, other_names_of_standard_output, unwritable_is_known_before,
                     what_was_there_stays, a_log_stays_until_its_first_line, one_file_by_two_names,
                     what_standard_output_holds_stays, a_plot_that_failed_is_not_named,
                     a_limit_on_sizes_is_a_full_disk, closed_streams_are_not_files):
            test()
            print(test.__name__, "ok")
        os.chdir("/")


sys.exit(main())
