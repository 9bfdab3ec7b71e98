#!/usr/bin/env python3
"""One of two ranks held to a quarter of its core by a quota of its control group: what shares by speed win.

    cargo build --release
    bench/quota.py [--rounds 3]

In each round a run with equal shares and one with `balance = "auto"`, both as two processes on this machine, both with the second
process held down. Prints steps per second of each, and after how many steps the second rank has at least 400 of 1024 samples again
once its quota is lifted. Needs root and the cpu controller of cgroup v1. Nothing else should run meanwhile.
"""

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BINARY = ROOT / "target/release/polyreme"
PERIOD_US = 100_000

JOB = """
[model]
layers = [{ kind = "linear", outputs = 1024 }, "relu", { kind = "linear", outputs = 1024 }, "relu", { kind = "linear" }]
[data]
kind = "synthetic"
samples = 8192
shape = [128]
classes = 10
validation = 0
[train]
batch = 1024
steps = 1000000
optimizer = { kind = "sgd", lr = 0.001 }
log_every = 1
[parallel]
threads = 1
[output]
every_epochs = 0
best = "none"
"""


class Quota:
    """A control group beside that of this process."""

    def __init__(self):
        own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if "cpu" in line.split(":")[1].split(","))
        self.group = Path("/sys/fs/cgroup/cpu") / own.split(":", 2)[2].strip("/") / f"polyreme-quota-{os.getpid()}"
        self.group.mkdir()
        (self.group / "cpu.cfs_period_us").write_text(str(PERIOD_US))

    def take(self, pid):
        (self.group / "cgroup.procs").write_text(str(pid))

    def allow(self, cores):
        (self.group / "cpu.cfs_quota_us").write_text(str(-1 if cores is None else int(cores * PERIOD_US)))

    def remove(self):
        for _ in range(100):
            try:
                return self.group.rmdir()
            except OSError:
                time.sleep(0.02)


class Run:
    """Two processes, the second of which is in the group."""

    def __init__(self, folder, balance, quota):
        self.folder, self.said = Path(folder), Path(folder) / f"said_{balance}"
        # A run before it must not be taken for this one.
        shutil.rmtree(self.folder / balance, ignore_errors=True)
        self.said.unlink(missing_ok=True)
        self.metrics = self.folder / balance / "metrics.jsonl"
        command = [BINARY, "train", "job.toml", "--processes", "2", "--output", balance, "--set", f"parallel.balance={balance}"]
        self.process = subprocess.Popen([str(c) for c in command], cwd=folder, stderr=self.said.open("w"), stdout=subprocess.DEVNULL)
        while not (row := re.search(r"^ +1 +\S+ +(\d+)", self.said.read_text(), re.M)):
            time.sleep(0.02)
        quota.take(row.group(1))

    def steps(self):
        lines = self.metrics.read_text().splitlines() if self.metrics.exists() else []
        for line in reversed(lines):
            try:
                return json.loads(line)["step"]
            except (ValueError, KeyError):
                continue
        return 0

    def pace(self, seconds):
        first, began = self.steps(), time.time()
        time.sleep(seconds)
        return (self.steps() - first) / (time.time() - began)

    def back_at(self, after):
        for step, second in re.findall(r"^step (\d+): ranks take \d+, (\d+) samples", self.said.read_text(), re.M):
            if int(step) > after and int(second) >= 400:
                return int(step) - after
        return None

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def attempt(folder, quota):
    quota.allow(0.25)
    equal = Run(folder, "equal", quota)
    time.sleep(1)
    pace_equal = equal.pace(4)
    equal.stop()
    auto = Run(folder, "auto", quota)
    while auto.steps() < 16:
        time.sleep(0.05)
    pace_auto = auto.pace(5)
    quota.allow(None)
    lifted = auto.steps()
    while auto.steps() < lifted + 60:
        time.sleep(0.02)
    back = auto.back_at(lifted)
    auto.stop()
    return pace_equal, pace_auto, back


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    quota, times = Quota(), []
    try:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "job.toml").write_text(JOB)
            for _ in range(rounds):
                equal, auto, back = attempt(folder, quota)
                times.append(auto / equal)
                print(f"equal {equal:.2f} steps/s, auto {auto:.2f}: {auto / equal:.2f} times; back after {back} steps", flush=True)
    finally:
        quota.remove()
    print(f"median {statistics.median(times):.2f} times")


if __name__ == "__main__":
    main()
