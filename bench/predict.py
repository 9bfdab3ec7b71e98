#!/usr/bin/env python3
"""Predicted steps beside measured ones: plans of 1 to 4 ranks on this machine, listed here before anything is calibrated.

    cargo build --release
    bench/predict.py [--rounds 3] [--only WORDS] [--calibration FILE]

Calibrates (which looks at no job), then measures every plan in turn, in several rounds, with the simulation of the same program beside
it. Ranks are threads, processes with common memory, processes over the loopback interface, or one process in each of several network
namespaces, joined by links of a given bandwidth (this needs root and `ip` and `tc`). Prints a Markdown table: the median over rounds, the
spread from round to round (largest less smallest, as a share of the median), the prediction, its error; then the mean size of errors,
and whether what was predicted to be fastest is, among plans of the same job and batch on the same links. Nothing else should run meanwhile.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BINARY = ROOT / "target/release/polyreme"

GPT = ["--job", "gpt", "--batch", "16"]
SMALL = ["--job-file", "examples/gpt.toml"]
CNN = ["--job", "cnn"]
STAGES = ["--stage", "2", "--microbatches", "8"]

# What carries data: "one" rank; "threads"; "shm" and "tcp" processes; or Mbit/s between namespaces.
PLANS = [
    # name, ranks, carried by, arguments of `bench step`
    ("mlp, alone", 1, "one", ["--job", "mlp", "--threads", "1"]),
    ("gpt, alone", 1, "one", [*GPT, "--threads", "1"]),
    ("gpt, alone, two threads", 1, "one", [*GPT, "--threads", "2"]),
    ("resnet50, batch 16, alone", 1, "one", ["--job-file", "examples/resnet50.toml", "--batch", "16", "--threads", "1"]),
    ("gpt, data 2", 2, "threads", GPT),
    ("gpt, tensor 2", 2, "threads", [*GPT, "--tensor", "2"]),
    ("gpt, stage 2, zb-v", 2, "threads", [*GPT, *STAGES, "--schedule", "zb-v"]),
    ("gpt, stage 2, 1f1b", 2, "threads", [*GPT, *STAGES, "--schedule", "1f1b"]),
    ("cnn, data 2", 2, "threads", CNN),
    ("small gpt, batch 16, data 2", 2, "shm", [*SMALL, "--batch", "16"]),
    ("small gpt, batch 16, tensor 2", 2, "shm", [*SMALL, "--batch", "16", "--tensor", "2"]),
    ("gpt, data 2 x stage 2, zb-h1", 4, "shm", [*GPT, *STAGES, "--schedule", "zb-h1"]),
    ("cnn, data 4", 4, "shm", [*CNN, "--batch", "64"]),
    ("gpt, data 2", 2, "tcp", GPT),
    ("gpt, tensor 2", 2, "tcp", [*GPT, "--tensor", "2"]),
    ("cnn, data 2", 2, "tcp", CNN),
    ("gpt, data 2", 2, 1000, GPT),
    ("gpt, stage 2, zb-h1", 2, 1000, [*GPT, *STAGES, "--schedule", "zb-h1"]),
    ("cnn, data 2", 2, 200, CNN),
    ("cnn, data 4", 4, 1000, [*CNN, "--batch", "64"]),
    # Formats on the wire, and other ways to agree.
    ("cnn, data 2, bf16 on the wire", 2, 100, [*CNN, "--wire", "bf16"]),
    ("cnn, data 2, int8 on the wire", 2, 100, [*CNN, "--wire", "int8"]),
    ("cnn, data 2, powersgd on the wire", 2, 100, [*CNN, "--wire", "powersgd"]),
    ("cnn, data 2, local, every 10", 2, 100, [*CNN, "--every", "10"]),
    ("cnn, data 2, a server", 2, 200, [*CNN, "--servers", "1"]),
    ("cnn, data 2, two servers", 2, "tcp", [*CNN, "--servers", "2"]),
    ("cnn, data 2, two servers, free", 2, 200, [*CNN, "--servers", "2", "--free"]),
]


def run(args):
    return subprocess.run([str(a) for a in args], check=True, cwd=ROOT, capture_output=True, text=True).stdout


class Namespaces:
    """Hosts on this machine: a namespace each, joined by a bridge, shaped at both ends by a token bucket."""

    def __init__(self, n, mbits):
        self.names = [f"pr{os.getpid():x}h{i}" for i in range(n)]
        self.switch = f"pr{os.getpid():x}sw"
        for name in [self.switch, *self.names]:
            run(["ip", "netns", "add", name])
            self.within(name, "ip link set lo up")
        self.within(self.switch, "ip link add br0 type bridge")
        self.within(self.switch, "ip link set br0 up")
        bucket = max(mbits * 1_000_000 // 8 // 500, 70_000)
        shape = f"root tbf rate {mbits}mbit burst {bucket} latency 100ms"
        for i, name in enumerate(self.names):
            run(f"ip link add eth0 netns {name} type veth peer name port{i} netns {self.switch}".split())
            self.within(self.switch, f"ip link set port{i} master br0")
            self.within(self.switch, f"ip link set port{i} up")
            self.within(name, f"ip addr add {self.address(i)}/24 dev eth0")
            self.within(name, "ip link set eth0 up")
            self.within(name, f"tc qdisc add dev eth0 {shape}")
            self.within(self.switch, f"tc qdisc add dev port{i} {shape}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for name in [*self.names, self.switch]:
            subprocess.run(["ip", "netns", "del", name], check=False)

    @staticmethod
    def address(i):
        return f"10.213.9.{i + 1}"

    @staticmethod
    def within(name, command):
        run(["ip", "netns", "exec", name, *command.split()])

    def bench(self, args):
        """One rank in each; what rank 0 prints."""
        ranks = []
        for i, name in enumerate(self.names):
            env = dict(os.environ, RANK=str(i), WORLD_SIZE=str(len(self.names)), MASTER_ADDR=self.address(0), MASTER_PORT="29511")
            env["POLYREME_SECRET"] = "5d" * 32
            command = ["ip", "netns", "exec", name, str(BINARY), *args]
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        outputs = [rank.communicate() for rank in ranks]
        for rank, (_, errors) in zip(ranks, outputs):
            if rank.returncode != 0:
                sys.exit(errors)
        return outputs[0][0]


def measure(ranks, by, args, calibration, steps):
    """Step times in ms: measured, predicted; and MiB: taken, planned."""
    command = ["bench", "step", *args, "--json", "--predict", str(calibration)]
    if steps:
        command += ["--steps", str(steps)]
    if by == "threads":
        command += ["--ranks", str(ranks), "--threads", "1"]
    elif by in ("shm", "tcp"):
        command += ["--processes", str(ranks), "--transport", by, "--threads", "1"]
    elif by != "one":
        # Ranks in namespaces do not know that they share this machine's cores.
        command += ["--transport", "tcp", "--threads", "1", "--no-pin", "--link-mbits", str(by)]
        with Namespaces(ranks, by) as hosts:
            lines = hosts.bench(command)
    if by == "one" or isinstance(by, str):
        lines = run([BINARY, *command])
    objects = [json.loads(line) for line in lines.splitlines() if line.startswith("{")]
    step = next(o for o in objects if "peak_rss_mib" in o)
    predicted = next(o for o in objects if "predicted_ms" in o)
    return step["step_ms"], predicted["predicted_ms"], step["peak_rss_mib"], step["planned_peak_mib"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="plans whose name and transport contain this")
    parser.add_argument("--calibration", help="one that exists, instead of a new one")
    parser.add_argument("--steps", type=int, help="timed steps of each [default: what the job says]")
    args = parser.parse_args()

    def way(by):
        return by if isinstance(by, str) else f"{by} Mbit/s"

    plans = [p for p in PLANS if args.only in f"{p[0]} {way(p[2])}"]
    print(f"{len(plans)} plans: " + "; ".join(f"{p[0]} ({way(p[2])})" for p in plans), flush=True)
    calibration = args.calibration
    if not calibration:
        calibration = "/tmp/polyreme-calibration.json"
        print(run([BINARY, "bench", "calibrate", "--output", calibration]), flush=True)
    seen = {i: [] for i in range(len(plans))}
    for number in range(args.rounds):
        for i, (name, ranks, by, arguments) in enumerate(plans):
            seen[i].append(measure(ranks, by, arguments, calibration, args.steps))
            print(f"round {number + 1}: {name} ({way(by)}): {seen[i][-1][0]:.2f} / {seen[i][-1][1]:.2f} ms", file=sys.stderr, flush=True)
    print("\n| plan | ranks over | measured ms | spread | predicted ms | error | taken MiB | planned |\n|---|---|---|---|---|---|---|---|")
    errors, groups = [], {}
    for i, (name, ranks, by, _) in enumerate(plans):
        times = [row[0] for row in seen[i]]
        measured, predicted = statistics.median(times), statistics.median(row[1] for row in seen[i])
        spread = (max(times) - min(times)) / measured
        error = predicted / measured - 1
        errors.append(abs(error))
        taken, planned = seen[i][-1][2], seen[i][-1][3]
        groups.setdefault((name.split(",")[0], way(by)), []).append((predicted, measured, name))
        print(f"| {name} | {way(by)} | {measured:.2f} | {spread * 100:.1f} % | {predicted:.2f} | {error * 100:+.1f} % | {taken:.0f} | {planned / taken:.3f} |")
    print(f"\nmean size of errors {statistics.mean(errors) * 100:.1f} %, largest {sorted(f'{e * 100:.1f}' for e in errors) and ', '.join(f'{e * 100:.1f} %' for e in sorted(errors)[-3:])}")
    for (job, by), members in groups.items():
        if len(members) > 1:
            first, best = min(members), min(members, key=lambda m: m[1])
            print(f"{job} ({by}): predicted to be fastest: {first[2]}, {first[1] / best[1] * 100 - 100:.1f} % above the fastest measured")


if __name__ == "__main__":
    main()
