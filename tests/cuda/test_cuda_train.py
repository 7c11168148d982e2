"""fattn train on CPU and GPU: loss curves agree, checkpoints can be resumed on the other device, deterministic
runs repeat their bits, steps as CUDA graphs have those of steps op by op. FATTN_BUILD/bin/fattn; 77 without a
device."""
import json
import math
import os
import subprocess
import sys
import tempfile

FATTN = os.path.join(os.environ["FATTN_BUILD"], "bin", "fattn")
STEPS, HALF, BATCH, CONTEXT = 20, 10, 16, 64
RUN = ["--task", "recall", "--target", "0", "--batch", str(BATCH), "--context", str(CONTEXT), "--seed", "5",
       "--steps", str(STEPS), "--checkpoint-every", str(HALF)]
# Two batches a step, a table with padding, a schedule of llm.c.
GPT2 = ["--task", "tokens", "--arch", "gpt2", "--vocab", "300", "--layers", "2", "--channels", "64", "--heads", "4",
        "--batch", str(BATCH), "--context", str(CONTEXT), "--total-batch", str(2 * BATCH * CONTEXT), "--warmup", "2",
        "--schedule", "linear", "--lr", "3e-3", "--steps", str(STEPS), "--checkpoint-every", str(HALF)]
SKIPPED = 77


def train(folder, name, *options):
    """The losses by step, and where the checkpoints are."""
    log = os.path.join(folder, name + ".jsonl")
    checkpoints = os.path.join(folder, name)
    command = [FATTN, "train", *options, "--checkpoint", checkpoints, "--json", log]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}")
    with open(log) as lines:
        events = [json.loads(line) for line in lines]
    return {e["step"]: e["loss"] for e in events if e["event"] == "step"}, checkpoints


def apart(a, b):
    assert a.keys() == b.keys(), (a.keys(), b.keys())
    return max(abs(a[step] - b[step]) for step in a)


def rest_of(losses):
    return {step: loss for step, loss in losses.items() if step > HALF}


def gpt2(folder):
    """GPT-2 with accumulated gradients: CPU and GPU, and a checkpoint that goes from one to the other."""
    cpu, on_cpu = train(folder, "gpt2-cpu", *GPT2)
    gpu, _ = train(folder, "gpt2-gpu", *GPT2, "--device", "cuda")
    narrow, _ = train(folder, "gpt2-bf16", *GPT2, "--device", "cuda", "--dtype", "bf16")
    half, on_gpu = train(folder, "gpt2-f16", *GPT2, "--device", "cuda", "--dtype", "f16")
    moved, _ = train(folder, "gpt2-f16-to-cpu", "--resume", os.path.join(on_gpu, f"step-{HALF:09d}.h5"))
    rest, _ = train(folder, "gpt2-to-gpu", "--resume", os.path.join(on_cpu, f"step-{HALF:09d}.h5"), "--device", "cuda")
    whole = rest_of(cpu)
    limit = math.sqrt(2) * bound(cpu) # of twice the tokens
    print(f"GPT-2: loss {cpu[1]:.4f} to {cpu[STEPS]:.4f}; F32 on the GPU at most {apart(cpu, gpu):.1e} from the CPU, "
          f"resumed there {apart(whole, rest):.1e}, bound {limit:.1e}; BF16 {apart(cpu, narrow):.1e}, "
          f"bound {0.02 * cpu[1]:.1e}")
    assert apart(cpu, gpu) <= limit and apart(whole, rest) <= limit
    assert 0 < apart(cpu, narrow) <= 0.02 * cpu[1]
    # F16 rounds to an eighth of BF16's unit. The loss scale, 65536, leaves room at these sizes: no step is skipped.
    print(f"F16 {apart(cpu, half):.1e}, then on the CPU {apart(moved, rest_of(half)):.1e}, bound {0.0025 * cpu[1]:.1e}")
    assert 0 < apart(cpu, half) <= 0.0025 * cpu[1] and apart(moved, rest_of(half)) <= 0.0025 * cpu[1]


def results(folder, name, *options):
    """What the log says of each step and evaluation but its time, whether steps were graphs, and the checkpoints."""
    _, checkpoints = train(folder, name, *options)
    with open(checkpoints + ".jsonl") as lines:
        events = [json.loads(line) for line in lines]
    assert not any(e["event"] == "no_graph" for e in events), events
    start = next(e for e in events if e["event"] in ("start", "resume"))
    untimed = ("elapsed", "tokens_per_second", "peak_bytes")
    told = [{k: v for k, v in e.items() if k not in untimed} for e in events if e["event"] in ("step", "eval", "end")]
    return told, start["graph"], checkpoints


def graphs(folder):
    """The same bits with graphs and without, in every dtype, with dropout, evaluations between, and resumed."""
    often = ["--device", "cuda", "--deterministic", "--eval-every", "7"]
    small = ["--task", "tokens", "--arch", "gpt2", "--vocab", "300", "--layers", "2", "--channels", "64", "--heads",
             "4", "--batch", str(BATCH), "--context", str(CONTEXT), "--schedule", "linear", "--steps", str(STEPS),
             "--checkpoint-every", str(HALF)]
    for name, options in (("f32", [*RUN, "--dropout", "0.1"]), ("bf16", [*RUN, "--dtype", "bf16"]),
                          ("f16", [*RUN, "--dtype", "f16"]), ("gpt2", small),
                          ("standard", [*RUN, "--algorithm", "standard", "--dropout", "0.1", "--dtype", "bf16"])):
        base = [*options, *often]
        with_graph, is_graph, checkpoints = results(folder, f"graph-{name}", *base)
        plain, is_plain, _ = results(folder, f"ops-{name}", *base, "--no-graph")
        assert is_graph and not is_plain, name
        assert sum(e["event"] == "step" for e in plain) == STEPS
        assert with_graph == plain, (name, with_graph, plain)
        rest, _, _ = results(folder, f"rest-{name}", "--resume", os.path.join(checkpoints, f"step-{HALF:09d}.h5"),
                             "--device", "cuda", "--deterministic")
        whole = [e for e in with_graph if e["step"] > HALF]
        assert [e for e in rest if e["step"] > HALF] == whole, name
        print(f"graphs, {name}: the bits of steps op by op, also resumed after step {HALF}")
    _, is_graph, _ = results(folder, "graph-tree", *GPT2, "--device", "cuda", "--deterministic")
    assert not is_graph, "gradients of several passes are added as those of ranks"
    passes, is_graph, _ = results(folder, "graph-passes", *GPT2, "--device", "cuda")
    plain, _, _ = results(folder, "ops-passes", *GPT2, "--device", "cuda", "--no-graph")
    losses = [{e["step"]: e["loss"] for e in log if e["event"] == "step"} for log in (passes, plain)]
    limit = math.sqrt(2) * bound(losses[1])
    print(f"graphs of two passes a step: {apart(*losses):.1e} from those op by op, bound {limit:.1e}")
    assert is_graph and apart(*losses) <= limit


def bound(losses):
    """A gradient is a sum over all tokens, so its rounding errors are about sqrt(tokens) units of the last
    place. Adam makes relative errors of a gradient such of its step, and all steps together changed the
    loss by what it fell; to that comes the rounding of the loss itself. Four times that."""
    unit = 2**-24 * math.sqrt(BATCH * CONTEXT)
    return 4 * unit * (max(losses.values()) + max(losses.values()) - min(losses.values()))


def main():
    probe = subprocess.run([FATTN, "train", *RUN, "--device", "cuda", "--steps", "1", "--checkpoint", "-"],
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if "FATTN_E_UNSUPPORTED" in probe.stdout:
        print("skipped:", probe.stdout.strip())
        return SKIPPED
    with tempfile.TemporaryDirectory() as folder:
        cpu, on_cpu = train(folder, "cpu", *RUN)
        gpu, on_gpu = train(folder, "gpu", *RUN, "--device", "cuda")
        narrow, _ = train(folder, "bf16", *RUN, "--device", "cuda", "--dtype", "bf16")
        limit = bound(cpu)
        print(f"{STEPS} steps: loss {cpu[1]:.4f} to {cpu[STEPS]:.4f}; F32 on the GPU is at most "
              f"{apart(cpu, gpu):.1e} from the CPU, bound {limit:.1e}")
        assert apart(cpu, gpu) <= limit
        # Each weight and activation is rounded to 2^-9 of itself; 2 % of the loss is five of them.
        print(f"BF16: at most {apart(cpu, narrow):.1e}, bound {0.02 * cpu[1]:.1e}")
        assert 0 < apart(cpu, narrow) <= 0.02 * cpu[1]

        half = f"step-{HALF:09d}.h5"
        for name, start, device in (("to-gpu", on_cpu, "cuda"), ("to-cpu", on_gpu, "cpu")):
            rest, _ = train(folder, name, "--resume", os.path.join(start, half), "--device", device)
            whole = {step: loss for step, loss in cpu.items() if step > HALF}
            print(f"resumed {name} after step {HALF}: at most {apart(whole, rest):.1e} from the CPU's run")
            assert apart(whole, rest) <= limit

        twice = [train(folder, f"again{n}", *RUN, "--device", "cuda", "--deterministic")[0]
                 for n in range(2)]
        assert apart(*twice) == 0, "deterministic runs differ"
        print("deterministic runs repeat their losses to the bit")
        gpt2(folder)
        graphs(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
