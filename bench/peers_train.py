"""fattn train beside PyTorch: GPT-2's architecture, random tokens, rounds interleaved in one run.

    python3 bench/peers_train.py --fattn build/cuda/bin/fattn [--batch 64 --context 1024] [--rounds 3]
    python3 bench/peers_train.py --fattn build/cuda/bin/fattn --layers 4 --channels 128 --heads 4 --vocab 96 \
        --batch 8 --context 256 --steps 1000 --ways eager compiled graphs [--dtype f32] [--device cpu]

Without sizes it is GPT-2 124M: fattn's model is the same as the peer's, with a softmax over 50257 of its 50304
columns (--option --arch fattn --vocab 50304: its own architecture). The peer is GPT-2 as it is usually written
(learned positions, LayerNorm, biases, tied head) with scaled_dot_product_attention (--attention flash is
FlashAttention-2, cudnn is cuDNN's, auto PyTorch's choice), fused AdamW and clipping; --dtype bf16: float32
parameters under autocast; f32 on a GPU: products in TF32 in both, fattn with --tf32. Ways: eager, compiled
(torch.compile), graphs (the same with CUDA graphs, mode="reduce-overhead"). Each round measures `fattn train` and
then each peer, over --steps steps after warm-up; the table has the medians. Needs PyTorch, to compile Triton and a
C compiler."""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

LARGE = {"layers": 12, "channels": 768, "heads": 12, "vocab": 50304}


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (y.view(B, T, self.heads, C // self.heads).transpose(1, 2)
                   for y in self.qkv(self.ln1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, o):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(o.vocab, o.channels), nn.Embedding(o.context, o.channels)
        self.blocks = nn.ModuleList(Block(o.channels, o.heads) for _ in range(o.layers))
        self.ln = nn.LayerNorm(o.channels)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, 0, 0.02)

    def forward(self, ids, targets):
        x = self.wte(ids) + self.wpe.weight[:ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


class Peer:
    """A training step, compiled or not."""

    def __init__(self, o, way):
        self.name = f"PyTorch {torch.__version__}, {o.attention}, {way}"
        self.o, self.shape, self.on_gpu = o, (o.batch, o.context), o.device == "cuda"
        torch.manual_seed(1)
        torch.compiler.reset()
        self.model = GPT(o).to(o.device)
        self.forward = self.model if way == "eager" else torch.compile(
            self.model, mode="reduce-overhead" if way == "graphs" else None)
        self.adamw = torch.optim.AdamW(self.model.parameters(), lr=6e-4, betas=(0.9, 0.99),
                                       weight_decay=0.1, fused=True)
        before = torch.cuda.memory_allocated() if self.on_gpu else 0
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        start = time.time()
        for _ in range(5):
            self.step()
        self.finish()
        self.set_up = time.time() - start
        self.memory = torch.cuda.max_memory_allocated() - before + sum(
            p.numel() * p.element_size() for p in self.model.parameters()) if self.on_gpu else 0

    def finish(self):
        if self.on_gpu:
            torch.cuda.synchronize()

    def step(self):
        ids, targets = (torch.randint(self.o.vocab, self.shape, device=self.o.device) for _ in range(2))
        if self.on_gpu:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(self.o.device, torch.bfloat16, enabled=self.o.dtype == "bf16"):
            loss = self.forward(ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)

    def measure(self, steps):
        for _ in range(3):
            self.step()
        self.finish()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.finish()
        return steps * self.shape[0] * self.shape[1] / (time.perf_counter() - start)


def fattn(o):
    """Tokens per second after the first steps, and bytes of memory at the peak."""
    model = ["--preset", "gpt2-124m"]
    if o.sizes:
        model = ["--arch", "gpt2", "--task", "tokens"]
        for name in LARGE:
            model += ["--" + name, str(getattr(o, name))]
    numbers = ["--dtype", o.dtype] + (["--tf32"] if o.dtype == "f32" and o.device == "cuda" else [])
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "log")
        subprocess.run([o.fattn, "train", *model, *numbers, "--device", o.device, "--batch", str(o.batch), "--context",
                        str(o.context), "--steps", str(o.steps + 5), "--checkpoint", "-", "--json", log] + o.option,
                       check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with open(log) as lines:
            speed = [e for e in map(json.loads, lines) if e["event"] == "speed"][-1]
    return speed["tokens_per_second"], speed["peak_bytes"]


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--fattn", required=True, help="the program")
    for name in LARGE:
        p.add_argument("--" + name, type=int)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--context", type=int, default=1024)
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    p.add_argument("--dtype", choices=["bf16", "f32"], default="bf16")
    p.add_argument("--ways", nargs="*", default=["compiled"], choices=["eager", "compiled", "graphs"],
                   help="of PyTorch")
    p.add_argument("--attention", choices=["flash", "cudnn", "auto"],
                   help="of PyTorch: flash for bf16 on a GPU, else auto, unless given")
    p.add_argument("--option", nargs="*", default=[], help="further options of fattn train")
    o = p.parse_args()
    o.sizes = any(getattr(o, name) for name in LARGE)
    for name, size in LARGE.items():
        if not getattr(o, name):
            setattr(o, name, size)
    o.attention = o.attention or ("flash" if o.dtype == "bf16" and o.device == "cuda" else "auto")
    torch.set_float32_matmul_precision("high")
    if o.attention != "auto" and o.device == "cuda":
        torch.backends.cuda.enable_flash_sdp(o.attention == "flash")
        torch.backends.cuda.enable_cudnn_sdp(o.attention == "cudnn")
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)
    peers = []
    for way in o.ways:
        peers.append(Peer(o, way))
        print(f"{peers[-1].name}: {peers[-1].set_up:.0f} s to compile and warm up", flush=True)
    speed, memory = {x.name: [] for x in peers} | {"fattn": []}, {x.name: x.memory for x in peers}
    for _ in range(o.rounds):
        tokens, memory["fattn"] = fattn(o)
        speed["fattn"].append(tokens)
        for peer in peers:
            speed[peer.name].append(peer.measure(o.steps))
    ours = statistics.median(speed["fattn"])
    where = torch.cuda.get_device_name() if o.device == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"{where}, {o.layers} layers x {o.channels}, {o.dtype}, B {o.batch} T {o.context}, {o.steps} steps a round")
    print(f"{'':36s} {'tokens/s':>9s} {'least':>9s} {'most':>9s} {'GiB':>6s} {'fattn is':>9s}")
    for name, s in speed.items():
        median = statistics.median(s)
        print(f"{name:36s} {median:9.0f} {min(s):9.0f} {max(s):9.0f} {memory[name] / 2**30:6.2f} "
              f"{ours / median:8.3f}x")


if __name__ == "__main__":
    sys.exit(main())
