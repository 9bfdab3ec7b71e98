"""Compares the memory that a run predicts with what it uses, for models that are too large for tests.

    cargo build --release
    python3 bench/memory.py target/release/polyreme [mlp alexnet resnet50 gpt]

Each run takes four steps with two evaluations and two checkpoints, on one rank. Peak resident memory is the system's
(`ru_maxrss`), of the training process alone. Exits with 1 if a ratio is outside 0.9 to 1.1.
"""

import json
import os
import random
import subprocess
import sys
import tempfile

EVERY = 'evaluate_every = 2\n[output]\nevery_steps = 2\n'
IMAGES = '[data]\nkind = "synthetic"\nsamples = 100\nshape = [3, 224, 224]\nclasses = 100\n[train]\nbatch = 8\nsteps = 4\n'
JOBS = {
    "mlp": '[model]\nkind = "mlp"\nhidden = [4096, 4096, 4096]\n[data]\nkind = "synthetic"\nsamples = 1000\n'
    'shape = [784]\nclasses = 10\n[train]\nbatch = 64\nsteps = 4\noptimizer = "adamw"\n' + EVERY,
    "alexnet": '[model]\nkind = "alexnet"\n' + IMAGES + EVERY,
    "resnet50": '[model]\nkind = "resnet50"\n' + IMAGES + EVERY,
    "gpt": '[model]\nkind = "gpt"\nlayers = 12\nwidth = 768\nheads = 12\ncontext = 512\nvocab = 50257\n[data]\n'
    'kind = "text"\npath = "text.txt"\nvalidation = 0.05\n[train]\nbatch = 2\nsteps = 4\noptimizer = "adamw"\n' + EVERY,
}


def measure(polyreme, job, folder):
    """Planned and peak MiB of a run."""
    with open(os.path.join(folder, "job.toml"), "w") as file:
        file.write(job)
    words = random.Random(0).choices(["a", "few", "words", "in", "any", "order"], k=60_000)
    with open(os.path.join(folder, "text.txt"), "w") as file:
        file.write(" ".join(words))
    train = [polyreme, "train", "job.toml", "--output", "run", "--ranks", "1"]
    said = subprocess.run(train + ["--check", "--json"], cwd=folder, check=True, capture_output=True)
    planned = json.loads(said.stdout)["memory_mib"]
    run = subprocess.Popen(train, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(run.pid, 0)
    run.returncode = os.waitstatus_to_exitcode(status)
    if run.returncode != 0:
        sys.exit(f"the run ended with code {run.returncode}")
    return planned, usage.ru_maxrss / 1024


def main():
    polyreme, names = os.path.abspath(sys.argv[1]), sys.argv[2:] or list(JOBS)
    good = True
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            planned, peak = measure(polyreme, JOBS[name], folder)
        good &= 0.9 <= peak / planned <= 1.1
        print(f"{name:10} planned {planned:6.0f} MiB, peak {peak:6.0f} MiB, ratio {peak / planned:.3f}", flush=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
