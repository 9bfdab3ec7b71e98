#!/usr/bin/env python3
"""What steps that ranks take by themselves cost in loss, and save in bytes: gpt on a text, against gradients that are summed in every step.

    cargo build --release
    bench/local.py [--steps 1500] [--every 50] [--lr 0.7] [--momentum 0.9] [--seeds 1] [--binary target/release/polyreme]

Two processes over TCP on this host, one thread each, the same samples in the same steps. All steps lie in one epoch, so that none is short, and the
validation set is evaluated at the end alone. Prints for each way the validation loss, the bytes that ranks sent in steps of training, and both
beside those of all-reduce. Times are not measured.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

JOB = """
[model]
kind = "gpt"
layers = 2
width = 96
heads = 4
context = 32

[data]
kind = "text"
path = "{text}"
validation = 0.05

[train]
batch = 12
steps = {steps}
seed = {seed}
evaluate_every = {steps}
optimizer = {{ kind = "adamw", lr = 2e-3, weight_decay = 0.1 }}
schedule = {{ kind = "cosine", warmup = 50, floor = 0.1 }}
clip = 1.0

[parallel]
ranks = 2
threads = 1
transport = "tcp"

[output]
best = "none"
every_steps = {steps}
tensorboard = false
"""


def train(binary, folder, name, sets):
    command = [binary, "train", "job.toml", "--processes", "2", "--json", "--output", name]
    for setting in sets:
        command += ["--set", setting]
    lines = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
    summary = json.loads(lines.splitlines()[-1])
    return summary["metrics"]["val_loss"], summary["wire_bytes"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--lr", type=float, default=0.7)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--binary", type=Path, default=ROOT / "target/release/polyreme")
    args = parser.parse_args()
    local = ["parallel.sync=local", f"parallel.every={args.every}"]
    outer = f"parallel.outer={{ lr = {args.lr}, momentum = {args.momentum} }}"
    ways = {"allreduce": [], "local, mean": local, "local, outer": [*local, outer]}
    for seed in range(1, args.seeds + 1):
        with tempfile.TemporaryDirectory() as folder:
            job = JOB.format(text=ROOT / "examples/data/moby-dick.txt", steps=args.steps, seed=seed)
            (Path(folder) / "job.toml").write_text(job)
            first = None
            for k, (way, sets) in enumerate(ways.items()):
                loss, sent = train(args.binary.resolve(), folder, f"run{k}", sets)
                first = first or (loss, sent)
                beside = f"{loss / first[0] - 1:+.2%}, 1/{first[1] / sent:.1f} of the bytes"
                print(f"seed {seed}  {way:14}  loss {loss:.4f}  {sent / 1e6:9.2f} MB  {beside}", flush=True)


if __name__ == "__main__":
    main()
