"""Texts are bytes: they are learned and sampled in any encoding, prompts and samples are exact,
any text that is long enough works, and an old checkpoint is reported as such."""
import os
import re
import subprocess
import sys
import tempfile

from checkpoint_seal import change

FATTN = os.path.join(os.environ["FATTN_BUILD"], "bin", "fattn")
TINY = ["--task", "text", "--layers", "1", "--channels", "16", "--heads", "2", "--context", "16",
        "--batch", "8", "--eval-every", "1000"]


def train(*options, code=0):
    done = subprocess.run([FATTN, "train", *options], capture_output=True, timeout=120)
    assert done.returncode == code, (options, done.returncode, done.stdout, done.stderr)
    return done.stdout if code == 0 else done.stderr.decode()


def sample_of(output):
    """Between its heading and the two line ends behind it, then the next line of the summary or the end."""
    begin = output.index(b"sample (temperature")
    rest = output[output.index(b"\n", begin) + 1:]
    return re.sub(rb"\n\n(checkpoint: [^\n]*\n)?$", b"", rest)


def write(path, content):
    with open(path, "wb") as f:
        f.write(content)
    return path


def encodings_come_back(folder):
    """A memorised periodic text: greedy sampling gives the text's bytes."""
    for encoding in ("utf-8", "latin-1", "utf-16-le"):
        rhythm = "déjà vu ".encode(encoding)
        text = write(os.path.join(folder, "text"), rhythm * 6000)
        output = train(*TINY, "--text", text, "--checkpoint", "-", "--context", "32", "--channels", "32",
                       "--steps", "400", "--lr", "3e-3", "--temperature", "0", "--sample", "80",
                       "--prompt", "déjà vu d" if encoding == "utf-8" else "d")
        said = sample_of(output)
        if encoding == "utf-8":
            assert said == (rhythm * 12)[:11 + 80], (encoding, said)
        else:
            assert len(said) == 81 and said[40:] in rhythm * 20, (encoding, said)


def prompts_count_whole(folder):
    text = write(os.path.join(folder, "text"), bytes(range(1, 256)) * 200)
    for prompt in ("é".encode(), "日本".encode(), b"\xff\xfe", b"\t", b"\x01", b"plain"):
        output = train(*TINY, "--text", text, "--checkpoint", "-", "--steps", "1", "--prompt", prompt,
                       "--sample", "1")
        said = sample_of(output)
        assert said[:-1] == prompt and len(said) == len(prompt) + 1, (prompt, said)


def any_text_that_is_long_enough(folder):
    """Forty texts of a few kB; one line repeated; the whole text one record."""
    texts = [b"".join(b"%d: %x\n" % (seed, (seed + 40 * i) * 2654435761 % 2**32) for i in range(200))
             for seed in range(40)]
    texts += [b"the same line\n" * 400, b"a" * 3000, b"one record " * 300 + b"\n%\n", b"%\n" * 2000]
    for content in texts:
        train(*TINY, "--text", write(os.path.join(folder, "text"), content), "--checkpoint", "-", "--steps",
              "1", "--sample", "0")
    short = write(os.path.join(folder, "short"), b"0123456789" * 3)
    says = train(*TINY, "--text", short, "--checkpoint", "-", "--steps", "1", code=1)
    assert "has 30 bytes" in says and "--context 16 needs 35" in says, says
    train(*TINY, "--text", write(short, b"0123456789" * 3 + b"01234"), "--checkpoint", "-", "--steps", "1",
          "--sample", "0")


def old_checkpoints_say_so(folder):
    text = write(os.path.join(folder, "text"), b"some words, 3 or 4\n" * 3000)
    here = os.path.join(folder, "run")
    train(*TINY, "--text", text, "--checkpoint", here, "--steps", "1", "--sample", "0")

    def keep_96_symbols(f):
        for name in ("params/embedding", "adam/m/embedding", "adam/v/embedding"):
            numbers = f[name][:96]
            del f[name]
            f.create_dataset(name, data=numbers)
    change(os.path.join(here, "step-000000001.h5"), keep_96_symbols)
    says = train("--resume", here, code=1)
    assert "96 symbols" in says and "256" in says and "another version" in says, says


def main():
    with tempfile.TemporaryDirectory() as folder:
        for test in (encodings_come_back, prompts_count_whole, any_text_that_is_long_enough,
                     old_checkpoints_say_so):
            test(folder)
            print(test.__name__, "ok")


sys.exit(main())
