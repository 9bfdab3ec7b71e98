#!/usr/bin/env python3
"""A table larger than memory: the time to the first step, and memory, of a CSV of 4 GB under a limit of 1 GiB.

    cargo build --release
    python bench/large_table.py [--gb 4] [--rounds 3]

Two tables are written into a temporary folder, which is removed at the end: `numbers` (20 columns of numbers, a label of 5 classes) and
`words` (numbers with blanks, categories of few and of many values, dates, yes or no; the same label). A block of 64 MiB of rows, all drawn, is
repeated until the file is large enough. `polyreme train` then learns an mlp from it for some steps, in a control group of its own whose memory,
the system's cache of files included, is limited to 1 GiB. Seconds from the start of the process to the end of the first step, and the most that the
process itself had in memory (its pages of the mapped file included, and without them). `--cached` reads the file once before, which
puts it into the cache outside of the group, if there is as much memory; without it the cache is dropped, and the disk is read.

Needs root and the memory controller of cgroup v1, and numpy.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMIT = 1 << 30
BLOCK = 64 << 20

JOB = """[model]
kind = "mlp"
hidden = [64]
[data]
kind = "csv"
path = "table.csv"
[train]
batch = 128
steps = 200
log_every = 1
optimizer = { kind = "adam", lr = 1e-3 }
[output]
tensorboard = false
every_epochs = 0
best = "none"
"""


def numbers(random, n):
    """Rows of 20 numbers and a class."""
    x = random.normal(size=(n, 20)).round(4)
    label = (x[:, :5].argmax(1)).astype(str)
    return [",".join(map(repr, row)) + "," + label[i] for i, row in enumerate(x.tolist())]


def words(random, n):
    """Rows of numbers with blanks, words, dates, yes or no, and a class."""
    age, income = random.integers(18, 90, n), random.normal(3000, 900, n).round(2)
    city = random.choice([f"city {i}" for i in range(500)], n)
    kind = random.choice(["red", "green", "blue", "grey"], n)
    days = random.integers(0, 9000, n).astype("datetime64[D]") + (1 << 13)
    member = random.choice(["yes", "no"], n)
    more = random.normal(size=(n, 6)).round(3)
    label = (age // 18 + (kind == "red")) % 5
    blank = random.random(n) < 0.05
    rows = zip(age, income.tolist(), city, kind, days.astype(str), member, more.tolist(), label, blank)
    return [
        f"{a},{'' if gone else i},{c},{k},{d},{m},{','.join(map(repr, xs))},class{y}"
        for a, i, c, k, d, m, xs, y, gone in rows
    ]


HEADS = {
    "numbers": ",".join(f"x{i}" for i in range(20)) + ",label",
    "words": "age,income,city,kind,since,member," + ",".join(f"m{i}" for i in range(6)) + ",label",
}


def write(path, name, size):
    import numpy as np

    random, rows, made = np.random.default_rng(0), [], 0
    while made < BLOCK:
        some = "\n".join({"numbers": numbers, "words": words}[name](random, 20_000)).encode() + b"\n"
        rows.append(some)
        made += len(some)
    block = b"".join(rows)
    with open(path, "wb") as file:
        file.write(HEADS[name].encode() + b"\n")
        while file.tell() < size:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


class Limit:
    """A control group beside that of this process, with a limit of memory."""

    def __init__(self):
        own = next(line for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line)
        self.group = pathlib.Path("/sys/fs/cgroup/memory") / own.split(":", 2)[2].strip("/") / f"polyreme-large-{os.getpid()}"
        self.group.mkdir()
        (self.group / "memory.limit_in_bytes").write_text(str(LIMIT))

    def enter(self):
        (self.group / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self):
        for _ in range(100):
            try:
                return self.group.rmdir()
            except OSError:
                time.sleep(0.02)


def memory(pid):
    """MiB that a process has, and those of them that are no file's."""
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0, 0
    kib = {key: int(value) for key, value in re.findall(r"^(VmHWM|RssAnon):\s+(\d+)", status, re.M)}
    return kib.get("VmHWM", 0) / 1024, kib.get("RssAnon", 0) / 1024


def run(binary, folder):
    """Seconds to the end of the first step and of the run, MiB at most, with the file's pages and without."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    limit = Limit()
    try:
        # Entering before the program starts, so that all of its memory counts.
        command = [binary, "train", "job.toml", "--json", "--output", "run"]
        begun = time.monotonic()
        process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.DEVNULL, stderr=(folder / "said").open("w"), preexec_fn=limit.enter
        )
        first, most, own, lines = None, 0, 0, folder / "run/metrics.jsonl"
        while process.poll() is None:
            if first is None and lines.exists() and '"train_loss"' in lines.read_text():
                first = time.monotonic() - begun
            with_file, without = memory(process.pid)
            most, own = max(most, with_file), max(own, without)
            time.sleep(0.01)
        took = time.monotonic() - begun
        if process.returncode:
            raise SystemExit((folder / "said").read_text())
        return first, took, most, own
    finally:
        limit.remove()


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--gb", type=float, default=4)
    args.add_argument("--rounds", type=int, default=3)
    args.add_argument("--only", nargs="*", default=list(HEADS))
    args.add_argument("--cached", action="store_true")
    args.add_argument("--binary", default=str(ROOT / "target/release/polyreme"))
    args.add_argument("--folder", help="where the tables are, and stay, if they are to be used again")
    args = args.parse_args()
    binary = str(pathlib.Path(args.binary).resolve())
    folder = pathlib.Path(args.folder or tempfile.mkdtemp())
    try:
        print("| table | GB | read from | first step, s | 200 steps, s | MiB at most | without the file's |\n|---|---|---|---|---|---|---|")
        for name in args.only:
            place = folder / name
            place.mkdir(parents=True, exist_ok=True)
            table = place / "table.csv"
            if not table.exists():
                write(table, name, args.gb * 1e9)
            (place / "job.toml").write_text(JOB)
            runs = []
            for _ in range(args.rounds):
                if args.cached:
                    subprocess.run(["cat", table], stdout=subprocess.DEVNULL, check=True)
                else:
                    os.sync()
                    pathlib.Path("/proc/sys/vm/drop_caches").write_text("1")
                runs.append(run(binary, place))
            first, took, most, own = (statistics.median(column) for column in zip(*runs))
            where = "cache" if args.cached else "disk"
            size = table.stat().st_size / 1e9
            print(f"| {name} | {size:.2f} | {where} | {first:.1f} | {took:.1f} | {most:.0f} | {own:.0f} |", flush=True)
    finally:
        if not args.folder:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
