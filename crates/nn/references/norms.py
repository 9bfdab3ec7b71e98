"""Batch norm on several ranks: makes `norms.json`. `python norms.py`.

PyTorch's `SyncBatchNorm` refuses tensors of a CPU ("expected input tensor to be on GPU"), over gloo too. What it
promises is `BatchNorm2d` over the whole batch of all ranks, so that is the truth of the cases with `sync`: one process
that has the batch of all. Cases without it are trained by `DistributedDataParallel`, a process a rank, over gloo, each with
the statistics of its own samples; the running ones are their mean over the ranks in the end. Shards may be uneven: a rank's loss is
scaled by its share of the batch, so that the mean over ranks is that over samples.

All in float64, from f32-exact inputs named `CASE.TENSOR`, which README.md tells how to fill.
"""

import json
import os
import pathlib

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import fill

HERE = pathlib.Path(__file__).parent
CHANNELS, HEIGHT, WIDTH = 4, 3, 2
STEPS, LR, MOMENTUM = 3, 0.5, 0.9
FILLS = {
    "x": (0.3, 1.0),
    "w": (0.0, 1.0),
    "conv.weight": (0.0, 0.8),
    "bn.weight": (1.0, 0.5),
    "bn.bias": (0.0, 1.0),
    "bn.running_mean": (0.0, 0.3),
    "bn.running_var": (1.0, 0.5),
}


def tensor(case, name, *shape, of=None):
    """`of`: whose fill it has, if its name is not in the table."""
    return torch.from_numpy(fill.filled(f"{case}.{name}", shape, *FILLS[of or name])).double()


def digits(value):
    return [float(f"{v:.8g}") for v in value.detach().flatten().tolist()]


class Net(nn.Module):
    """A convolution of single pixels, so that the gradient of the norm's input is seen, and the norm."""

    def __init__(self, case):
        super().__init__()
        self.conv = nn.Conv2d(3, CHANNELS, 1, bias=False)
        self.bn = nn.BatchNorm2d(CHANNELS)
        self.double()
        state = {n: tensor(case, n, *v.shape) if n in FILLS else v for n, v in self.state_dict().items()}
        self.load_state_dict(state)

    def forward(self, x):
        return self.bn(self.conv(x))


def once(case, shards):
    """One norm over the batch of all ranks: outputs, running statistics, and the gradients of sum(y * w)."""
    n = sum(shards)
    norm = Net(case).bn
    x = tensor(case, "x", n, CHANNELS, HEIGHT, WIDTH).requires_grad_()
    y = norm(x)
    (y * tensor(case, "w", *y.shape)).sum().backward()
    values = {
        "y": y,
        "dx": x.grad,
        "dweight": norm.weight.grad,
        "dbias": norm.bias.grad,
        "running_mean": norm.running_mean,
        "running_var": norm.running_var,
    }
    return {k: digits(v) for k, v in values.items()}


def steps(case, model, net, n, rows, scale):
    """Trains on some rows of the batch; `scale` is for the loss. The losses of these rows."""
    optimizer = torch.optim.SGD(net.parameters(), LR, MOMENTUM)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x = tensor(case, f"x{step}", n, 3, HEIGHT, WIDTH, of="x")[rows]
        y = model(x)
        loss = (y * tensor(case, f"w{step}", n, CHANNELS, HEIGHT, WIDTH, of="w")[rows]).mean()
        (loss * scale).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def results(net, losses):
    return {"losses": digits(torch.tensor(losses, dtype=torch.float64)), **{n: digits(v) for n, v in net.state_dict().items() if n in FILLS}}


def rank_of(rank, case, shards, path):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29617")
    dist.init_process_group("gloo", rank=rank, world_size=len(shards))
    n, first = sum(shards), sum(shards[:rank])
    net = Net(case)
    model = nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)
    share = shards[rank] / n
    losses = steps(case, model, net, n, slice(first, first + shards[rank]), share * len(shards))
    losses = torch.tensor(losses, dtype=torch.float64) * share
    dist.all_reduce(losses)
    for buffer in (net.bn.running_mean, net.bn.running_var):
        dist.all_reduce(buffer)
        buffer /= len(shards)
    if rank == 0:
        path.write_text(json.dumps(results(net, losses.tolist())))
    dist.destroy_process_group()


def trained(case, shards, sync):
    if sync:
        net = Net(case)
        return results(net, steps(case, net, net, sum(shards), slice(None), 1.0))
    path = HERE / ".norms.rank0"
    mp.spawn(rank_of, (case, shards, path), nprocs=len(shards))
    got = json.loads(path.read_text())
    path.unlink()
    return got


def main():
    cases = []
    for name, shards in [("even", [4, 4]), ("uneven", [3, 1, 5])]:
        row = {"case": name, "shards": shards}
        cases.append({**row, "kind": "once", "values": once(name, shards)})
        for kind, sync in [("sync", True), ("local", False)]:
            cases.append({**row, "kind": kind, "values": trained(name, shards, sync)})
    head = {
        "channels": CHANNELS, "height": HEIGHT, "width": WIDTH, "lr": LR, "momentum": MOMENTUM, "fills": FILLS
    }
    rows = ",\n".join(json.dumps(c) for c in cases)
    (HERE / "norms.json").write_text(json.dumps(head)[:-1] + ', "cases": [\n' + rows + "\n]}\n")


if __name__ == "__main__":
    main()
