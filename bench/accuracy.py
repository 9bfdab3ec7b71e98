#!/usr/bin/env python3
"""Test accuracy of every way to agree and every format on the wire, beside all-reduce in f32.

    cargo build --release
    bench/accuracy.py [--seeds 5] [--workers 4] [--job examples/digits.toml] [--epochs 25] [--only ps-async ...] [--binary target/release/polyreme]

Processes over TCP on this host, one thread each: the job file as it ships, but for `parallel.sync` or `parallel.wire`. Formats are forced, since none of them gains
anything on loopback. `onebit` goes with sgd alone, so it stands beside all-reduce with the same sgd. Prints for each the mean test accuracy over the
seeds, how far that is from all-reduce in points, and each seed's. A difference of 0.5 points is wanted at most.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SGD = 'train.optimizer={ kind = "sgd", lr = 0.1, momentum = 0.9, weight_decay = 1e-4 }'


def wire(kind, more=""):
    return f'parallel.wire={{ kind = "{kind}"{more}, force = true }}'


# What is set, and beside which other it stands.
WAYS = {
    "allreduce": (["parallel.sync=allreduce"], None),
    "ps": (["parallel.sync=ps"], "allreduce"),
    "ps, 2 servers": (["parallel.sync=ps", "parallel.servers=2"], "allreduce"),
    "ps-bounded": (["parallel.sync=ps-bounded", "parallel.staleness=3"], "allreduce"),
    "ps-async": (["parallel.sync=ps-async"], "allreduce"),
    "local": (["parallel.sync=local", "parallel.every=5"], "allreduce"),
    "allreduce, clip": (["train.clip=1.0"], None),
    "ps-bounded, clip": (["parallel.sync=ps-bounded", "parallel.staleness=3", "train.clip=1.0"], "allreduce, clip"),
    "ps-async, clip": (["parallel.sync=ps-async", "train.clip=1.0"], "allreduce, clip"),
    "bf16": ([wire("bf16")], "allreduce"),
    "f16": ([wire("f16")], "allreduce"),
    "int8": ([wire("int8")], "allreduce"),
    "topk 0.01": ([wire("topk", ", share = 0.01")], "allreduce"),
    "topk 0.05": ([wire("topk", ", share = 0.05")], "allreduce"),
    "powersgd": ([wire("powersgd", ", rank = 2")], "allreduce"),
    "allreduce, sgd": ([SGD], None),
    "onebit, sgd": ([SGD, wire("onebit")], "allreduce, sgd"),
}


def accuracy(args, folder, sets, seed):
    command = [args.binary.resolve(), "train", args.job.resolve(), "--processes", str(args.workers), "--transport", "tcp", "--threads", "1"]
    command += ["--no-pin", "--json", "--overwrite", "--output", str(Path(folder) / "run")]
    for setting in [*sets, f"train.seed={seed}", f"train.epochs={args.epochs}", "output.tensorboard=false"]:
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        # A loss that is not finite is a result too.
        print(f"seed {seed}: {done.stderr.strip().splitlines()[0]}", flush=True)
        return float("nan")
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["ledger"]["exact"] is True, summary["ledger"]
    return summary["metrics"]["test_accuracy"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--job", type=Path, default=ROOT / "examples/digits.toml")
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--binary", type=Path, default=ROOT / "target/release/polyreme")
    args = parser.parse_args()
    means = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in args.only:
            sets, beside = WAYS[way]
            all_seeds = [accuracy(args, folder, sets, seed) for seed in range(1, args.seeds + 1)]
            means[way] = statistics.mean(all_seeds)
            apart = f"{100 * (means[way] - means[beside]):+.2f} points" if beside in means else ""
            each = " ".join(f"{100 * one:.2f}" for one in all_seeds)
            print(f"{way:16}  {100 * means[way]:6.2f} %  {apart:13}  {each}", flush=True)


if __name__ == "__main__":
    main()
