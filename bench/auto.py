#!/usr/bin/env python3
"""Training with every key of `[parallel]` on "auto" beside plans that people would write by hand, on this machine.

    cargo build --release
    bench/auto.py [--rounds 3] [--only gpt] [--calibration FILE]

For each job: a run that plans for itself and one run of each plan by hand, in turn, several rounds. Prints samples per second (the median
over rounds; steps only, without planning and evaluation) and how far the planned run is from the best by hand.
With a calibration, the planned runs use it; without, they describe the machine by a measurement of a second. Nothing else should run
meanwhile.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BINARY = ROOT / "target/release/polyreme"

SYNTHETIC = '[data]\nkind = "synthetic"\nsamples = 4096\nshape = {shape}\n'
TRAIN = '[train]\nbatch = {batch}\nsteps = {steps}\noptimizer = {{ kind = "adamw", lr = 1e-4 }}\n'
JOBS = {
    "mlp": '[model]\nkind = "mlp"\nhidden = [1024, 1024]\n' + SYNTHETIC.format(shape="[784]") + TRAIN.format(batch=128, steps=400),
    "cnn": '[model]\nkind = "cnn"\n' + SYNTHETIC.format(shape="[3, 32, 32]") + TRAIN.format(batch=128, steps=16),
    "resnet18": '[model]\nkind = "resnet18_cifar"\n' + SYNTHETIC.format(shape="[3, 32, 32]") + TRAIN.format(batch=64, steps=12),
    "gpt": '[model]\nkind = "gpt"\nlayers = 6\nwidth = 384\nheads = 6\ncontext = 256\n'
    f'[data]\nkind = "text"\npath = "{ROOT}/examples/data/moby-dick.txt"\nvalidation = 0\n' + TRAIN.format(batch=16, steps=8),
}
AUTO = ["data", "tensor", "stage", "sequence", "microbatches", "schedule", "shard_weights", "shard_gradients"]
BY_HAND = {
    "1 rank, 2 threads": ["--ranks", "1", "--threads", "2"],
    "data 2": ["--ranks", "2", "--threads", "1"],
    "tensor 2": ["--ranks", "2", "--threads", "1", "--set", "parallel.tensor=2"],
    "stage 2, zb-v, 8 microbatches": ["--ranks", "2", "--threads", "1", "--set", "parallel.stage=2", "--set", "parallel.microbatches=8", "--set", "parallel.schedule=zb-v"],
}


def train(job, flags, calibration):
    """Samples per second, and what the run said of its plan."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.toml"
        file.write_text(job)
        if calibration:
            shutil.copy(calibration, Path(folder) / "calibration.json")
        command = [BINARY, "train", file, "--output", Path(folder) / "run", "--json", *flags]
        done = subprocess.run([str(c) for c in command], cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return None, done.stderr.strip().splitlines()[0] if done.stderr.strip() else "failed"
        planned = next((line for line in done.stderr.splitlines() if line.startswith("planned")), "")
        summary = json.loads(done.stdout.splitlines()[-1])
        return summary["samples_per_s"], planned


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--calibration", help="a file of `polyreme bench calibrate`")
    args = parser.parse_args()
    auto = [x for key in AUTO for x in ("--set", f"parallel.{key}=auto")]
    print("| job | plan | samples/s | spread |\n|---|---|---|---|")
    for name, job in JOBS.items():
        if args.only not in name:
            continue
        seen, said = {}, ""
        for _ in range(args.rounds):
            for plan, flags in {'"auto"': auto, **BY_HAND}.items():
                rate, words = train(job, flags, args.calibration)
                said = words if plan == '"auto"' else said
                if rate is None:
                    print(f"| {name} | {plan} | refused: {words} | |", flush=True)
                else:
                    seen.setdefault(plan, []).append(rate)
        middle = {plan: statistics.median(rates) for plan, rates in seen.items()}
        for plan, rates in seen.items():
            print(f"| {name} | {plan} | {middle[plan]:.1f} | {(max(rates) - min(rates)) / middle[plan] * 100:.1f} % |", flush=True)
        best = max((plan for plan in middle if plan != '"auto"'), key=middle.get)
        print(f"\n{name}: {said}\n{name}: planned run at {middle[chr(34) + 'auto' + chr(34)] / middle[best]:.3f} of the best by hand ({best})\n", flush=True)


if __name__ == "__main__":
    main()
