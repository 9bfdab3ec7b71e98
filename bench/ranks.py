"""Steps and all-reduces on several ranks: Polyreme against PyTorch DDP over gloo and against OpenMPI, alternating.

    python3 -m venv V && V/bin/pip install torch torchvision numpy
    apt-get install openmpi-bin libopenmpi-dev
    cargo build --release
    V/bin/python bench/ranks.py steps [--jobs mlp lenet cnn gpt] [--rounds 5]
    V/bin/python bench/ranks.py scaling [--jobs mlp cnn gpt] [--rounds 5]
    V/bin/python bench/ranks.py collectives [--ranks 2 4] [--rounds 5] [--sides tcp gloo] [--sizes 4096 65536]

Nothing else should run meanwhile. `steps`: two ranks with one thread and the job's batch each. `scaling`: the same
against one rank with one thread. `collectives`: all-reduce of f32; the mean of 20 calls after 3, and the median of
the rounds.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
JOBS = ["mlp", "lenet", "cnn", "gpt"]
SIZES = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
SIDES = ["local", "shm", "tcp", "OpenMPI", "gloo"]

MPI_PEER = r"""
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    for (int k = 1; k < argc; k++) {
        int n = atoi(argv[k]) / sizeof(float);
        float *data = malloc(n * sizeof(float));
        for (int i = 0; i < n; i++) data[i] = 1;
        double start = 0;
        for (int call = -3; call < 20; call++) {
            if (call == 0) {
                MPI_Barrier(MPI_COMM_WORLD);
                start = MPI_Wtime();
            }
            MPI_Allreduce(MPI_IN_PLACE, data, n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        }
        double us = (MPI_Wtime() - start) / 20 * 1e6, slowest;
        MPI_Reduce(&us, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
        if (!rank) printf("{\"bytes\": %s, \"us\": %f}\n", argv[k], slowest);
        free(data);
    }
    MPI_Finalize();
}
"""


def gloo_rank(rank, ranks, name, port):
    """One rank of PyTorch: a job's step under DDP, or all-reduces of comma-separated sizes."""
    sys.path.insert(0, str(ROOT / "crates/nn/references"))
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    if name in JOBS:
        import models

        sgd = lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)
        adamw = lambda p: torch.optim.AdamW(p, lr=3e-4)
        model, x, classes, n_labels, optimizer, steps = {
            "mlp": lambda: (models.Mlp(), torch.randn(128, 784), 10, 128, sgd, 300),
            "lenet": lambda: (models.LeNet(), torch.randn(64, 3, 32, 32), 10, 64, sgd, 300),
            "cnn": lambda: (models.Cnn(), torch.randn(64, 3, 32, 32), 10, 64, sgd, 8),
            "gpt": lambda: (models.Gpt(), torch.randint(0, 256, (8, 256)), 256, 2048, adamw, 6),
        }[name]()
        if name in ("lenet", "cnn"):
            # The faster format of the two.
            model = model.to(memory_format=torch.channels_last)
            x = x.to(memory_format=torch.channels_last)
        labels = torch.randint(0, classes, (n_labels,))
        ddp = DistributedDataParallel(model)
        opt = optimizer(ddp.parameters())
        times = []
        for k in range(steps + 4):
            start = time.perf_counter()
            opt.zero_grad()
            F.cross_entropy(ddp(x), labels).backward()
            opt.step()
            if k >= 4:
                times.append(time.perf_counter() - start)
        if rank == 0:
            print(json.dumps({"step_ms": statistics.median(times) * 1e3}), flush=True)
    else:
        for size in map(int, name.split(",")):
            data = torch.ones(size // 4)
            for call in range(-3, 20):
                if call == 0:
                    dist.barrier()
                    start = time.perf_counter()
                dist.all_reduce(data)
            if rank == 0:
                print(json.dumps({"bytes": size, "us": (time.perf_counter() - start) / 20 * 1e6}), flush=True)
    dist.destroy_process_group()


def lines(command):
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def ours_step(binary, job, *flags):
    found = [line for line in lines([binary, "bench", "step", "--json", "--job", job, "--threads", "1", *flags])
             if "step_ms" in line]
    return found[-1]["step_ms"]


def gloo(*args):
    return lines([sys.executable, __file__, "--gloo", *map(str, args)])


def steps(args):
    print("| job | threads ms | processes (shm) ms | DDP over gloo ms | threads / DDP | processes / threads |")
    print("|---|---|---|---|---|---|")
    for job in args.jobs:
        sides = ([], [], [])
        for _ in range(args.rounds):
            sides[0].append(ours_step(args.binary, job, "--ranks", "2", "--transport", "local"))
            sides[1].append(ours_step(args.binary, job, "--ranks", "2", "--transport", "shm"))
            sides[2].append(gloo(2, job)[-1]["step_ms"])
        local, shm, ddp = map(statistics.median, sides)
        print(f"| {job} | {local:.2f} | {shm:.2f} | {ddp:.2f} | **{local / ddp:.2f}** | {shm / local:.2f} |", flush=True)


def scaling(args):
    print("| job | one rank ms | two ranks ms | scaling |")
    print("|---|---|---|---|")
    for job in args.jobs:
        sides = ([], [])
        for _ in range(args.rounds):
            sides[0].append(ours_step(args.binary, job))
            sides[1].append(ours_step(args.binary, job, "--ranks", "2", "--transport", "local"))
        one, two = map(statistics.median, sides)
        print(f"| {job} | {one:.2f} | {two:.2f} | **{one / two:.0%}** |", flush=True)


def collectives(args):
    with tempfile.TemporaryDirectory() as folder:
        source, peer = pathlib.Path(folder, "peer.c"), str(pathlib.Path(folder, "peer"))
        source.write_text(MPI_PEER)
        subprocess.run(["mpicc", "-O2", str(source), "-o", peer], check=True)
        mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n"]
        sizes = args.sizes
        for ranks in args.ranks:
            ours = lambda transport: lines([args.binary, "bench", "collective", "--op", "allreduce", "--json",
                                            "--sizes", ",".join(map(str, sizes)),
                                            "--transport", transport, "--ranks", str(ranks)])
            sides = {"local": lambda: ours("local"), "shm": lambda: ours("shm"), "tcp": lambda: ours("tcp"),
                     "OpenMPI": lambda: lines([*mpirun, str(ranks), peer, *map(str, sizes)]),
                     "gloo": lambda: gloo(ranks, ",".join(map(str, sizes)))}
            sides = {side: run for side, run in sides.items() if side in args.sides}
            times = {side: {size: [] for size in sizes} for side in sides}
            for _ in range(args.rounds):
                for side, run in sides.items():
                    for line in run():
                        if "us" in line:
                            times[side][line["bytes"]].append(line["us"])
            print(f"\n{ranks} ranks, us\n\n| | " + " | ".join(f"{size >> 10} KiB" for size in sizes) + " |")
            print("|---" * (len(sizes) + 1) + "|")
            for side in sides:
                cells = (f"{statistics.median(times[side][size]):.1f}" for size in sizes)
                print(f"| {side} | " + " | ".join(cells) + " |", flush=True)
            for a, b in (("local", "OpenMPI"), ("shm", "OpenMPI"), ("tcp", "gloo")):
                if a in sides and b in sides:
                    cells = (f"**{statistics.median(times[a][s]) / statistics.median(times[b][s]):.2f}**" for s in sizes)
                    print(f"| {a} / {b} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--gloo"]:
        import socket

        import torch.multiprocessing as mp

        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            free_port = listener.getsockname()[1]
        mp.spawn(gloo_rank, args=(int(sys.argv[2]), sys.argv[3], free_port), nprocs=int(sys.argv[2]))
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("what", choices=["steps", "scaling", "collectives"])
        parser.add_argument("--jobs", nargs="+", default=JOBS, choices=JOBS)
        parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
        parser.add_argument("--rounds", type=int, default=5)
        parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
        parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
        parser.add_argument("--binary", default=str(ROOT / "target/release/polyreme"))
        arguments = parser.parse_args()
        {"steps": steps, "scaling": scaling, "collectives": collectives}[arguments.what](arguments)
