"""fattn beside llm.c's own CPU program, on the same files: batches, losses, gradients, updates; its loader's state in a
state file; files exchanged in both directions. LLM_C names a clone of llm.c, whose train_gpt2.c is compiled in a
temporary folder; 77 without one."""
import os
import shutil
import subprocess
import sys
import tempfile

import numpy as np

sys.dont_write_bytecode = True # the sources may be read-only
import gpt2_reference as reference
import test_gpt2_parity as parity
from test_gpt2_parity import B, C, F32, L, NH, POSITIONS, STEPS, T, V, VP

FATTN = os.path.join(os.environ["FATTN_BUILD"], "bin", "fattn")
BATCHES = 40

# Its functions alone: a model file and a token file in; losses, logits, gradients and a model file out.
HARNESS = r"""
#define TESTING
#include "train_gpt2.c"

static void dump(const char *folder, const char *name, const int *header, const void *data, size_t bytes) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopenCheck(path, "wb");
    if (header) fwrite(header, 4, 256, f);
    fwrite(data, 1, bytes, f);
    fcloseCheck(f);
}

int main(int argc, char **argv) {
    if (!strcmp(argv[1], "batches")) {
        DataLoader l;
        const int B = atoi(argv[3]), T = atoi(argv[4]), n = atoi(argv[5]);
        dataloader_init(&l, argv[2], B, T, 0, 1, 1);
        for (int i = 0; i < n; ++i) {
            dataloader_next_batch(&l);
            for (int k = 0; k < B * T; ++k) printf("%d ", l.inputs[k]);
            printf("%d\n", l.targets[B * T - 1]);
        }
        fprintf(stderr, "%zu %zu %zu %zu", l.current_shard_idx, l.current_sample_idx, l.glob_result.gl_pathc,
                l.shard_num_samples);
        for (size_t i = 0; i < l.glob_result.gl_pathc; ++i) fprintf(stderr, " %d", l.shard_indices[i]);
        for (size_t i = 0; i < l.shard_num_samples; ++i) fprintf(stderr, " %d", l.intra_shard_indices[i]);
        fprintf(stderr, " %d %u", l.shuffle_rng.left_, l.shuffle_rng.next_);
        for (int i = 0; i < 624; ++i) fprintf(stderr, " %u", l.shuffle_rng.state_[i]);
        return 0;
    }
    GPT2 m;
    const int B = atoi(argv[3]), T = atoi(argv[4]), steps = atoi(argv[5]);
    const char *folder = argv[6];
    if (!strcmp(argv[1], "-")) return 2;
    gpt2_build_from_checkpoint(&m, argv[1]);
    DataLoader l;
    dataloader_init(&l, argv[2], B, T, 0, 1, 1);
    dataloader_next_batch(&l);
    for (int step = 0; step < steps; ++step) {
        gpt2_forward(&m, l.inputs, l.targets, B, T);
        gpt2_zero_grad(&m);
        gpt2_backward(&m);
        if (step == 0) {
            dump(folder, "logits", NULL, m.acts.logits, sizeof(float) * B * T * m.config.padded_vocab_size);
            dump(folder, "gradients", NULL, m.grads_memory, sizeof(float) * m.num_parameters);
        }
        fprintf(stderr, "%.9g\n", m.mean_loss);
        gpt2_update(&m, 1e-3f, 0.9f, 0.999f, 1e-8f, 0.0f, step + 1);
    }
    const int header[256] = {20240326, 3, m.config.max_seq_len, m.config.vocab_size, m.config.num_layers,
                             m.config.num_heads, m.config.channels, m.config.padded_vocab_size};
    dump(folder, "model.bin", header, m.params_memory, sizeof(float) * m.num_parameters);
    return 0;
}
"""


def run(*words, cwd=None):
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=cwd)
    assert done.returncode == 0, (words, done.returncode, done.stdout[-2000:], done.stderr[-2000:])
    return done


def build(clone, folder):
    source, program = os.path.join(folder, "harness.c"), os.path.join(folder, "harness")
    with open(source, "w") as f:
        f.write(HARNESS)
    run("gcc", "-O2", "-w", "-I", clone, source, "-o", program, "-lm")
    return program


def order(program, folder):
    """Three files of different sizes, several epochs: the same tokens in the same batches, the same state."""
    rng = np.random.RandomState(2)
    for i, n in enumerate((400, 1000, 700)):
        parity.write_tokens(os.path.join(folder, f"s_{i}.bin"), rng.randint(0, V, n))
    pattern = os.path.join(folder, "s_*.bin")
    theirs = run(program, "batches", pattern, str(B), str(T), str(BATCHES))
    ours = run(parity.PROGRAM, "batches", pattern, str(B), str(T), str(BATCHES))
    a, b = (x.stdout.strip().split("\n") for x in (theirs, ours))
    assert len(a) == BATCHES and len(set(a)) < BATCHES, "more than an epoch"
    assert [x.split() for x in a] == [x.split() for x in b]
    print(f"{BATCHES} batches of {len(set(a))} samples in 3 files: the same tokens")
    # fattn's state file after as many batches has llm.c's loader.
    sizes = ["--layers", "1", "--channels", "16", "--heads", "1", "--context", str(T), "--batch", str(B)]
    run(FATTN, "train", *sizes, "--vocab", str(V), "--data", pattern, "--val", pattern, "--steps", str(BATCHES),
        "--checkpoint", "ours", "--eval-sequences", "2", cwd=folder)
    run(FATTN, "convert", "ours", "run", cwd=folder)
    with open(os.path.join(folder, "run", f"state_{BATCHES:08d}_00000.bin"), "rb") as f:
        state = f.read()
    shard, sample, files, samples, *rest = map(int, theirs.stderr.split())
    n = 16 * (512 + T) + 12 * 16 * 16 + 13 * 16 + 2 * 16
    assert np.frombuffer(state, np.uint64, 2, 120).tolist() == [shard, sample]
    at = 1024 + 12 * n
    assert np.frombuffer(state, np.uint64, 1, at)[0] == files
    assert np.frombuffer(state, np.int32, files, at + 8).tolist() == rest[:files]
    at += 8 + 4 * files
    assert np.frombuffer(state, np.uint64, 1, at)[0] == samples
    assert np.frombuffer(state, np.int32, samples, at + 8).tolist() == rest[files:files + samples]
    at += 8 + 4 * samples + 8
    assert np.frombuffer(state, np.uint32, 626, at).tolist() == rest[files + samples:]
    assert len(state) == at + 4 * 626 + 8
    print("the loader's state in the state file is llm.c's")


def steps(program, folder):
    """The tiny model of test_gpt2_parity.py in both programs. Each is within F32's bounds of fp64, so they are within
    twice that of each other."""
    rng = np.random.RandomState(7)
    tokens = rng.randint(0, V, B * T + 1)
    p = reference.random_parameters(V, VP, POSITIONS, L, C, 3)
    start = os.path.join(folder, "start.bin")
    parity.write_model(start, p)
    parity.write_tokens(os.path.join(folder, "tokens.bin"), tokens)
    ours, theirs = os.path.join(folder, "fattn"), os.path.join(folder, "llmc")
    os.mkdir(ours), os.mkdir(theirs)
    done = run(parity.PROGRAM, "cpu", "f32", start, os.path.join(folder, "tokens.bin"), str(B), str(T), str(STEPS),
               "0.999", "0", "0", ours)
    losses = [float(x) for x in done.stdout.split()]
    done = run(program, start, os.path.join(folder, "tokens.bin"), str(B), str(T), str(STEPS), theirs)
    their_losses = [float(x) for x in done.stderr.split()]
    assert len(losses) == len(their_losses) == STEPS
    names = parity.file_order(p)
    logits = [np.fromfile(os.path.join(f, "logits"), np.float32).reshape(B, T, VP)[..., :V] for f in (ours, theirs)]
    g = parity.read_numbers(os.path.join(ours, "gradients"), p, list(p))
    their_g = parity.read_numbers(os.path.join(theirs, "gradients"), p, names)
    after = [parity.read_numbers(os.path.join(f, "model.bin"), p, names, 1024) for f in (ours, theirs)]
    apart = {n: np.abs(after[0][n] - after[1][n]) for n in p}
    for n in p:
        if n.endswith("c_attn.bias"):
            apart[n][C:2 * C] = 0 # test_gpt2_parity.py says why
    worst = {"logits": parity.largest(logits[0] - logits[1]) / parity.largest(logits[1]),
             "losses": max(abs(a - b) for a, b in zip(losses, their_losses)),
             "gradients": parity.gradients_apart(g, their_g, p),
             "parameters": max(map(parity.largest, apart.values()))}
    print("fattn and llm.c on the CPU: " + ", ".join(f"{k} {x:.1e} (bound {2 * F32[k]:.1e})" for k, x in worst.items()))
    for k, x in worst.items():
        assert x <= 2 * F32[k], (k, x)


def exchange(program, folder):
    """A model that fattn trained and wrote goes on in llm.c, and back."""
    run(FATTN, "train", "--init", "start.bin", "--context", str(T), "--batch", str(B), "--data", "tokens.bin", "--val",
        "tokens.bin", "--steps", "2", "--checkpoint", "two", cwd=folder)
    run(FATTN, "convert", "two", "two.bin", cwd=folder)
    back = os.path.join(folder, "theirs")
    os.mkdir(back)
    done = run(program, os.path.join(folder, "two.bin"), os.path.join(folder, "tokens.bin"), str(B), str(T), "1", back)
    one_step = ["--context", str(T), "--batch", str(B), "--data", "tokens.bin", "--val", "tokens.bin", "--steps", "1",
                "--checkpoint", "-"]
    said = run(FATTN, "train", "--init", "two.bin", *one_step, "--json", "-", cwd=folder)
    first = [line for line in said.stdout.split("\n") if '"event": "step"' in line][0]
    ours, theirs = float(first.split('"loss": ')[1].split(",")[0]), float(done.stderr)
    print(f"fattn's model in llm.c: loss {theirs:.7f}, in fattn {ours:.7f}")
    assert abs(ours - theirs) <= 2 * F32["losses"]
    said = run(FATTN, "train", "--init", "theirs/model.bin", *one_step, cwd=folder)
    assert "begun with" in said.stdout


def main():
    clone = os.environ.get("LLM_C", "")
    if not clone or not os.path.exists(os.path.join(clone, "train_gpt2.c")):
        print("skipped: LLM_C names no clone of llm.c" + (f": {clone}" if clone else ""))
        return parity.SKIPPED
    if not shutil.which("gcc"):
        print("skipped: no gcc")
        return parity.SKIPPED
    with tempfile.TemporaryDirectory() as folder:
        program = build(clone, folder)
        order(program, folder)
        steps(program, folder)
        exchange(program, folder)
    return 0


sys.exit(main())
