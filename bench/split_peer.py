"""A gpt that PyTorch's own packages split over two ranks, and the same one split by Polyreme: losses of the same steps.

    python3 -m venv V && V/bin/pip install torch numpy safetensors
    cargo build --release
    V/bin/python bench/split_peer.py [--steps 20]

PyTorch writes the weights that both begin with. The text has as many windows as a step has samples, so every step sees all of them
and their order does not matter. PyTorch runs two processes over gloo: `pipelining` (1F1B, ZBVZeroBubble) with the microbatches that
Polyreme has, and `tensor.parallel`. Prints a JSON object for each split, with the largest distance between losses; exits with 1 if
one is above 1e-4.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

ROOT = pathlib.Path(__file__).resolve().parent.parent
LAYERS, WIDTH, HEADS, CONTEXT, VOCAB = 4, 128, 4, 64, 256
BATCH, MICROBATCHES, RANKS, LR = 16, 8, 2, 1e-3
LIMIT = 1e-4

JOB = f"""
[model]
kind = "gpt"
layers = {LAYERS}
width = {WIDTH}
heads = {HEADS}
context = {CONTEXT}
weights = "start.safetensors"

[data]
kind = "text"
path = "text.txt"
validation = 0

[train]
batch = {BATCH}
optimizer = {{ kind = "adamw", lr = {LR}, weight_decay = 0.01 }}
"""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = HEADS
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        n, t, _ = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, -1)
        x = x + self.proj(a)
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """Blocks `first..last`, with the embeddings before the first and the head after the last."""

    def __init__(self, first=0, last=LAYERS):
        super().__init__()
        if first == 0:
            self.tok, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleDict({str(k): Block() for k in range(first, last)})
        if last == LAYERS:
            self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x):
        if hasattr(self, "tok"):
            x = self.tok(x) + self.pos(torch.arange(x.shape[1]))
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.ln(x)) if hasattr(self, "head") else x


def load(model, weights):
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    return model


def loss_of(logits, labels):
    return F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1))


def optimizer(parameters, **more):
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=0.01, **more)


def pipeline(rank, weights, schedule):
    from torch.distributed import pipelining as pp

    chunks = 1 if schedule == "1F1B" else 2
    cuts = [0, 2, 4] if chunks == 1 else [0, 1, 2, 3, 4]
    n = len(cuts) - 1
    mine = [rank] if chunks == 1 else [rank, n - 1 - rank]
    parts = [load(Gpt(cuts[i], cuts[i + 1]), weights) for i in mine]
    stages = [pp.PipelineStage(part, i, n, torch.device("cpu")) for part, i in zip(parts, mine)]
    plan = pp.schedules.get_schedule_class(schedule)(stages[0] if chunks == 1 else stages, MICROBATCHES, loss_fn=loss_of)
    opt = optimizer([p for part in parts for p in part.parameters()])
    first, last = 0 in mine, n - 1 in mine

    def step(x, y):
        opt.zero_grad()
        losses = []
        plan.step(*([x] if first else []), **({"target": y, "losses": losses} if last else {}))
        opt.step()
        # Whichever rank has the last stage tells the other.
        mean = torch.tensor([torch.stack(losses).mean().item() if last else 0.0], dtype=torch.float64)
        dist.all_reduce(mean)
        return mean.item()

    return step


def tensor(rank, weights):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    gpt = load(Gpt(), weights)
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in gpt.blocks.values():
        # q, k and v of a head must be on one rank: their rows are put beside each other before the cut.
        for p in (block.qkv.weight, block.qkv.bias):
            p.data.copy_(p.data.view(3, RANKS, WIDTH // RANKS, -1).transpose(0, 1).reshape(p.shape))
        block.heads = HEADS // RANKS
        ways = {"qkv": ColwiseParallel(), "proj": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh, ways)
    opt = optimizer(gpt.parameters(), foreach=False)

    def step(x, y):
        opt.zero_grad()
        loss = loss_of(gpt(x), y)
        loss.backward()
        opt.step()
        return loss.item()

    return step


def rank_main(rank, folder, way, schedule, steps):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29519")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    tokens = torch.tensor(list((folder / "text.txt").read_bytes()))
    x, y = tokens[:-1].view(BATCH, CONTEXT), tokens[1:].view(BATCH, CONTEXT)
    weights = load_file(folder / "start.safetensors")
    step = tensor(rank, weights) if way == "tensor" else pipeline(rank, weights, schedule)
    losses = [step(x, y) for _ in range(steps)]
    if rank == 0:
        (folder / "losses.json").write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


def theirs(folder, way, schedule, steps):
    mp.spawn(rank_main, args=(folder, way, schedule, steps), nprocs=RANKS)
    return json.loads((folder / "losses.json").read_text())


def ours(folder, name, steps, settings):
    binary = ROOT / "target/release/polyreme"
    sets = [flag for s in settings for flag in ("--set", s)]
    args = ["train", "job.toml", "--output", name, "--threads", "1", "--ranks", str(RANKS), "--set", f"train.steps={steps}", "--set", "train.log_every=1", *sets]
    subprocess.run([binary, *args], cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [line["train_loss"] for line in lines if "train_loss" in line]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    micro = f"parallel.microbatches={MICROBATCHES}"
    splits = [
        ("1f1b", ("pipeline", "1F1B"), ["parallel.stage=2", micro, "parallel.schedule=1f1b"]),
        ("zb-v", ("pipeline", "ZBVZeroBubble"), ["parallel.stage=2", micro, "parallel.schedule=zb-v"]),
        ("tensor", ("tensor", ""), ["parallel.tensor=2"]),
    ]
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        text = (ROOT / "examples/data/moby-dick.txt").read_bytes()[5000:]
        (folder / "text.txt").write_bytes(text[: BATCH * CONTEXT + 1])
        (folder / "job.toml").write_text(JOB)
        torch.manual_seed(0)
        save_file(Gpt().state_dict(), folder / "start.safetensors")
        for name, (way, schedule), settings in splits:
            a, b = ours(folder, name, steps, settings), theirs(folder, way, schedule, steps)
            assert len(a) == len(b) == steps, (len(a), len(b))
            far = max(abs(x - y) for x, y in zip(a, b))
            worst = max(worst, far)
            print(json.dumps({"split": name, "peer": f"pytorch {torch.__version__} {way} {schedule}".strip(), "steps": steps,
                              "first": [a[0], b[0]], "last": [a[-1], b[-1]], "largest_distance": far}), flush=True)
    sys.exit(worst > LIMIT)


if __name__ == "__main__":
    main()
