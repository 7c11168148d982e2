"""What `fattn train --arch gpt2` computes, against fp64 (gpt2_reference.py): logits, losses, every gradient, ten
updates. In F32 and F16; `cuda` as first argument: on a GPU, in BF16, too; 77 without one.

Bounds of F32: four times the distances that PyTorch, llm.c's CPU program and this fp64 code have between each other on
a model of these sizes (logits 2.4e-6 of 3.5, losses 1.5e-6, gradients 1.4e-6 of a tensor's largest, parameters after
ten steps 2e-5). The biases of the keys are left out after updates: their gradient is 0 in exact arithmetic, and AdamW
turns its rounding into whole steps. 16 bits: four times the distance that the fp64 code has from itself when it stores
weights and every op's result in their precision; gradients of parameters are F32 and not rounded. The loss is a mean
over tokens, whose distances have either sign: four times what such a mean deviates by, their root mean square over the
root of their number. F16 has no range: with the loss scale no gradient gets too small."""
import os
import subprocess
import sys
import tempfile

import numpy as np

sys.dont_write_bytecode = True # the sources may be read-only
import gpt2_reference as reference

V, VP, L, C, NH, B, T, STEPS = 500, 512, 3, 64, 4, 2, 32, 10
POSITIONS = 40 # more than T: the last eight have no gradient
F32 = {"logits": 4 * 2.4e-6 / 3.5, "losses": 4 * 1.5e-6, "gradients": 4 * 1.4e-6, "parameters": 4 * 2e-5}
PROGRAM = os.path.join(os.environ["FATTN_BUILD"], "bin", "gpt2_steps")
SKIPPED = 77


def file_order(names):
    """llm.c's: by tensor, those of the blocks stacked."""
    kinds = [n[4:] for n in names if n.startswith("h.0.")]
    return ["wte.weight", "wpe.weight"] + [f"h.{layer}.{kind}" for kind in kinds for layer in range(L)] + \
        ["ln_f.weight", "ln_f.bias"]


def write_model(path, p):
    header = np.zeros(256, np.int32)
    header[:8] = 20240326, 3, POSITIONS, V, L, NH, C, VP
    with open(path, "wb") as f:
        f.write(header.tobytes() + b"".join(p[n].astype(np.float32).tobytes() for n in file_order(p)))


def read_numbers(path, like, order, offset=0):
    x, found, at = np.fromfile(path, np.float32, offset=offset).astype(np.float64), {}, 0
    for name in order:
        found[name] = x[at:at + like[name].size].reshape(like[name].shape)
        at += like[name].size
    assert at == len(x), (path, at, len(x))
    return found


def write_tokens(path, tokens):
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(tokens)
    with open(path, "wb") as f:
        f.write(header.tobytes() + tokens.astype(np.uint16).tobytes())


def run(folder, device, dtype, beta2, decay, clip):
    words = [PROGRAM, device, dtype, os.path.join(folder, "start.bin"), os.path.join(folder, "tokens.bin"),
             *map(str, (B, T, STEPS, beta2, decay, clip)), folder]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    if done.returncode == SKIPPED:
        print("skipped:", done.stderr.strip())
        sys.exit(SKIPPED)
    assert done.returncode == 0, done.stderr
    return [float(x) for x in done.stdout.split()]


def reference_is_a_gradient(p, ids, targets):
    """The fp64 code against central differences of itself, in random directions of each tensor."""
    rng = np.random.RandomState(1)
    _, _, g = reference.loss_and_gradients(p, ids, targets, V, L, NH)
    worst = 0
    for name in p:
        d = rng.normal(0, 1, p[name].shape)
        ends = []
        for step in (-1e-5, 1e-5):
            ends.append(reference.loss_and_gradients({**p, name: p[name] + step * d}, ids, targets, V, L, NH)[1])
        want, got = (ends[1] - ends[0]) / 2e-5, (g[name] * d).sum()
        worst = max(worst, abs(want - got) / np.sqrt((g[name] ** 2).sum() + 1e-30))
    print(f"fp64 against central differences: {worst:.1e} of a gradient's norm")
    assert worst < 1e-7 # (1e-5)^2 of third derivatives, and 1e-16/1e-5 of rounding


def largest(x):
    return np.abs(x).max()


def gradients_apart(a, b, p):
    """Relative to a tensor's largest. The biases of a block's queries, keys and values are one tensor."""
    return max(largest(a[n] - b[n]) / largest(b[n]) for n in p)


def losses_of_tokens(logits, targets):
    x = logits - logits.max(-1, keepdims=True)
    return np.log(np.exp(x).sum(-1)) - x[(*np.indices(targets.shape), targets)]


def bounds_of(keep, p, ids, targets):
    logits, _, g = reference.loss_and_gradients(p, ids, targets, V, L, NH)
    rough_logits, _, rough_g = reference.loss_and_gradients(p, ids, targets, V, L, NH, keep)
    apart = losses_of_tokens(rough_logits, targets) - losses_of_tokens(logits, targets)
    return {"logits": 4 * largest(rough_logits - logits) / largest(logits),
            "losses": 4 * np.sqrt((apart ** 2).mean() / apart.size), "gradients": 4 * gradients_apart(rough_g, g, p)}


def check(folder, device, dtype, p, ids, targets, bounds, beta2, decay, clip):
    got = run(folder, device, dtype, beta2, decay, clip)
    logits, _, g = reference.loss_and_gradients(p, ids, targets, V, L, NH)
    losses, after = reference.train(p, ids, targets, V, L, NH, STEPS, 1e-3, beta2, decay, clip)
    found = np.fromfile(os.path.join(folder, "logits"), np.float32).reshape(B, T, VP)
    assert not found[..., V:].any(), "logits of the padding"
    gradients = read_numbers(os.path.join(folder, "gradients"), p, list(p))
    assert not gradients["wte.weight"][V:].any() and not gradients["wpe.weight"][T:].any(), "gradients of the padding"
    worst = {"logits": largest(found[..., :V] - logits) / largest(logits),
             "losses": max(abs(a - b) for a, b in zip(got if dtype == "f32" else got[:1], losses))}
    worst["gradients"] = gradients_apart(gradients, g, p)
    if "parameters" in bounds:
        ended = read_numbers(os.path.join(folder, "model.bin"), p, file_order(p), 1024)
        apart = {n: np.abs(ended[n] - after[n]) for n in p}
        for n in p:
            if n.endswith("c_attn.bias"):
                apart[n][C:2 * C] = 0
        worst["parameters"] = max(map(largest, apart.values()))
        assert not ended["wte.weight"][V:].any(), "padding"
        moved = max(largest(after[n] - p[n]) for n in p)
        assert moved > 5e-3 and losses[-1] < losses[0] - 0.5, (moved, losses)
    print(f"{device} {dtype}, beta2 {beta2}, decay {decay}, clip {clip}: " +
          ", ".join(f"{k} {worst[k]:.1e} (bound {bounds[k]:.1e})" for k in worst))
    for k, x in worst.items():
        assert x <= bounds[k], (k, x, bounds[k])
    assert worst["losses"] > 0 # F32 is not fp64: the numbers come from the program


def main():
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    rng = np.random.RandomState(7)
    tokens = rng.randint(0, V, B * T + 1)
    tokens[5], tokens[9] = V - 1, V - 1
    ids, targets = tokens[:-1].reshape(B, T), tokens[1:].reshape(B, T)
    p = reference.random_parameters(V, VP, POSITIONS, L, C, 3)
    with tempfile.TemporaryDirectory() as folder:
        write_model(os.path.join(folder, "start.bin"), p)
        write_tokens(os.path.join(folder, "tokens.bin"), tokens)
        reference_is_a_gradient(p, ids, targets)
        for settings in ((0.999, 0, 0), (0.95, 0.1, 1)): # llm.c's CPU program; its CUDA program and decay
            check(folder, device, "f32", p, ids, targets, F32, *settings)
        check(folder, device, "f16", p, ids, targets, bounds_of(reference.to_f16, p, ids, targets), 0.95, 0.1, 1)
        check(folder, device, "bf16", p, ids, targets, bounds_of(reference.to_bf16, p, ids, targets), 0.95, 0.1, 1)


if __name__ == "__main__":
    main()
