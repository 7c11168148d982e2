"""Data-parallel training: on every number of ranks, threads or processes, with the state divided or not, a run has the
same losses and the same checkpoint, bit for bit."""
import os
import re
import subprocess
import sys
import tempfile

import numpy as np

sys.dont_write_bytecode = True # the sources may be read-only
from ranks_runs import FATTN, RECALL, TINY, assert_same, can_mpirun, events, steps_in, stored, train


def texts():
    with open("text", "w") as f:
        f.writelines(f"line {i}: {i * i} is the square of {i}\n" for i in range(600))
    p = subprocess.run([FATTN, "tokens", "text", "--out", "t", "--shard", "3000"], capture_output=True, text=True)
    assert p.returncode == 0, p.stderr


TEXT = ["--task", "text", "--text", "text", "--context", "16", *TINY, "--total-batch", "128"]
SHARDS = ["--data", "t_train_*.bin", "--val", "t_val_*.bin", "--vocab", "257", "--context", "16", *TINY,
          "--total-batch", "128"]
RUNS = {"recall": RECALL,
        "recall, dropout, f16": [*RECALL, "--dropout", "0.1", "--dtype", "f16"],
        "text, dropout": [*TEXT, "--dropout", "0.2"],
        "text, GPT-2, bf16": [*TEXT, "--arch", "gpt2", "--dtype", "bf16"],
        "shards, GPT-2": SHARDS,
        "shards, dropout, bf16": [*SHARDS, "--arch", "fattn", "--dropout", "0.1", "--dtype", "bf16"]}


def one(name, words, *more, **how):
    """Losses and checkpoint of a run."""
    train(*words, "--deterministic", "--json", name + ".jsonl", "--checkpoint", name, "--overwrite", *more, **how)
    return events(name + ".jsonl"), stored(name)


def same_bits(with_mpi):
    for number, (what, words) in enumerate(RUNS.items()):
        log, checkpoint = one("alone", words)
        assert len([e for e in log if e["event"] == "step"]) == 6 and log[-1]["event"] == "end", log
        ways = [("--ranks", 2), ("--ranks", 4, "--zero"), ("--ranks", 1, "--zero"), ("--ranks", 4),
                ("--ranks", 2, "--zero")]
        for way in ways[:5 if number < 2 else 2]:
            again = one("ranks", words, *way)
            assert again[0] == log, (what, way, again[0], log)
            assert_same(again[1], checkpoint, (what, way))
        ways = [[(2,), (4, "--zero")], [(4,)], [(2, "--zero")]][number % 3]
        for processes, *way in ways if with_mpi else []:
            again = one("processes", words, *way, processes=processes)
            assert again[0] == log, (what, processes, again[0], log)
            assert_same(again[1], checkpoint, (what, processes))


def write_example(path, context, endings):
    """One of HellaSwag in llm.c's format: a context of one token, four endings of one."""
    words = [65535, 0, 0, 0, 4, 1, context] + [word for token in endings for word in (1, token)]
    words[1] = 2 * len(words)
    header = np.zeros(256, np.int32)
    header[:4] = 20240522, 1, 1, words[1]
    with open(path, "wb") as f:
        f.write(header.tobytes() + np.array(words, np.uint16).tobytes())


def same_without_deterministic():
    """One rank then adds the gradients of its P = 4 passes in another order. That changes an element by at most P 2^-24
    of the sum of their sizes, which is taken as at most 100 of its own; an update of AdamW, of at most lr, changes by
    as much of itself, and the loss by the product with the gradient, whose sum of sizes is at most sqrt(n) of its
    norm."""
    train(*RECALL, "--json", "one.jsonl", "--checkpoint", "-")
    with_ranks = {}
    for ranks in (2, 4):
        train(*RECALL, "--json", "many.jsonl", "--checkpoint", "-", "--ranks", ranks)
        with_ranks[ranks] = events("many.jsonl", "step")
    n = events("one.jsonl", "start")[0]["parameters"]
    tolerance = 0
    for i, e in enumerate(events("one.jsonl", "step")):
        for ranks, log in with_ranks.items():
            assert abs(log[i]["loss"] - e["loss"]) <= tolerance + 4 * 2.0**-24 * e["loss"], (i, ranks, log[i], e)
        tolerance += e["grad_norm"] * n**0.5 * e["lr"] * 4 * 2.0**-24 * 100
    assert tolerance < 1e-4, tolerance


def progress_is_of_its_step():
    """With several ranks a step's results come with the next step."""
    said = train(*RECALL, "--eval-every", 4, "--json", "shown.jsonl", "--checkpoint", "-", "--checkpoint-every", 4,
                 "--ranks", 2)
    steps = {e["step"]: e for e in events("shown.jsonl", "step")}
    shown = re.findall(r"^step (\d+)/6 loss (\S+) .* lr (\S+) ", said, re.M)
    assert [shown[0][0], shown[-1][0]] == ["1", "6"], said
    for step, loss, lr in shown:
        e = steps[int(step)]
        assert (loss, lr) == (f"{e['loss']:.3f}", f"{e['lr']:.2g}"), (said, e)


def resumed_on_other_ranks(with_mpi):
    for words in (RECALL, SHARDS):
        words = [*words, "--schedule", "constant"] # does not depend on --steps
        log, want = one("alone", words)
        ways = [("--ranks", 2), ("--ranks", 4, "--zero"), ("--ranks", 1), ("--zero",)]
        one("moved", words, "--steps", 1)
        for steps, way in enumerate(ways, 2):
            train("--resume", "moved", "--steps", steps, *way)
        processes = {"processes": 2} if with_mpi else {}
        train("--resume", "moved", "--steps", 6, *([] if with_mpi else ["--ranks", 2]), **processes)
        have, steps = stored("moved"), events("moved.jsonl", "step")
        assert steps == [e for e in log if e["event"] == "step"], (steps, log)
        for name in want: # its evaluations were at other steps
            assert name.startswith(("history/eval", "config/")) or have[name] == want[name], name


def the_total_batch_is_stored():
    """A run that was begun without --total-batch keeps the tokens of a step on other ranks."""
    words = [*RECALL[:-2], "--schedule", "constant"]
    train(*words, "--ranks", 4, "--deterministic", "--checkpoint", "four", "--json", "four.jsonl")
    train(*words, "--ranks", 4, "--deterministic", "--checkpoint", "begun", "--steps", 2)
    train("--resume", "begun", "--ranks", 2, "--steps", 6, "--json", "rest.jsonl")
    assert events("rest.jsonl", "step") == events("four.jsonl", "step")[2:]
    assert events("four.jsonl", "start")[0]["total-batch"] == 128
    assert_same({k: v for k, v in stored("begun").items() if k.startswith(("params/", "adam/"))},
                {k: v for k, v in stored("four").items() if k.startswith(("params/", "adam/"))})


def begun_with_llmc():
    """Each rank reads llm.c's files, and keeps its part of AdamW's state."""
    words = [*SHARDS, "--dtype", "bf16", "--schedule", "constant"]
    log, want = one("alone", words)
    train(*words, "--deterministic", "--steps", 3, "--checkpoint", "three")
    p = subprocess.run([FATTN, "convert", "three", "llmc"], capture_output=True, text=True)
    assert p.returncode == 0, p.stderr
    for way in ("--ranks", 1), ("--ranks", 2, "--zero"):
        train("--init", "llmc", *words, "--deterministic", *way, "--json", "begun.jsonl", "--checkpoint", "rest",
              "--overwrite")
        assert events("begun.jsonl", "step") == [e for e in log if e["event"] == "step"][3:], way
        have = stored("rest")
        assert_same({name: have[name] for name in want if name.startswith(("params/", "adam/"))},
                    {name: want[name] for name in want if name.startswith(("params/", "adam/"))}, way)


def files_of_rank_0(with_mpi):
    """Every line, file and word once."""
    for how in ({}, {"processes": 2}) if with_mpi else ({},):
        said = train(*RECALL, *([] if how else ["--ranks", 2]), "--json", "log.jsonl", "--plot", "curve.svg",
                     "--checkpoint", "files", "--overwrite", **how)
        for text in ("model: ", "task: ", "ranks: 2 ", "recall: ", "loss curve: ", "checkpoint: files/, step 6"):
            assert said.count(text) == 1, (text, said)
        steps = [e["step"] for e in events("log.jsonl", "step")]
        assert steps == [1, 2, 3, 4, 5, 6], steps
        assert steps_in("files") == [4, 6] and len(os.listdir("files")) == 2, os.listdir("files")
    # HellaSwag and the sample, too.
    write_example("h.bin", 65, range(70, 74))
    for i, way in enumerate((["--ranks", 1], ["--ranks", 2, "--zero"])):
        said = train(*SHARDS, *way, "--deterministic", "--hellaswag", "h.bin", "--tokenizer", "t_tokenizer.bin",
                     "--sample", 20, "--checkpoint", "-", "--json", f"asked{i}.jsonl", says="sample (temperature")
        assert said.count("HellaSwag after step 6: ") == 1, said
    assert events("asked0.jsonl", "hellaswag", "eval") == events("asked1.jsonl", "hellaswag", "eval")


def main():
    with_mpi = can_mpirun()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        texts()
        for test in (same_bits, same_without_deterministic, progress_is_of_its_step, resumed_on_other_ranks,
                     the_total_batch_is_stored, begun_with_llmc, files_of_rank_0):
            test(*[with_mpi][:test.__code__.co_argcount])
            print(test.__name__, "ok")
        os.chdir("/")


sys.exit(main())
