#!/usr/bin/env python3
"""Attention over the GPUs of this machine by PyTorch, to read beside bench/ranks.c: its context parallelism (a ring, in
both of its rotations) and Ulysses by plain all-to-all around its fused attention. bf16, causal, forward and backward.

    python3 bench/peers_ranks.py [N...] [HqxHkvxD...]

Prints ms of a rank, the slowest, and the efficiency: one GPU's time for the whole sequence over GPUs times that.
"""
import re
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROUNDS = 3


def timed(call, calls):
    best = 1e9
    for round in range(1 + ROUNDS):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        if round:
            best = min(best, (time.perf_counter() - begin) / calls)
    slowest = torch.tensor(best, device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def tensors(Hq, Hkv, N, D, grad=True):
    make = lambda H: torch.randn(1, H, N, D, device="cuda", dtype=torch.bfloat16).requires_grad_(grad)
    return make(Hq), make(Hkv), make(Hkv)


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def both(forward, q, k, v):
    """A call that goes forward and back, with one gradient of its output for all calls."""
    d_o = torch.randn_like(forward(q, k, v))

    def call():
        torch.autograd.grad(forward(q, k, v), (q, k, v), d_o)
    return call


class Exchange(torch.autograd.Function):
    """[1, H, n, D] of each rank to [1, H / size, size n, D], or back."""

    @staticmethod
    def forward(ctx, x, to_heads):
        ctx.to_heads = to_heads
        return exchange(x, to_heads)

    @staticmethod
    def backward(ctx, d):
        return exchange(d, not ctx.to_heads), None


def exchange(x, to_heads):
    size = dist.get_world_size()
    _, H, n, D = x.shape
    if to_heads:
        parts = x.reshape(size, H // size, n, D).contiguous()
    else:
        parts = x.reshape(H, size, n // size, D).transpose(0, 1).contiguous()
    come = torch.empty_like(parts)
    dist.all_to_all_single(come, parts)
    if to_heads:
        return come.transpose(0, 1).reshape(1, H // size, size * n, D)
    return come.reshape(1, size * H, n // size, D)


def ulysses(q, k, v):
    return Exchange.apply(attend(*(Exchange.apply(x, True) for x in (q, k, v))), False)


def ring(mesh, rotate, Hq, Hkv, N, D, calls):
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental import _attention
    _attention.set_rotate_method(rotate)
    q, k, v = tensors(Hq, Hkv, N, D, grad=False)
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2], no_restore_buffers={q, k, v}):
        for x in (q, k, v):
            x.requires_grad_()
        return timed(both(attend, q, k, v), calls)


def row(mesh, Hq, Hkv, D, N):
    size = dist.get_world_size()
    calls = max(1, min(20, int(0.15 / (14e0 * Hq * N * N * D / 2 / 5e14))))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        one = timed(both(attend, *tensors(Hq, Hkv, N, D)), calls)
    forms = {"ulysses": lambda: timed(both(ulysses, *tensors(Hq, Hkv, N // size, D)), calls)}
    for rotate in ("alltoall", "allgather"):
        forms[f"ring, {rotate}"] = lambda rotate=rotate: ring(mesh, rotate, Hq, Hkv, N, D, calls)
    for name, run in forms.items():
        for backend, text in ((SDPBackend.CUDNN_ATTENTION, "cuDNN"), (SDPBackend.FLASH_ATTENTION, "FA2")):
            try:
                with sdpa_kernel(backend):
                    ms = run()
                result = f"{1e3 * ms:9.3f} {one / (size * ms):6.3f}"
            except Exception as error:
                result = f"refused: {str(error).splitlines()[0][:60]}"
            if dist.get_rank() == 0:
                print(f"{f'{Hq}/{Hkv} x {D}':<12} {N:>7} {name:<16} {text:<6} {1e3 * one:9.3f} | {result}", flush=True)


def work(rank, size, models, lengths):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29511", rank=rank, world_size=size,
                            device_id=torch.device("cuda", rank))
    torch.manual_seed(rank)
    mesh = dist.device_mesh.init_device_mesh("cuda", (size,))
    if rank == 0:
        print(f"PyTorch {torch.__version__}, {size} x {torch.cuda.get_device_name()}; ms of forward and backward")
        print(f"{'heads x d':<12} {'N':>7} {'form':<16} {'by':<6} {'one GPU':>9} | {'ms':>9} {'eff.':>6}")
    for Hq, Hkv, D in models:
        for N in lengths:
            row(mesh, Hq, Hkv, D, N)
    dist.destroy_process_group()


def main():
    models = [tuple(map(int, a.split("x"))) for a in sys.argv[1:] if re.fullmatch(r"\d+x\d+x\d+", a)]
    lengths = [int(a) for a in sys.argv[1:] if a.isdigit()]
    size = torch.cuda.device_count()
    mp.spawn(work, (size, models or [(16, 16, 128), (32, 8, 128)], lengths or [8192, 16384, 65536]), nprocs=size)


if __name__ == "__main__":
    main()
