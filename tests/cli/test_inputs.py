"""Anything but a regular file is rejected at once as an input: the program never waits for a pipe."""
import os
import socket
import subprocess
import sys
import tempfile

FATTN = os.path.join(os.environ["FATTN_BUILD"], "bin", "fattn")


def rejected(*words, says):
    done = subprocess.run([FATTN, *words], capture_output=True, text=True, timeout=20)
    assert done.returncode == 1 and says in done.stderr and done.stderr.count("\n") == 1, (words, done)


def main():
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.mkfifo("pipe")
        os.mkdir("steps")
        os.mkfifo("steps/step-000000004.h5")
        os.mkdir("fixtures")
        os.mkfifo("fixtures/a.h5")
        os.symlink("pipe", "link")
        with socket.socket(socket.AF_UNIX) as s:
            s.bind("socket")
            kinds = {"pipe": "a pipe", "link": "a pipe", "socket": "a socket", "/dev/zero": "a device",
                     "/dev/null": "a device"}
            for path, kind in kinds.items():
                says = f"cannot read {path}: it is {kind}, not a file"
                rejected("train", "--resume", path, says=says)
                rejected("train", "--task", "text", "--text", path, "--checkpoint", "-", says=says)
                rejected("check", "--list", "attention/plain", "--fixtures", path, says=path)
            rejected("train", "--resume", "steps", says="step-000000004.h5: it is a pipe, not a file")
            done = subprocess.run([FATTN, "check", "--list", "--fixtures", "fixtures"], timeout=20,
                                  capture_output=True, text=True)
            assert done.returncode == 1 and "fixtures/a.h5" in done.stderr, done
        os.chdir("/")


sys.exit(main())
