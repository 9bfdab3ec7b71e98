#!/usr/bin/env python3
"""What a slow link adds to a step, by the format in which gradients travel.

    cargo build --release
    bench/wire.py [--mbits 100] [--job cnn] [--steps 20] [--formats f32 int8 powersgd] [--binary target/release/polyreme] [--torch V/bin/python]

Two ranks of one thread each, in network namespaces that the script makes and deletes, joined by links of --mbits. The step without a link is
that of two processes over loopback, f32. Prints one line for each format: the step, what it takes beyond the step without a link, and that
beside f32's. With --torch, the Python of an environment with PyTorch, the same of its DistributedDataParallel over gloo with `cnn`: plain, and with its
PowerSGD hook (rank 2, from the first step on). Needs root, `ip` and `tc`. Nothing else should run meanwhile.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import predict

FORMATS = ["f32", "bf16", "f16", "int8", "powersgd"]


def step_ms(lines):
    return json.loads(next(line for line in lines.splitlines() if line.startswith("{")))["step_ms"]


def line(name, took, without, plain):
    beyond = took - without
    plain = plain or beyond
    print(f"{name:16}  {took:8.1f} ms  {beyond:8.1f} ms beyond, {beyond / plain:.3f} of f32's", flush=True)
    return plain


def ours(args):
    predict.BINARY = args.binary.resolve()
    command = ["bench", "step", "--job", args.job, "--steps", str(args.steps), "--json", "--transport", "tcp", "--threads", "1"]
    without = step_ms(predict.run([predict.BINARY, *command, "--processes", "2"]))
    print(f"without a link    {without:8.1f} ms")
    plain = None
    for name in args.formats:
        wire = [] if name == "f32" else ["--wire", name]
        with predict.Namespaces(2, args.mbits) as hosts:
            # Ranks in namespaces do not know that they share this machine's cores.
            took = step_ms(hosts.bench([*command, "--no-pin", *wire]))
        plain = line(name, took, without, plain)


def theirs(args):
    predict.BINARY = args.torch
    command = lambda hook: [str(Path(__file__).resolve()), "--gloo", hook, "--steps", str(args.steps)]
    env = lambda rank: dict(os.environ, RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29512")
    start = lambda rank: subprocess.Popen([str(args.torch), *command("plain")], env=env(rank), stdout=subprocess.PIPE, text=True)
    without = step_ms([rank.communicate()[0] for rank in [start(0), start(1)]][0])
    print(f"DDP without a link {without:7.1f} ms")
    plain = None
    for hook in ["plain", "powersgd"]:
        with predict.Namespaces(2, args.mbits) as hosts:
            os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
            took = step_ms(hosts.bench(command(hook)))
            del os.environ["GLOO_SOCKET_IFNAME"]
        plain = line(f"DDP {hook}", took, without, plain)


def gloo_rank(args):
    """One rank of PyTorch: steps of `cnn` under DDP."""
    sys.path.insert(0, str(predict.ROOT / "crates/nn/references"))
    import models
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = models.Cnn().to(memory_format=torch.channels_last)
    x = torch.randn(64, 3, 32, 32).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (64,))
    ddp = DistributedDataParallel(model)
    if args.gloo == "powersgd":
        # Two steps without it are the fewest that its warm start allows.
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    opt = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    times = []
    for k in range(args.steps + 4):
        began = time.perf_counter()
        opt.zero_grad()
        F.cross_entropy(ddp(x), labels).backward()
        opt.step()
        if k >= 4:
            times.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        print(json.dumps({"step_ms": statistics.median(times) * 1e3}), flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbits", type=int, default=100)
    parser.add_argument("--job", default="cnn")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--binary", type=Path, default=predict.BINARY)
    parser.add_argument("--torch", type=Path)
    parser.add_argument("--gloo", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.gloo:
        return gloo_rank(args)
    ours(args)
    if args.torch:
        theirs(args)


if __name__ == "__main__":
    main()
