"""Training steps of Polyreme and PyTorch, alternating, on this machine: medians and ratios.

    python3 -m venv V && V/bin/pip install torch torchvision numpy
    cargo build --release
    V/bin/python bench/compare.py --threads 1 2 --rounds 5 [--jobs mlp lenet cnn gpt resnet50 gpt2] [--batch 1]

Each round runs both sides in separate processes, one after the other; nothing else should run meanwhile. A figure is
the median over the rounds of each process's own median step. PyTorch runs convolutional jobs in both memory formats,
and the faster one counts. Models, batches and optimizers are those of `crates/nn/references/models.py`, which the
tests also compare the engine with; resnet50 (torchvision's) and gpt2 are those of `examples/`. They are large: without
`--jobs` they are left out.
"""

import argparse
import json
import pathlib
import resource
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
JOBS = ["mlp", "lenet", "cnn", "gpt"]
JOB_FILES = {"resnet50": "examples/resnet50.toml", "gpt2": "examples/gpt2.toml"}


def pytorch_step(name, threads, batch):
    """Prints what `polyreme bench step --json` prints, for PyTorch; a batch of 0 is the job's."""
    sys.path.insert(0, str(ROOT / "crates/nn/references"))
    import models
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(threads)

    def measure(channels_last):
        model, make, n, classes, per_sample, optimizer, steps = {
            "mlp": lambda: (models.Mlp(), lambda n: torch.randn(n, 784), 128, 10, 1, sgd, 300),
            "lenet": lambda: (models.LeNet(), lambda n: torch.randn(n, 3, 32, 32), 64, 10, 1, sgd, 300),
            "cnn": lambda: (models.Cnn(), lambda n: torch.randn(n, 3, 32, 32), 64, 10, 1, sgd, 8),
            "gpt": lambda: (models.Gpt(), lambda n: torch.randint(0, 256, (n, 256)), 8, 256, 256, adamw, 8),
            "resnet50": lambda: (resnet50(), lambda n: torch.randn(n, 3, 224, 224), 8, 1000, 1, decayed, 8),
            "gpt2": lambda: (models.Gpt(50257, 768, 12, 12, 512), lambda n: torch.randint(0, 50257, (n, 512)),
                             2, 50257, 512, adamw, 8),
        }[name]()
        n = batch or n
        x = make(n)
        if channels_last:
            model = model.to(memory_format=torch.channels_last)
            x = x.to(memory_format=torch.channels_last)
        labels = torch.randint(0, classes, (n * per_sample,))
        opt = optimizer(model.parameters())
        times = []
        for k in range(steps + 4):
            start = time.perf_counter()
            opt.zero_grad()
            F.cross_entropy(model(x), labels).backward()
            opt.step()
            if k >= 4:
                times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e3

    def resnet50():
        from torchvision.models import resnet50

        return resnet50()

    sgd = lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)
    decayed = lambda p: torch.optim.SGD(p, lr=0.003, momentum=0.9, weight_decay=1e-4)
    adamw = lambda p: torch.optim.AdamW(p, lr=3e-4)
    step_ms = min(measure(last) for last in ([False, True] if name in ("lenet", "cnn", "resnet50") else [False]))
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"version": torch.__version__, "step_ms": step_ms, "peak_rss_mib": rss}))


def run(command):
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def compare(args):
    print("| job | threads | Polyreme ms | PyTorch ms | ratio | Polyreme MiB (planned) | PyTorch MiB | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for threads in args.threads:
        for name in args.jobs:
            ours, theirs = [], []
            for _ in range(args.rounds):
                job = ["--job-file", str(ROOT / JOB_FILES[name])] if name in JOB_FILES else ["--job", name]
                job += ["--batch", str(args.batch)] if args.batch else []
                ours.append(run([args.binary, "bench", "step", "--json", *job, "--threads", str(threads)]))
                theirs.append(run([sys.executable, __file__, "--peer", name, str(threads), str(args.batch)]))
            median = lambda side, key: statistics.median(r[key] for r in side)
            a, b = median(ours, "step_ms"), median(theirs, "step_ms")
            m, p, q = median(ours, "peak_rss_mib"), median(ours, "planned_peak_mib"), median(theirs, "peak_rss_mib")
            print(f"| {name} | {threads} | {a:.2f} | {b:.2f} | **{a / b:.2f}** | {m:.0f} ({p:.0f}) | {q:.0f} "
                  f"| {m / q:.2f} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        pytorch_step(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
        parser.add_argument("--jobs", nargs="+", default=JOBS, choices=[*JOBS, *JOB_FILES])
        parser.add_argument("--batch", type=int, default=0, help="samples per step, instead of the jobs' own")
        parser.add_argument("--rounds", type=int, default=5)
        parser.add_argument("--binary", default=str(ROOT / "target/release/polyreme"))
        compare(parser.parse_args())
