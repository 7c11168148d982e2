"""Files of llm.c: tokens from text, models and runs in both directions, damaged files. What the files mean is written
here once more, with NumPy."""
import json
import os
import resource
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unicodedata

import h5py
import numpy as np

FATTN = os.path.join(os.environ["FATTN_BUILD"], "bin", "fattn")
V, VP, T, C, L, NH = 257, 384, 16, 32, 2, 4
SIZES = ["--layers", str(L), "--channels", str(C), "--heads", str(NH), "--context", str(T), "--batch", "4"]
DATA = ["--data", "t_train_*.bin", "--val", "t_val_*.bin", "--tokenizer", "t_tokenizer.bin", "--lr", "1e-2"]


def fattn(*words, code=0, says="", limit=None):
    """limit: no file may have more bytes, as if the disk were full. LLVM's OpenMP has one of 1024."""
    def prepare():
        if limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    done = subprocess.run([FATTN, *words], capture_output=True, encoding="utf-8", errors="backslashreplace",
                          timeout=120, preexec_fn=prepare)
    shown = f"{words}\nexit code {done.returncode}\n{done.stdout}{done.stderr}"
    assert done.returncode == code, shown
    assert says in done.stdout + done.stderr, (says, shown)
    return done.stdout


def header(path):
    return np.fromfile(path, np.int32, 256)


def shard(path):
    h = header(path)
    width = {(20240520, 1): np.uint16, (20240801, 7): np.uint32}[(h[0], h[1])]
    tokens = np.fromfile(path, width, offset=1024)
    assert len(tokens) == h[2] and not h[3:].any(), path
    return tokens


# ---- tokens ----

def tokens_of_bytes():
    text = ("To be, or not to be: that is the question.\n\n" * 300).encode() + bytes(range(256))
    with open("text", "wb") as f:
        f.write(text)
    fattn("tokens", "text", "--out", "t", says="--tokenizer t_tokenizer.bin")
    val, train = shard("t_val_000000.bin"), shard("t_train_000001.bin")
    assert np.array_equal(np.concatenate([val, train]), [256, *text])
    assert len(val) == (len(text) + 1) // 10
    h = header("t_tokenizer.bin")
    assert list(h[:4]) == [20240328, 2, 257, 256], h[:4]
    for words in (["text"], ["missing"]): # nothing is read for it
        fattn("tokens", *words, "--out", "t", code=1, says="is there: name another --out")
    fattn("tokens", "text", "text", "--out", "deep/p", "--split", "paragraph", "--val", "0", "--shard", "1000")
    parts = sorted(os.listdir("deep"))
    assert parts[-1] == "p_train_000027.bin" and parts[0] == "p_tokenizer.bin", parts
    joined = np.concatenate([shard("deep/" + p) for p in parts[1:]])
    assert (joined == 256).sum() == 2 * 301 and joined[0] == 256
    assert bytes(joined[joined != 256].astype(np.uint8)) == text + text
    fattn("tokens", "--out", "x", code=2, says="name at least one FILE")
    open("empty", "w").close()
    fattn("tokens", "empty", "--out", "x", code=1, says="the text has no bytes")
    fattn("tokens", "missing", "--out", "x", code=1, says="No such file")
    fattn("tokens", "text", "missing", "--out", "x", code=1, says="No such file")
    assert not [n for n in os.listdir(".") if n.startswith("x")]


def begun(folder, text):
    """A call that writes thousands of small files, when the first are in the folder."""
    p = subprocess.Popen([FATTN, "tokens", text, "--out", folder + "/many", "--shard", "2"], stderr=subprocess.PIPE,
                         stdout=subprocess.DEVNULL, text=True)
    until = time.monotonic() + 60
    while not [n for n in os.listdir(folder) if "-of-1." in n]:
        assert p.poll() is None and time.monotonic() < until, p
        time.sleep(0.001)
    return p


def an_interrupt_leaves_nothing():
    """Nor does a call that was killed, when the next one has been there; one that goes on is left alone."""
    os.mkdir("stopped")
    with open("much", "wb") as f:
        f.write(bytes(400000))
    for how in (signal.SIGINT, signal.SIGTERM):
        p = begun("stopped", "much")
        p.send_signal(how)
        _, said = p.communicate(timeout=60)
        assert p.returncode == 130 and "interrupted after" in said and "none of which is kept" in said, said
        assert os.listdir("stopped") == [], how
    p = begun("stopped", "much")
    p.send_signal(signal.SIGSTOP)
    waiting = {n for n in os.listdir("stopped") if "-of-" in n}
    fattn("tokens", "text", "--out", "stopped/t")
    assert waiting <= set(os.listdir("stopped"))
    p.kill()
    p.communicate()
    fattn("tokens", "text", "--out", "stopped/t", "--overwrite")
    assert waiting and not [n for n in os.listdir("stopped") if "-of-" in n]


def documents(*paths):
    return sum(int((shard(p) == 256).sum()) for p in paths)


def paragraphs():
    """Lines end with \\n or \\r\\n; blank ones before the first paragraph are part of it."""
    for name, text in (("lf", "a\nb\n\nc\n\n\nd"), ("crlf", "a\r\nb\r\n\r\nc\r\n\r\n\r\nd\r"),
                       ("leading", "\n\r\na\nb\n\n\r\nc\n\nd\n\n\r"), ("cr", "a\n\n\rb\n\nc\n\n")):
        with open(name, "w", newline="") as f:
            f.write(text)
        fattn("tokens", name, "--out", "p/" + name, "--split", "paragraph", "--val", "0")
        tokens = shard(f"p/{name}_train_000000.bin")
        assert tokens[0] == 256 and bytes(tokens[tokens != 256].astype(np.uint8)) == text.encode(), name
        assert documents(f"p/{name}_train_000000.bin") == 3, (name, tokens)
    with open("blank", "w") as f:
        f.write("\n\n\n")
    fattn("tokens", "blank", "--out", "p/blank", "--split", "paragraph", "--val", "0")
    assert list(shard("p/blank_train_000000.bin")) == [256, 10, 10, 10]


def a_rest_joins():
    """The shard before it, if it is shorter than half of one; the order of the tokens stays."""
    with open("1999", "wb") as f: # and the document's first token
        f.write(bytes(i % 251 for i in range(1999)))
    for n, sizes in ((1000, [1000, 1000]), (1400, [2000]), (1333, [1333, 667]), (1334, [2000]), (801, [801, 1199]),
                     (800, [800, 800, 400]), (1999, [2000]), (2000, [2000]), (2147483647, [2000])):
        fattn("tokens", "1999", "--out", "s/s", "--val", "0", "--shard", str(n), "--overwrite")
        names = sorted(x for x in os.listdir("s") if "train" in x)
        parts = [shard("s/" + x) for x in names]
        assert names == [f"s_train_{i:06d}.bin" for i in range(len(sizes))], (n, names)
        assert [len(p) for p in parts] == sizes, (n, [len(p) for p in parts])
        assert np.array_equal(np.concatenate(parts), [256, *(i % 251 for i in range(1999))]), n


def files_of_other_prefixes_stay():
    """--out is a name, not a pattern; and a tokenizer that is there is not replaced unasked."""
    os.mkdir("other")
    for out in ("other/r1", "other/r2", "other/*"):
        fattn("tokens", "text", "--out", out)
    before = sorted(os.listdir("other"))
    for out in ("other/r[12]", "other/?2", "other/*", "other/r\\1"):
        fattn("tokens", "text", "--out", out, "--overwrite")
    after = os.listdir("other")
    assert set(before) < set(after) and len(after) == 3 * 6, after
    fattn("tokens", "text", "--out", "other/?2", code=1, says="other/?2_train_000001.bin is there")
    for n in ("train_000001", "val_000000"):
        os.remove(f"other/r1_{n}.bin")
    with open("other/r1_tokenizer.bin", "w") as f:
        f.write("precious")
    fattn("tokens", "text", "--out", "other/r1", code=1, says="other/r1_tokenizer.bin is there: name another --out")
    fattn("tokens", "text", "--out", "other/r1", "--tokenizer", "t_tokenizer.bin")
    with open("other/r1_tokenizer.bin") as f:
        assert f.read() == "precious"
    fattn("tokens", "text", "--out", "other/r1", "--overwrite")
    assert header("other/r1_tokenizer.bin")[0] == 20240328


def files_of_longer_prefixes_stay():
    """A prefix's own files have a number of six digits or more behind _train_ or _val_, and nothing else there."""
    fattn("tokens", "text", "--out", "long/w_train_small")
    for name in ("w_train_small.bin", "w_val_1.bin", "w_train_000001a.bin"):
        open("long/" + name, "w").close()
    before = set(os.listdir("long"))
    said = fattn("tokens", "text", "--out", "long/w")
    line = [x for x in said.splitlines() if x.startswith("train: fattn ")][0]
    fattn(*shlex.split(line)[2:], *SIZES, "--steps", "1", "--checkpoint", "-", says="1 steps")
    assert fattn("tokens", "text", "--out", "long/w", "--overwrite").splitlines()[-1] == line
    own = {"w_train_000001.bin", "w_val_000000.bin", "w_tokenizer.bin"}
    assert set(os.listdir("long")) == before | own, os.listdir("long")
    for name in own - {"w_tokenizer.bin"}:
        os.remove("long/" + name)
    words = ["tokens", "text", "--out", "long/w", "--tokenizer", "t_tokenizer.bin"]
    open("long/w_train_1000000.bin", "w").close()
    fattn(*words, code=1, says="long/w_train_1000000.bin is there")
    fattn(*words, "--overwrite")
    assert set(os.listdir("long")) == before | own, os.listdir("long")


def the_printed_command_runs():
    for out in ("my dir/t", "it's [a] b*c?\\d/t $x", "plain/t"):
        line = [x for x in fattn("tokens", "text", "--out", out).splitlines() if x.startswith("train: fattn ")][0]
        fattn(*shlex.split(line)[2:], *SIZES, "--steps", "1", "--checkpoint", "-", says="1 steps")
    assert line.endswith(" --tokenizer plain/t_tokenizer.bin"), line
    for share, part in ("0", "held-out"), ("1", "training"):
        said = fattn("tokens", "text", "--out", "part" + share, "--val", share,
                     says=f"train: there are no files of {part} tokens")
        assert "--data '" not in said, said
    with open("tiny", "w") as f:
        f.write("ab")
    fattn("tokens", "tiny", "--out", "tiny", says="there are no files of held-out tokens")


def kind(c):
    if c in "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" or "\u2000" <= c <= "\u200a":
        return "S"
    return {"L": "L", "N": "N"}.get(unicodedata.category(c)[0], "O")


def pieces(s):
    """GPT-2's regular expression by hand: re knows no \\p{L}."""
    i, out = 0, []
    while i < len(s):
        short = next((x for x in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d") if s.startswith(x, i)), None)
        start = i + 1 if s[i] == " " and i + 1 < len(s) and kind(s[i + 1]) != "S" else i
        end = start + 1
        while end < len(s) and kind(s[end]) == kind(s[start]):
            end += 1
        if short:
            end = i + len(short)
        elif kind(s[start]) == "S" and end < len(s) and end - start > 1:
            end -= 1
        out.append(s[i:end])
        i = end
    return out


def encode(s, ids):
    out = []
    for piece in pieces(s):
        parts = [bytes([b]) for b in piece.encode()]
        while True:
            pairs = [(ids[a + b], k) for k, (a, b) in enumerate(zip(parts, parts[1:])) if a + b in ids]
            if not pairs:
                break
            k = min(pairs)[1]
            parts[k:k + 2] = [parts[k] + parts[k + 1]]
        out += [ids[p] for p in parts]
    return out


def byte_pairs():
    """A tokenizer trained here on some text; its ids are ranks, as GPT-2's."""
    sample = ("It's the cat's 12 hats we'll say: 'tis 1984!  Über Größe\n\n\n  naïve 東京 \u00a0\t x² ½ १२ "
              "don't DON'T aaaaaaaaaa ... ---- <|endoftext|> \U0001f600\U0001f600 e\u0301 end  ") * 3
    table = [bytes([b]) for b in range(256)]
    words = [[bytes([b]) for b in p.encode()] for p in pieces(sample)]
    while len(table) < 400:
        count = {}
        for w in words:
            for pair in zip(w, w[1:]):
                count[pair] = count.get(pair, 0) + 1
        best = max(sorted(count), key=count.get)
        if count[best] < 2:
            break
        table.append(best[0] + best[1])
        for w in words:
            k = 0
            while k + 1 < len(w):
                if (w[k], w[k + 1]) == best:
                    w[k:k + 2] = [best[0] + best[1]]
                k += 1
    ids = {}
    for i, b in enumerate(table):
        ids.setdefault(b, i)
    table.append(b"<|endoftext|>")
    write_tokenizer("bpe.bin", table)
    rng = np.random.RandomState(5)
    alphabet = sorted(set(sample))
    text = sample + "".join(alphabet[i] for i in rng.randint(0, len(alphabet), 20000))
    with open("words", "w", encoding="utf-8") as f:
        f.write(text)
    fattn("tokens", "words", "--out", "w", "--tokenizer", "bpe.bin", "--val", "0")
    got, want = shard("w_train_000000.bin"), [len(table) - 1, *encode(text, ids)]
    assert len(got) < len(text.encode()) and np.array_equal(got, want), "byte pairs differ"

    # Long pieces, and bytes that are no UTF-8: every byte comes back.
    junk = b" " * 5000 + b"a" * 5000 + bytes(rng.randint(0, 256, 5000, dtype=np.uint8)) + b"\xf0\x9f"
    with open("junk", "wb") as f:
        f.write(junk)
    fattn("tokens", "junk", "--out", "j", "--tokenizer", "bpe.bin", "--val", "0")
    assert b"".join(table[i] for i in shard("j_train_000000.bin")[1:]) == junk

    # More than 65536 tokens: 32 bits. A byte that is no token cannot be encoded.
    write_tokenizer("wide.bin", table + [b"?%d" % i for i in range(70000)])
    fattn("tokens", "junk", "--out", "k", "--tokenizer", "wide.bin", "--val", "0")
    assert header("k_train_000000.bin")[0] == 20240801
    write_tokenizer("few.bin", [b"a", b"b"])
    fattn("tokens", "junk", "--out", "f", "--tokenizer", "few.bin", code=1, says="few.bin has no token for the byte 32")

    with open("bpe.bin", "rb") as f:
        good = f.read()
    for change, says in ((good[:500], "offset 500: the file ends"), (good[:-1], "the file ends"),
                         (good + b"x", f"offset {len(good)}: the file has {len(good) + 1} bytes"),
                         (words_of(good, 0, 7), "offset 0: the first word"),
                         (words_of(good, 1, 3), "offset 4: the version"),
                         (words_of(good, 1, 1), "not 50257"), (words_of(good, 3, len(table)), "offset 12:"),
                         (good[:1024] + b"\0" + good[1025:], "offset 1024: token 0 has no bytes")):
        with open("bad.bin", "wb") as f:
            f.write(change)
        fattn("tokens", "junk", "--out", "b", "--tokenizer", "bad.bin", code=1, says=says)
    assert not [n for n in os.listdir(".") if n.startswith("b_")]


def write_tokenizer(path, table):
    h = np.zeros(256, np.int32)
    h[:4] = 20240328, 2, len(table), len(table) - 1
    with open(path, "wb") as f:
        f.write(h.tobytes() + b"".join(bytes([len(t)]) + t for t in table))


def words_of(data, at, value):
    """data with one word of its header replaced."""
    return data[:4 * at] + struct.pack("<i", value) + data[4 * at + 4:]


# ---- models and runs ----

def tensors(path):
    """The 16 tensors of a model file as {PyTorch's name: array}."""
    h = header(path)
    assert list(h[:8]) == [20240326, h[1], T, V, L, NH, C, VP] and not h[8:].any(), h[:9]
    if h[1] == 3:
        x = np.fromfile(path, np.float32, offset=1024)
    else:
        x = (np.fromfile(path, np.uint16, offset=1024).astype(np.uint32) << 16).view(np.float32)
    return by_name(x)


def by_name(x):
    shapes = [("wte.weight", None, (VP, C)), ("wpe.weight", None, (T, C))]
    for name, shape in (("ln_1.weight", (C,)), ("ln_1.bias", (C,)), ("attn.c_attn.weight", (3 * C, C)),
                        ("attn.c_attn.bias", (3 * C,)), ("attn.c_proj.weight", (C, C)), ("attn.c_proj.bias", (C,)),
                        ("ln_2.weight", (C,)), ("ln_2.bias", (C,)), ("mlp.c_fc.weight", (4 * C, C)),
                        ("mlp.c_fc.bias", (4 * C,)), ("mlp.c_proj.weight", (C, 4 * C)), ("mlp.c_proj.bias", (C,))):
        shapes += [(f"h.{layer}.{name}", layer, shape) for layer in range(L)]
    shapes += [("ln_f.weight", None, (C,)), ("ln_f.bias", None, (C,))]
    found, at = {}, 0
    for name, _, shape in shapes:
        n = int(np.prod(shape))
        found[name] = x[at:at + n].reshape(shape)
        at += n
    assert at == len(x), (at, len(x))
    return found


def stored(folder, step, group):
    with h5py.File(os.path.join(folder, f"step-{step:09d}.h5")) as f:
        return {name: f[group][name][()] for name in f[group]}


def same(a, b):
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    for name in a:
        assert a[name].tobytes() == b[name].tobytes(), name


def nearest_bf16(x):
    bits = x.view(np.uint32)
    return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


def losses(log):
    with open(log) as f:
        return [e["loss"] for e in map(json.loads, f) if e["event"] == "step"]


def both_directions():
    fattn("train", *SIZES, *DATA, "--steps", "9", "--total-batch", "128", "--checkpoint", "ours", "--json", "a.jsonl",
          "--eval-sequences", "4", "--checkpoint-every", "6")
    values = stored("ours", 6, "params")
    fattn("convert", "ours/step-000000006.h5", "model.bin", says="model of step 6, f32")
    same(tensors("model.bin"), values)
    assert not tensors("model.bin")["wte.weight"][V:].any()
    fattn("convert", "model.bin", "half.bin", says="bf16")
    same(tensors("half.bin"), {name: nearest_bf16(x) for name, x in values.items()})
    fattn("convert", "half.bin", "full.bin", says="f32")
    same(tensors("full.bin"), tensors("half.bin"))
    fattn("convert", "model.bin", "copy.bin", "--dtype", "f32")
    with open("model.bin", "rb") as a, open("copy.bin", "rb") as b:
        assert a.read() == b.read()

    fattn("convert", "model.bin", "model.bin", code=1, says="model.bin is there: name another one")
    fattn("convert", "ours/step-000000006.h5", "run")
    fattn("convert", "ours/step-000000006.h5", "run", code=1, says="run/DONE_00000006 is there")
    fattn("convert", "ours/step-000000006.h5", "run", "--overwrite")
    assert sorted(os.listdir("run")) == ["DONE_00000006", "model_00000006.bin", "state_00000006_00000.bin"]
    assert os.path.getsize("run/DONE_00000006") == 0
    state_of_a_run("run/state_00000006_00000.bin", 6)
    for words in (["model.bin", "f16.bin"], ["ours", "f16.bin"], ["ours", "f16"]):
        fattn("convert", *words, "--dtype", "f16", code=2, says="--dtype f16: llm.c's models are f32 or bf16")
    assert not [n for n in os.listdir(".") if n.startswith("f16")]
    fattn("convert", "model.bin", "f16", "--dtype", "f16", says="--resume f16 (on random tokens: no --data was given)")

    # Going on from each of them ends with the same bits.
    whole = losses("a.jsonl")
    more = [*DATA, *SIZES, "--steps", "9", "--total-batch", "128", "--eval-sequences", "4"]
    fattn("train", "--init", "run", *more, "--checkpoint", "theirs", "--json", "b.jsonl",
          says="begun with run, after step 6")
    assert losses("b.jsonl") == whole[6:], (losses("b.jsonl"), whole)
    assert "random" not in fattn("convert", "run", "back", *more, says="checkpoint of step 6")
    for group in ("params", "adam/m", "adam/v"):
        same(stored("back", 6, group), stored("ours", 6, group))
    fattn("convert", "run", "back", *more, code=1, says="remove them with --overwrite")
    fattn("train", "--resume", "back", "--json", "c.jsonl", says="after step 6")
    assert losses("c.jsonl") == whole[6:]
    for folder in ("theirs", "back"):
        for group in ("params", "adam/m", "adam/v"):
            same(stored(folder, 9, group), stored("ours", 9, group))
    # The newest DONE counts; a model without one is not finished.
    shutil.copy("run/model_00000006.bin", "run/model_00000009.bin")
    fattn("train", "--init", "run", *more, "--checkpoint", "-", says="after step 6")
    fattn("train", "--init", ".", *more, code=1, says="no finished checkpoint of llm.c")
    fattn("train", "--init", "ours", *more, code=1, says="fattn convert ours model.bin makes one")
    fattn("train", "--init", "run", *more, "--layers", "3", code=2, says="--layers 3: the model in run has 2")
    fattn("train", "--init", "run", *more, "--batch", "2", "--checkpoint", "-", code=1,
          says="is none that seed 42 leads to")
    fattn("train", "--init", "run", "--resume", "ours", code=2, says="--init is for a new run")
    fattn("train", "--init", "model.bin", "--task", "text", "--text", "text", "--steps", "1", "--checkpoint", "-",
          code=1, says="offset 12: the vocabulary is 257, this model's 256")
    fattn("train", "--init", "model.bin", *DATA, "--vocab", "300", code=2, says="--vocab 300")
    text = fattn("train", "--resume", "ours", "--sample", "40", "--prompt", "To be")
    assert "To be" in text and "endoftext" not in text.split("To be")[0], text
    fattn("train", "--task", "tokens", "--vocab", "9", "--layers", "1", "--channels", "8", "--heads", "1",
          "--context", "8", "--batch", "2", "--steps", "1", "--checkpoint", "other")
    fattn("convert", "other", "other.bin", code=1, says="--arch fattn: llm.c has GPT-2 only")
    assert not os.path.exists("other.bin")


def options_of_no_conversion():
    """They are refused by name."""
    before = sorted(os.listdir("."))
    for words in (["ours", "no.bin"], ["ours", "no"], ["model.bin", "no.bin"], ["run", "no"]):
        for option in (["--init", "half.bin"], ["--resume", "ours"], ["--checkpoint", "other"], ["--ranks", "4"],
                       ["--ranks", "1"], ["--gpus", "2"], ["--zero"]):
            fattn("convert", *words, *option, code=2, says=f"{option[0]} is for fattn train")
    assert sorted(os.listdir(".")) == before


def later_steps():
    """Readers of an llm.c folder take the newest DONE: an earlier step cannot be added."""
    fattn("convert", "ours", "steps")
    before = sorted(os.listdir("steps"))
    fattn("convert", "ours/step-000000006.h5", "steps", code=1,
          says="steps has DONE_00000009, and readers would take that instead of step 6")
    assert sorted(os.listdir("steps")) == before
    fattn("convert", "ours/step-000000006.h5", "steps", "--overwrite")
    assert sorted(os.listdir("steps")) == [n.replace("9", "6") for n in before], os.listdir("steps")
    fattn("convert", "ours", "steps")
    assert len(os.listdir("steps")) == 6


def outputs_are_no_inputs():
    """A log or a plot of train is none of the files that it reads. Of eval: nor one that it has nothing for."""
    words = ["train", "--init", "run", *SIZES, *DATA, "--steps", "9", "--total-batch", "128", "--checkpoint", "-"]
    for option in "--json", "--plot":
        for path in ("run/model_00000006.bin", "run/state_00000006_00000.bin", "t_train_000001.bin",
                     "./t_val_000000.bin", "t_tokenizer.bin"):
            size = os.path.getsize(path)
            fattn(*words, option, path, code=2, says=f"{option} {path} is the input ")
            assert os.path.getsize(path) == size, path
    words = ["eval", "model.bin", "--val", "t_val_*.bin", "--tokenizer", "t_tokenizer.bin", "--sequences", "4"]
    for path in ("model.bin", "./t_val_000000.bin", "t_tokenizer.bin"):
        size = os.path.getsize(path)
        fattn(*words, "--json", path, code=2, says=f"--json {path} is the input ")
        assert os.path.getsize(path) == size, path
    with open("res.json", "w") as f:
        f.write("old\n")
    done = subprocess.run([FATTN, *words, "--device", "cuda", "--json", "res.json"], capture_output=True, timeout=120)
    with open("res.json") as f:
        assert done.returncode == 0 or f.read() == "old\n", done
    fattn(*words, "--json", "res.json")
    with open("res.json") as f:
        assert [e["event"] for e in map(json.loads, f)] == ["eval"]


def permutations(samples_of, seed=42):
    """llm.c's loader, from NumPy's generator: (files' order, samples' order, generator's words) at each file."""
    random = np.random.RandomState(seed)

    def shuffle(x):
        for i in range(len(x) - 1, 0, -1):
            j = int(random.randint(0, 2**32, dtype=np.uint32)) % (i + 1)
            x[i], x[j] = x[j], x[i]
    files = list(range(len(samples_of)))
    while True:
        shuffle(files)
        for at, file in enumerate(files):
            order = list(range(samples_of[file]))
            shuffle(order)
            yield at, list(files), order, random.get_state()


def state_of_a_run(path, step):
    h, n = header(path), (VP + T) * C + L * (12 * C * C + 13 * C) + 2 * C
    assert list(h[:6]) == [20240527, 1, 1, 0, 1, 1] and h[10] == step, h[:11]
    m, v, masters = np.fromfile(path, np.float32, 3 * n, offset=1024).reshape(3, n)
    for group, x in (("adam/m", m), ("adam/v", v), ("params", masters)):
        same(by_name(x), stored("ours", step, group))
    with open(path, "rb") as f:
        f.seek(1024 + 12 * n)
        rest = f.read()
    files, = struct.unpack_from("<Q", rest)
    order = struct.unpack_from(f"<{files}i", rest, 8)
    count, = struct.unpack_from("<Q", rest, 8 + 4 * files)
    inside = struct.unpack_from(f"<{count}i", rest, 16 + 4 * files)
    left, following, *words = struct.unpack_from("<iI624I", rest, 16 + 4 * files + 4 * count + 8)
    assert len(rest) == 16 + 4 * files + 4 * count + 2520
    place = struct.unpack_from("<2Q", h.tobytes(), 120)
    samples = (len(shard("t_train_000001.bin")) - 1) // (4 * T)
    taken, visits = step * 2, permutations([samples]) # 128 tokens a step are two samples
    for at, files_order, order_inside, state in visits:
        if taken <= samples:
            break
        taken -= samples
    assert place == (at, taken) and list(order) == files_order and list(inside) == order_inside, (place, at, taken)
    assert np.array_equal(words, state[1]) and following == state[2] and left == 625 - following, (left, following)


def damaged():
    """Every word of a header that means something, and every length: an error, and nothing new in the folder."""
    with open("run/model_00000006.bin", "rb") as f:
        model = f.read()
    with open("run/state_00000006_00000.bin", "rb") as f:
        state = f.read()
    before = sorted(os.listdir("."))
    nan = struct.pack("<f", float("nan"))
    for change, says in ((model[:100], "offset 100: the file ends, 1024 bytes at offset 0 are expected"),
                         (model[:-1], f"the file has {len(model) - 1} bytes, its header asks for {len(model)}"),
                         (model + b"x", f"offset {len(model)}: the file has"),
                         (words_of(model, 0, 20240520), "offset 0: the first word (a GPT-2 model's) is 20240520, not"),
                         (words_of(model, 1, 2), "offset 4: the version is 2, not 3 (f32) or 5 (bf16)"),
                         (words_of(model, 1, 5), "its header asks for"),
                         (words_of(model, 2, 0), "offset 8: the number of positions"),
                         (words_of(model, 3, -1), "offset 12: the vocabulary is -1"),
                         (words_of(model, 4, 0), "offset 16: the number of layers"),
                         (words_of(model, 5, 3), "offset 20: 32 channels are no multiple of 3 heads"),
                         (words_of(model, 6, 2**30), "offset 24: the number of channels"),
                         (words_of(model, 7, 257), "offset 28: the padded vocabulary is 257, not 384"),
                         (model[:2048] + nan + model[2052:], "offset 2048: the number is nan, finite ones are")):
        with open("before", "wb") as f:
            f.write(change)
        os.replace("before", "bad_model")
        fattn("convert", "bad_model", "made.bin", "--dtype", "bf16", "--overwrite", code=1, says=says)
        fattn("train", "--init", "bad_model", *DATA, "--steps", "1", "--checkpoint", "made", code=1, says=says)
        os.remove("bad_model")
        assert sorted(os.listdir(".")) == before, says
    n = (VP + T) * C + L * (12 * C * C + 13 * C) + 2 * C
    after = 1024 + 12 * n
    os.mkdir("broken")
    shutil.copy("run/model_00000006.bin", "broken")
    open("broken/DONE_00000006", "w").close()
    before = sorted(os.listdir("."))
    for change, says in ((state[:1000], "offset 1000: the file ends"), (state[:-1], "bytes, its header asks for"),
                         (state + b"x", "bytes, its header asks for"),
                         (state[:after], f"offset {after}: the file ends"),
                         (words_of(state, 0, 1), "offset 0: the first word (a state's) is 1, not 20240527"),
                         (words_of(state, 2, 8), "offset 8: the number of processes is 8, not 1"),
                         (words_of(state, 3, 1), "offset 12: the rank is 1, not 0"),
                         (words_of(state, 4, 2), "offset 16: the flag of masters"),
                         (words_of(state, 5, 0), "its header asks for"),
                         (words_of(state, 10, -1), "offset 40: the step is -1"),
                         (words_of(state, 30, 1), "offset 120: its place"),
                         (words_of(state, 32, 9999), "offset 120: its place"),
                         (words_of(state, 33, 1), "offset 120: its place"),
                         (state[:after] + struct.pack("<Q", 2) + state[after + 8:], "offset"),
                         (state[:after] + struct.pack("<Q", 2**60) + state[after + 8:], "an order of 11529215046068"),
                         (state[:-1000] + struct.pack("<I", 77) + state[-996:], "offset 120: its place"),
                         (state[:2048] + nan + state[2052:], "offset 2048: the number is nan")):
        with open("broken/state_00000006_00000.bin", "wb") as f:
            f.write(change)
        fattn("train", "--init", "broken", *SIZES, *DATA, "--steps", "9", "--checkpoint", "made", code=1, says=says)
        fattn("convert", "broken", "made", *SIZES, *DATA, "--steps", "9", code=1, says=says)
        assert sorted(os.listdir(".")) == before, says
    # A token beyond the vocabulary, found when it is read.
    h = header("t_train_000001.bin")
    tokens = shard("t_train_000001.bin").copy()
    tokens[100] = V
    with open("wrong.bin", "wb") as f:
        f.write(h.tobytes() + tokens.tobytes())
    fattn("train", "--layers", "1", "--channels", "8", "--heads", "1", "--context", "16", "--batch", "64", "--vocab",
          str(V), "--data", "wrong.bin", "--val", "t_val_*.bin", "--checkpoint", "-", code=1,
          says="wrong.bin, offset 1224: token 257, the vocabulary has 0..256")


def contents(folder):
    return {name: open(os.path.join(folder, name), "rb").read() for name in os.listdir(folder)}


def full_disks():
    """Nothing is left behind, and what was there stays."""
    os.mkdir("full")
    fattn("tokens", "text", "--out", "full/t", code=1, says="cannot write full/t_", limit=1024)
    fattn("convert", "ours", "full/m.bin", code=1, says="cannot write full/m.bin: File too large", limit=100000)
    fattn("convert", "ours", "full", code=1, says="cannot write full/state_", limit=os.path.getsize("model.bin"))
    assert os.listdir("full") == []
    fattn("train", "--init", "full", *DATA, code=1, says="no finished checkpoint")
    with open("model.bin", "rb") as f:
        before = f.read()
    fattn("convert", "half.bin", "model.bin", "--overwrite", code=1,
          says="cannot write ./model.bin: File too large", limit=1024)
    with open("model.bin", "rb") as f:
        assert f.read() == before
    # What was to be overwritten stays: tokens of one that fits and one that does not, a run, checkpoints.
    fattn("tokens", "text", "--out", "full/t")
    fattn("convert", "ours/step-000000006.h5", "full")
    shutil.copy("ours/step-000000009.h5", "full")
    old = contents("full")
    fattn("tokens", "text", "--out", "full/t", "--val", "0.2", "--overwrite", code=1, says="cannot write full/t_train_",
          limit=10000)
    fattn("convert", "ours/step-000000006.h5", "full", "--dtype", "bf16", "--overwrite", code=1,
          says="cannot write full/state_", limit=os.path.getsize("model.bin"))
    fattn("convert", "half.bin", "full", "--overwrite", code=1, says="cannot write full/step-", limit=1024)
    assert contents("full") == old
    fattn("tokens", "text", "--out", "full/t", "--val", "0.2", "--shard", "9000", "--overwrite")
    fattn("tokens", "text", "--out", "full/t", "--val", "0.2", "--overwrite")
    assert sorted(n for n in os.listdir("full") if n[0] == "t") == sorted(n for n in old if n[0] == "t")
    fattn("convert", "half.bin", "full", "--overwrite")
    assert [n for n in os.listdir("full") if n.endswith("h5")] == ["step-000000000.h5"]
    shutil.copy("ours/step-000000006.h5", "full") # a checkpoint of a later step replaces the earlier ones, too
    fattn("convert", "steps", "full", *SIZES, *DATA, "--steps", "9", "--overwrite")
    assert [n for n in os.listdir("full") if n.endswith("h5")] == ["step-000000009.h5"], os.listdir("full")
    open("file", "w").close()
    fattn("convert", "model.bin", "file/m.bin", code=1, says="cannot write file/m.bin: Not a directory")
    fattn("tokens", "text", "--out", "file/t", code=1, says="cannot write file/t_")
    assert not [n for n in os.listdir(".") + os.listdir("full") if n.startswith("unfinished")]


def main():
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for test in (tokens_of_bytes, an_interrupt_leaves_nothing, paragraphs, a_rest_joins,
                     files_of_other_prefixes_stay, files_of_longer_prefixes_stay, the_printed_command_runs, byte_pairs,
                     both_directions, options_of_no_conversion, later_steps, outputs_are_no_inputs, damaged,
                     full_disks):
            test()
            print(test.__name__, "passed")
        os.chdir("/")


sys.exit(main())
