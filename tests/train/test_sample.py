"""`fattn sample`: the text of `fattn train`'s own sample, streams, seeds, prompts of every kind, error messages.
With the argument cuda on a GPU; 77 without one."""
import os
import re
import subprocess
import sys
import tempfile

FATTN = os.path.join(os.environ["FATTN_BUILD"], "bin", "fattn")
SMALL = ["--layers", "1", "--channels", "32", "--heads", "2", "--batch", "8", "--eval-every", "1000"]
CONTEXT = 32
RHYTHM = "déjà vu ".encode()
ON = ["--device", *sys.argv[1:2]] if sys.argv[1:] else []
SKIPPED = 77


def on_device(words):
    """The same command on the device of this run."""
    return [FATTN, *words, *(ON if words[0] in ("train", "sample") else [])]


def fattn(*words, code=0, says="", given=None):
    """Standard output as bytes, and standard error."""
    done = subprocess.run(on_device(words), capture_output=True, timeout=120, input=given)
    said = done.stderr.decode(errors="backslashreplace")
    assert done.returncode == code and says in said, (words, done.returncode, done.stdout, said)
    return done.stdout, said


def sample(*words, **expected):
    return fattn("sample", "--checkpoint", "run", *words, **expected)


def own_sample_of(output):
    begin = output.index(b"sample (temperature")
    return output[output.index(b"\n", begin) + 1:output.index(b"\n\ncheckpoint: ")]


def learn():
    with open("text", "wb") as f:
        f.write(RHYTHM * 6000)
    output, _ = fattn("train", "--task", "text", "--text", "text", *SMALL, "--context", str(CONTEXT), "--steps", "400",
                      "--lr", "3e-3", "--checkpoint", "run", "--sample", "40", "--prompt", "vu d", "--temperature",
                      "2", "--top-k", "9", "--top-p", "0.999", "--seed", "3")
    os.unlink("text") # a sample does not need it
    return own_sample_of(output)


def texts(own):
    # one window, hence the draws of train's sample; the line end is the program's
    same = ["--prompt", "vu d", "--temperature", "2", "--top-k", "9", "--top-p", "0.999", "--seed", "3"]
    assert sample(*same, "--tokens", "40")[0] == own + b"\n", own
    # far beyond the context, greedy: the rhythm, from any prompt
    n = 10 * CONTEXT
    for words in (["--prompt", "déjà"], ["--prompt", "vu déjà vu d" * 9 + "éj"]):
        for more in ([], ["--dtype", "bf16"], ["--threads", "1"]):
            out, said = sample(*words, *more, "--tokens", str(n), "--temperature", "0")
            prompt = words[1].encode()
            assert out.startswith(prompt) and out.endswith(b"\n") and len(out) == len(prompt) + n + 1, out
            assert out[len(prompt):-1] in RHYTHM * 99, out
            used = min(len(prompt), CONTEXT)
            assert re.search(rf"^prompt: {used} tokens, \S+ per second; text: {n} tokens, \S+ per second$", said,
                             re.M), said
            assert (f"the prompt has {len(prompt)} tokens, of which the last 32, the context, count" in said) == (
                len(prompt) > CONTEXT), said
    # seeds
    hot = ["--tokens", "90", "--temperature", "3"]
    assert sample(*hot, "--seed", "1")[0] == sample(*hot)[0] != sample(*hot, "--seed", "2")[0]
    # only the likeliest: greedy
    for alone in (["--top-k", "1"], ["--top-p", "1e-6"]):
        assert sample("--tokens", "50", "--temperature", "9", *alone)[0] == sample(
            "--tokens", "50", "--temperature", "0")[0]
    out, _ = sample("--tokens", "0", "--prompt", "as it is")
    assert out == b"as it is\n", out


def prompts():
    want = sample("--prompt", "déjà v", "--tokens", "9", "--temperature", "0")[0]
    with open("prompt", "wb") as f:
        f.write("déjà v".encode())
    assert sample("--prompt-file", "prompt", "--tokens", "9", "--temperature", "0")[0] == want
    assert sample("--prompt-file", "-", "--tokens", "9", "--temperature", "0", given="déjà v".encode())[0] == want
    out, _ = sample("--prompt-file", "-", "--tokens", "4", given=b"\0\xff\xfe") # bytes that are no text
    assert out.startswith(b"\0\xff\xfe") and len(out) == 8, out
    with open("empty", "wb"):
        pass
    sample("--prompt-file", "empty", code=1, says="empty is empty: a prompt has at least 1 byte")
    sample("--prompt-file", "-", code=1, says="standard input is empty", given=b"")
    sample("--prompt-file", "none", code=1, says="cannot read none: No such file")
    sample("--prompt-file", "run", code=1, says="it is a folder, not a file")
    sample("--prompt", "", code=2, says="--prompt")
    sample("--prompt", "a", "--prompt-file", "prompt", code=2, says="only one of them")


def streams():
    """Characters come one by one, whole, while the program runs; a reader that leaves ends it."""
    endless = ["sample", "--checkpoint", "run", "--tokens", "1000000", "--temperature", "0", "--prompt", "déj"]
    with subprocess.Popen(on_device(endless), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as p:
        for _ in range(30):
            os.read(p.stdout.fileno(), 1 << 16).decode() # fails on half a character
        p.stdout.close()
        said = p.stderr.read().decode()
        assert p.wait(timeout=60) == 1 and "cannot write to standard output: Broken pipe" in said, said
        assert said.count("\n") == 1, said
    with open("/dev/full", "wb") as full:
        done = subprocess.run(on_device(["sample", "--checkpoint", "run", "--tokens", "9"]), stdout=full,
                              stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 1 and b"No space left" in done.stderr, done


def usage():
    fattn("sample", code=2, says="no model given: --checkpoint DIR")
    fattn("sample", "run", code=2, says='unexpected "run"')
    fattn("sample", "--checkpoint", "none", code=1, says="cannot read none: No such file")
    fattn("sample", "--checkpoint", ".", code=1, says=". has no checkpoint")
    fattn("sample", "--checkpoint", "prompt", code=1, says="prompt")
    sample("--tokens", "-1", code=2, says='"-1" is not a whole number, at least 0')
    for p in ("0", "1.01", "nan", "-0.5"):
        sample("--top-p", p, code=2, says=f'--top-p: "{p}" is not a number from 1e-06 to 1')
    sample("--tokenizer", "x", code=2, says="the tokens of run/step-000000400.h5 are bytes")
    fattn("train", "--task", "recall", *SMALL, "--context", "16", "--steps", "1", "--target", "0", "--checkpoint",
          "recall")
    fattn("sample", "--checkpoint", "recall", code=1, says="trained on key-value pairs (--task recall)")
    fattn("train", "--task", "tokens", "--vocab", "9", *SMALL, "--context", "16", "--steps", "1", "--checkpoint",
          "random")
    fattn("sample", "--checkpoint", "random", code=1, says="trained on random tokens (--task tokens)")
    text, _ = fattn("sample", "--help")
    assert b"Temperature, top-k and top-p apply in this order" in text and b"half of the context" in text, text


def tokens():
    """GPT-2 on token files; a character of two bytes is two tokens."""
    with open("text", "wb") as f:
        f.write(RHYTHM * 6000)
    fattn("tokens", "text", "--out", "t")
    output, _ = fattn("train", "--data", "t_train_*.bin", "--val", "t_val_*.bin", "--tokenizer", "t_tokenizer.bin",
                      *SMALL, "--context", "24", "--steps", "300", "--lr", "3e-3", "--checkpoint", "gpt2", "--sample",
                      "20", "--prompt", "vu dé")
    ask = ["sample", "--checkpoint", "gpt2"]
    same = [*ask, "--prompt", "vu dé", "--temperature", "1", "--seed", "42", "--tokens", "18"]
    assert fattn(*same)[0][:-1] == own_sample_of(output)[:-2], output
    out, said = fattn(*ask, "--prompt", "vu dé", "--temperature", "0", "--tokens", "200")
    assert out.startswith("vu dé".encode()) and len(out) >= 207 and "prompt: 7 tokens" in said, (out, said)
    out, said = fattn(*ask, "--tokens", "5")
    assert len(out) >= 6 and "prompt: 1 tokens" in said, (out, said) # the end of the document before
    os.rename("t_tokenizer.bin", "moved.bin")
    fattn(*ask, code=1, says="cannot read t_tokenizer.bin")
    assert fattn(*ask, "--tokens", "5", "--tokenizer", "moved.bin")[0] == out
    fattn(*ask, "--tokenizer", "t_val_000000.bin", code=1, says="offset 0: the first word (a tokenizer's)")
    fattn("train", "--data", "t_train_*.bin", "--val", "t_val_*.bin", "--vocab", "300", *SMALL, "--context", "24",
          "--steps", "1", "--checkpoint", "bare")
    fattn("sample", "--checkpoint", "bare", code=2, says="trained on tokens without a tokenizer: --tokenizer FILE")
    fattn("sample", "--checkpoint", "bare", "--tokenizer", "moved.bin", code=1, says="257 tokens, the model 300")


def main():
    if ON:
        probe = ["train", "--task", "tokens", "--vocab", "9", *SMALL, "--context", "16", "--steps", "1",
                 "--checkpoint", "-"]
        if b"FATTN_E_UNSUPPORTED" in subprocess.run(on_device(probe), capture_output=True, timeout=120).stderr:
            return SKIPPED
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        texts(learn())
        prompts()
        streams()
        usage()
        tokens()
        os.chdir("/")


sys.exit(main())
