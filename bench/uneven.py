#!/usr/bin/env python3
"""Throughput of workers of uneven speed: parameter servers against lockstep.

    cargo build --release
    bench/uneven.py [--steps 200] [--rounds 3] [--binary target/release/polyreme]

Four processes over TCP on this host, one thread each, a small model, so that what a step takes is what `--chaos` makes of it. In lockstep four workers
share a step of 4 x 16 samples; with `ps-bounded` and `ps-async` a step is one worker's alone and has 16, so a worker does as much in each of its steps in all ways.

- "some steps slow": each worker's step sleeps 20 ms, or 80 ms with probability 0.1, from a seed. Ideal for lockstep is 20·0.9^4 + 80·(1 - 0.9^4) = 40.6 ms a
  step; a worker by itself needs 26.
- "one worker slow": each step sleeps 20 ms, and rank 3 is slowed down to a quarter of its speed. Ideal for lockstep is 80 ms a step; by themselves
  three workers do 50 steps a second and one 12.5, 3.25 times as many.

Prints the median samples a second of --rounds rounds, in each of which all ways come in turn, and the ratio to the faster of both lockstep ways.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORKERS = 4
SAMPLES = 16

JOB = """
[model]
layers = [{ kind = "linear", outputs = 32 }, "relu", { kind = "linear" }]

[data]
kind = "synthetic"
samples = 64000
shape = [16]
classes = 5

[train]
steps = 1
optimizer = { kind = "sgd", lr = 1e-3 }

[parallel]
threads = 1
transport = "tcp"
balance = "equal"

[output]
best = "none"
tensorboard = false
"""

WAYS = {
    "allreduce": ["parallel.sync=allreduce"],
    "ps": ["parallel.sync=ps"],
    "ps-bounded, s = 3": ["parallel.sync=ps-bounded", "parallel.staleness=3"],
    "ps-async": ["parallel.sync=ps-async"],
}
CASES = {
    "some steps slow": ("sleep=20ms,slow=80ms@0.1", {"ps-bounded, s = 3": 1.25}),
    "one worker slow": ("sleep=20ms,slow_rank=3:4x", {"ps-async": 1.8}),
}


def train(binary, folder, way, chaos, steps):
    together = way in ("allreduce", "ps")
    # `balance` goes with sums of gradients alone; servers share samples out equally, or as workers come to them.
    sets = WAYS[way] + [f"train.batch={SAMPLES * (WORKERS if together else 1)}", f"train.steps={steps * (1 if together else WORKERS)}"]
    command = [binary, "train", "job.toml", "--processes", str(WORKERS), "--no-pin", "--json", "--overwrite", "--output", "run", "--chaos", chaos]
    for setting in sets:
        command += ["--set", setting]
    lines = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
    summary = json.loads(lines.splitlines()[-1])
    assert summary["ledger"]["exact"] is not False, summary
    return summary["samples_per_s"], summary.get("staleness_max")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="of each worker")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--binary", type=Path, default=ROOT / "target/release/polyreme")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.toml").write_text(JOB)
        for case in args.case or CASES:
            (chaos, limits) = CASES[case]
            speeds = {way: [] for way in WAYS}
            stale = {}
            for seed in range(1, args.rounds + 1):
                for way in WAYS:
                    speed, stale[way] = train(args.binary.resolve(), folder, way, f"{chaos},seed={seed}", args.steps)
                    speeds[way].append(speed)
            lockstep = max(statistics.median(speeds[way]) for way in ("allreduce", "ps"))
            for way in WAYS:
                speed = statistics.median(speeds[way])
                limit = f" (wanted {limits[way]})" if way in limits else ""
                age = "" if stale[way] is None else f", staleness at most {stale[way]}"
                print(f"{case:16}  {way:18}  {speed:7.0f} samples/s  {speed / lockstep:.2f} of lockstep{limit}{age}", flush=True)


if __name__ == "__main__":
    main()
