"""`fattn eval` and HellaSwag: losses and answers against fp64, examples of every length, damaged files; the same
examples during a training."""
import json
import os
import struct
import subprocess
import sys
import tempfile

import numpy as np

sys.dont_write_bytecode = True # the sources may be read-only
import gpt2_reference as reference
import test_gpt2_parity as parity
from test_gpt2_parity import C, F32, L, NH, POSITIONS, V, VP

FATTN = os.path.join(os.environ["FATTN_BUILD"], "bin", "fattn")
EXAMPLES = 30


def fattn(*words, code=0, says=""):
    done = subprocess.run([FATTN, *words], capture_output=True, encoding="utf-8", errors="backslashreplace",
                          timeout=120)
    shown = f"{words}\nexit code {done.returncode}\n{done.stdout}{done.stderr}"
    assert done.returncode == code, shown
    assert says in done.stdout + done.stderr, (says, shown)
    return done.stdout


def write_examples(path, examples):
    header, words, longest = np.zeros(256, np.int32), [], 0
    for i, (label, context, endings) in enumerate(examples):
        row = [65535, 0, i, label, len(endings), len(context), *context]
        for e in endings:
            row += [len(e), *e]
        row[1] = 2 * len(row)
        longest = max(longest, row[1])
        words += row
    header[:4] = 20240522, 1, len(examples), longest
    with open(path, "wb") as f:
        f.write(header.tobytes() + np.array(words, np.uint16).tobytes())


def answer(p, context, endings):
    """The ending of least mean loss, and how much the second is worse."""
    losses = []
    for e in endings:
        row = np.array([*context, *e])
        logits, _, _ = reference.loss_and_gradients(p, row[None, :-1], row[None, 1:], V, L, NH)
        tail = logits[0, len(context) - 1:]
        top = tail.max(-1)
        lse = top + np.log(np.exp(tail - top[:, None]).sum(-1))
        losses.append((lse - tail[np.arange(len(e)), e]).mean())
    first, second = sorted(losses)[:2]
    return losses.index(first), second - first


def examples_of(p, rng):
    """Labels are the model's own answers for the first half, another for the rest."""
    found = []
    while len(found) < EXAMPLES:
        n = rng.randint(1, POSITIONS)
        context = list(rng.randint(0, V, n))
        endings = [list(rng.randint(0, V, rng.randint(1, POSITIONS + 2 - n))) for _ in range(4)]
        if len(found) == 0: # the longest row: its last token is only a target
            endings[2] = list(rng.randint(0, V, POSITIONS + 1 - n))
        best, ahead = answer(p, context, endings)
        assert ahead > 1e-4, "too close for F32"
        found.append(((best + (len(found) >= EXAMPLES // 2)) % 4, context, endings))
    return found


def answers(examples):
    write_examples("h.bin", examples)
    for batch in ("1", "4", "32"): # one, one and eight examples at a time
        fattn("eval", "m.bin", "--hellaswag", "h.bin", "--batch", batch, "--json", "e.json",
              says=f"HellaSwag: {EXAMPLES // 2} of {EXAMPLES} right, 0.5000")
        with open("e.json") as f:
            assert json.loads(f.read())["hellaswag_right"] == EXAMPLES // 2
    fattn("eval", "m.bin", "--hellaswag", "h.bin", "--examples", "11", says="11 of 11 right")


def loss(p, rng):
    T, B = 16, 4
    tokens = rng.randint(0, V, 5 * T * B + 9)
    parity.write_tokens("v.bin", tokens)
    fattn("eval", "m.bin", "--val", "v.bin", "--context", str(T), "--batch", str(B), "--json", "e.json")
    with open("e.json") as f:
        got = json.loads(f.read())
    n = 5 * B
    ids, targets = tokens[:n * T].reshape(n, T), tokens[1:n * T + 1].reshape(n, T)
    want = reference.loss_and_gradients(p, ids, targets, V, L, NH)[1]
    print(f"loss {got['val_loss']:.7f}, fp64 {want:.7f}")
    assert got["val_targets"] == n * T and 0 < abs(got["val_loss"] - want) <= F32["losses"]
    fattn("eval", "m.bin", "--val", "v.bin", "--context", str(T), "--batch", str(B), "--dtype", "f16", "--json",
          "e.json")
    with open("e.json") as f:
        narrow = json.loads(f.read())
    rounded = reference.loss_and_gradients(p, ids, targets, V, L, NH, reference.to_f16)[1]
    print(f"F16: {narrow['val_loss']:.7f}, fp64 with its roundings {rounded:.7f}")
    assert 0 < abs(narrow["val_loss"] - want) <= 4 * abs(rounded - want)
    fattn("eval", "m.bin", "--val", "v.bin", "--context", str(POSITIONS + 1), code=2, says="the model has 40 positions")
    fattn("eval", "m.bin", code=2, says="nothing to do")
    fattn("eval", "m.bin", "--sample", "3", code=2, says="--tokenizer FILE")
    fattn("eval", "--val", "v.bin", code=2, says="MODEL")
    fattn("eval", "v.bin", "--val", "v.bin", code=1, says="v.bin, offset 0: the first word (a GPT-2 model's)")


def not_finite(p):
    """F16 has no numbers of this size: no loss, and no answer."""
    parity.write_model("large.bin", {k: 1e6 * v if k == "wte.weight" else v for k, v in p.items()})
    fattn("eval", "large.bin", "--val", "v.bin", "--hellaswag", "h.bin", says=f" of {EXAMPLES} right")
    for words, says in ((("--val", "v.bin", "--context", "16"), "v.bin: the loss of 320 tokens is "),
                        (("--hellaswag", "h.bin"), "example 0: the loss of its ending 0 is ")):
        fattn("eval", "large.bin", *words, "--dtype", "f16", "--json", "large.json", code=1, says=says)
        assert not os.path.exists("large.json")


def damaged():
    with open("h.bin", "rb") as f:
        good = f.read()

    def change(offset, value):
        return good[:offset] + struct.pack("<H", value) + good[offset + 2:]
    count = struct.unpack_from("<H", good, 1034)[0] # of the first context's tokens
    for data, says in ((good[:900], "offset 900: the file ends"), (good[:-2], f"offset {len(good) - 2}: the file ends"),
                       (good + b"xx", f"the file has {len(good) + 2} bytes"),
                       (b"\1" + good[1:], "offset 0: the first word"),
                       (good[:8] + b"\0\0\0\0" + good[12:], "offset 8: the number of examples is 0"),
                       (change(1024, 7), "offset 1024: the start of an example is 7, not in 65535..65535"),
                       (change(1026, 8), "offset 1026: the example has"),
                       (change(1028, 3), "offset 1028: its number is 3, not in 0..0"),
                       (change(1030, 4), "offset 1030: its label is 4, not in 0..3"),
                       (change(1032, 2), "offset 1032: the number of its endings is 2"),
                       (change(1034, POSITIONS + 1), "offset 1034: the length of its context is 41, not in 1..40"),
                       (change(1036, V), "offset 1036: a token is 500, not in 0..499"),
                       (change(1036 + 2 * count, 0), f"offset {1036 + 2 * count}: the length of an ending is 0")):
        with open("bad.bin", "wb") as f:
            f.write(data)
        fattn("eval", "m.bin", "--hellaswag", "bad.bin", "--json", "failed.json", code=1, says=says)
        assert not os.path.exists("failed.json")


def during_a_training():
    run = ["--init", "m.bin", "--data", "v.bin", "--val", "v.bin", "--context", str(POSITIONS), "--batch", "4", "--lr",
           "0", "--steps", "2", "--eval-every", "1", "--eval-sequences", "4", "--checkpoint", "-"]
    fattn("train", *run, "--hellaswag", "h.bin", "--json", "t.jsonl", says=f"{EXAMPLES // 2} of {EXAMPLES} right")
    with open("t.jsonl") as f:
        events = [e for e in map(json.loads, f) if e["event"] == "hellaswag"]
    assert [e["step"] for e in events] == [1, 2] and {e["right"] for e in events} == {EXAMPLES // 2}, events
    fattn("train", "--task", "recall", "--hellaswag", "h.bin", code=2, says="--hellaswag needs --task shards")
    fattn("train", *run, "--hellaswag", "h.bin", "--plot", "h.bin", code=2, says="--plot h.bin is the input h.bin")
    fattn("train", *run, "--hellaswag", "v.bin", code=1, says="v.bin, offset 0: the first word (an evaluation's)")


def main():
    rng = np.random.RandomState(11)
    p = reference.random_parameters(V, VP, POSITIONS, L, C, 3)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        parity.write_model("m.bin", p)
        answers(examples_of(p, rng))
        loss(p, rng)
        not_finite(p)
        damaged()
        during_a_training()
        os.chdir("/")


sys.exit(main())
