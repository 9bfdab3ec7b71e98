"""PyTorch's FSDP2 over gloo on the reference gpt: the time of a step, and what a rank holds.

    python3 -m venv V && V/bin/pip install torch numpy
    V/bin/python bench/fsdp_peer.py [--ranks 2] [--batch 16] [--steps 6] [--way fsdp|ddp]

Each rank is a process with one thread; every block is a unit of `fully_shard`, and so is the rest. The batch is that of all
ranks together, 256 tokens each; AdamW. Beside it:

    polyreme bench step --job gpt --ranks 2 --transport tcp --batch 16 --shard-weights --json
    polyreme bench step --job gpt --ranks 2 --transport tcp --batch 16 --json

Nothing else should run meanwhile. Prints one JSON object, with the losses of the first steps (other weights and samples than ours:
they show only that it trains).
"""

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F

VOCAB, WIDTH, HEADS, LAYERS, CONTEXT = 256, 384, 6, 6, 256

# Steps before the timed ones.
WARM_UP = 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        d = WIDTH
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.proj(a)
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x)).flatten(0, 1)


def sharded(gpt, ranks):
    """The model with every block, and the rest, sharded over the ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ranks,))
    for block in gpt.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(gpt, mesh=mesh)


def held_bytes(model, opt):
    """Bytes of this rank's weights, gradients and moments."""
    local = lambda t: t.to_local() if hasattr(t, "to_local") else t
    params = [p for p in model.parameters()]
    tensors = params + [p.grad for p in params if p.grad is not None]
    tensors += [t for state in opt.state.values() for t in state.values() if torch.is_tensor(t) and t.dim() > 0]
    return sum(local(t).numel() * local(t).element_size() for t in tensors)


def rank_main(rank, args, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=args.ranks)
    torch.manual_seed(0)
    model = Gpt()
    x = torch.randint(0, VOCAB, (args.batch, CONTEXT)).chunk(args.ranks)[rank]
    y = torch.randint(0, VOCAB, (args.batch, CONTEXT)).chunk(args.ranks)[rank]
    model = sharded(model, args.ranks) if args.way == "fsdp" else nn.parallel.DistributedDataParallel(model)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
    times, losses = [], []
    for k in range(WARM_UP + args.steps):
        dist.barrier()
        start = time.perf_counter()
        loss = F.cross_entropy(model(x), y.reshape(-1))
        loss.backward()
        opt.step()
        held = held_bytes(model, opt)
        opt.zero_grad()
        dist.barrier()
        if k >= WARM_UP:
            times.append(time.perf_counter() - start)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(round(mean.item() / args.ranks, 4))
    if rank == 0:
        report = {
            "peer": "pytorch " + torch.__version__,
            "way": args.way,
            "ranks": args.ranks,
            "batch": args.batch,
            "step_ms": round(statistics.median(times) * 1e3, 1),
            "held_mib": round(held / 2**20, 1),
            "first_losses": losses[:3],
        }
        print(json.dumps(report), flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--way", choices=["fsdp", "ddp"], default="fsdp")
    parser.add_argument("--port", type=int, default=29519)
    args = parser.parse_args()
    mp.spawn(rank_main, args=(args, args.port), nprocs=args.ranks)


if __name__ == "__main__":
    main()
