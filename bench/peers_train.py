"""fattn train beside PyTorch: GPT-2 124M's size, bf16, random tokens, rounds interleaved in one run.

    python3 bench/peers_train.py --fattn build/cuda/bin/fattn [--batch 64 --context 1024] [--rounds 3]

The peer is GPT-2 as it is usually written (learned positions, LayerNorm, biases, tied head; float32
parameters under autocast) through torch.compile, scaled_dot_product_attention (--attention flash is
FlashAttention-2, cudnn is cuDNN's) and fused AdamW with clipping. fattn's model is the same, with a softmax over
50257 of the 50304 columns (--option --arch fattn --vocab 50304: its own architecture). Each round measures
`fattn train` and then the peer, over --steps steps after warm-up; the table has the medians. Needs PyTorch
with Triton and a C compiler, and about two minutes."""
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

VOCAB, LAYERS, HEADS, WIDTH = 50304, 12, 12, 768


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (y.view(B, T, HEADS, C // HEADS).transpose(1, 2)
                   for y in self.qkv(self.ln1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, context):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(context, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln = nn.LayerNorm(WIDTH)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, 0, 0.02)

    def forward(self, ids, targets):
        x = self.wte(ids) + self.wpe.weight[:ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))


class Peer:
    """A compiled training step with one attention backend."""

    def __init__(self, attention, batch, context):
        self.name, self.shape = f"PyTorch {torch.__version__}, {attention}", (batch, context)
        torch.backends.cuda.enable_flash_sdp(attention == "flash")
        torch.backends.cuda.enable_cudnn_sdp(attention == "cudnn")
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)
        torch.manual_seed(1)
        self.model = GPT(context).cuda()
        self.forward = torch.compile(self.model)
        self.adamw = torch.optim.AdamW(self.model.parameters(), lr=6e-4, betas=(0.9, 0.99),
                                       weight_decay=0.1, fused=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start = time.time()
        for _ in range(5):
            self.step()
        torch.cuda.synchronize()
        self.set_up = time.time() - start
        self.memory = torch.cuda.max_memory_allocated() - before + sum(
            p.numel() * p.element_size() for p in self.model.parameters())

    def step(self):
        ids = torch.randint(VOCAB, self.shape, device="cuda")
        targets = torch.randint(VOCAB, self.shape, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.forward(ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)

    def measure(self, steps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(3):
            self.step()
        begin.record()
        for _ in range(steps):
            self.step()
        end.record()
        torch.cuda.synchronize()
        return steps * self.shape[0] * self.shape[1] / (1e-3 * begin.elapsed_time(end))


def fattn(o):
    """Tokens per second after the first steps, and bytes of device memory at the peak."""
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "log")
        subprocess.run([o.fattn, "train", "--preset", "gpt2-124m", "--device", "cuda", "--batch",
                        str(o.batch), "--context", str(o.context), "--steps", str(o.steps + 5),
                        "--json", log] + o.option, check=True, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL)
        with open(log) as lines:
            speed = [e for e in map(json.loads, lines) if e["event"] == "speed"][-1]
    return speed["tokens_per_second"], speed["peak_bytes"]


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--fattn", required=True, help="the program")
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--context", type=int, default=1024)
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--attention", choices=["flash", "cudnn"], default="flash", help="of PyTorch")
    p.add_argument("--option", nargs="*", default=[], help="further options of fattn train")
    o = p.parse_args()
    torch.set_float32_matmul_precision("high")
    peer = Peer(o.attention, o.batch, o.context)
    print(f"{peer.name}: {peer.set_up:.0f} s to compile and warm up", flush=True)
    speed, memory = {peer.name: [], "fattn": []}, {peer.name: peer.memory}
    for _ in range(o.rounds):
        tokens, memory["fattn"] = fattn(o)
        speed["fattn"].append(tokens)
        speed[peer.name].append(peer.measure(o.steps))
    ours = statistics.median(speed["fattn"])
    print(f"{torch.cuda.get_device_name()}, B {o.batch} T {o.context}, {o.steps} steps of each round")
    print(f"{'':28s} {'tokens/s':>9s} {'least':>9s} {'most':>9s} {'GiB':>6s} {'fattn is':>9s}")
    for name, s in speed.items():
        median = statistics.median(s)
        print(f"{name:28s} {median:9.0f} {min(s):9.0f} {max(s):9.0f} {memory[name] / 2**30:6.2f} "
              f"{ours / median:8.3f}x")


if __name__ == "__main__":
    sys.exit(main())
