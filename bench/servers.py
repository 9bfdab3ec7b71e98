#!/usr/bin/env python3
"""What it costs to lose workers and servers, and what is learnt all the same; how fast gradients and weights move.

    cargo build --release
    bench/servers.py chaos [--kills 100] [--every 1s] [--seed 1] [--sync ps-async]
    cargo build --release -p polyreme-collective --example push_pull
    bench/servers.py throughput

`chaos` trains examples/digits.toml on 4 ranks with 2 servers, kills a rank (with the server beside it, if there is one) and adds one at each interval until so many were
killed, and lets the run end. It prints the seed, and compares the accuracy on the test set with that of a run that is left alone, of as many epochs.

`throughput` lets one worker push 64 MiB to one server and pull as many, and then eight workers with two servers, over loopback; both as a share of what a plain copy through a
socket between two of the processes moves in the same run.
"""

import argparse
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
JOB = ROOT / "examples/digits.toml"


def train(binary, folder, epochs, sync, *more):
    settings = ["parallel.threads=1", f"parallel.sync={sync}", "parallel.servers=2", f"train.epochs={epochs}",
                "train.log_every=1000"]
    args = [binary, "train", JOB, "--processes", "4", "--transport", "tcp", "--json", "--output", folder, *more]
    args += [word for setting in settings for word in ("--set", setting)]
    out = subprocess.run(args, cwd=ROOT, capture_output=True, text=True)
    lines = [json.loads(line) for line in out.stdout.splitlines() if line.startswith("{")]
    if out.returncode != 0:
        raise SystemExit(f"it ended with {out.returncode}: {out.stderr[-800:]}")
    return lines[-1]


def seconds(text):
    return float(text.removesuffix("ms")) / 1e3 if text.endswith("ms") else float(text.removesuffix("s"))


def chaos(args, folder):
    # How many epochs take so long, from a run without faults.
    calm = train(args.binary, folder / "probe", 200, args.sync)
    per_epoch = calm["seconds"] / 200
    # A loss costs the segment and the time to form a group: about half of the time at one a second.
    epochs = int(args.kills * seconds(args.every) / per_epoch * args.share)
    calm = train(args.binary, folder / "calm", epochs, args.sync)
    faults = f"kill={args.every},join={args.every},seed={args.seed}"
    print(f"{args.sync}, {epochs} epochs, --chaos {faults}", flush=True)
    disturbed = train(args.binary, folder / "disturbed", epochs, args.sync, "--elastic", "--chaos", faults)
    for name, run in [("calm", calm), ("chaos", disturbed)]:
        wanted = ["seconds", "steps", "staleness_max", "ranks_lost", "ranks_joined", "steps_redone", "stall_ms_p50", "stall_ms_max"]
        print(name, {key: run[key] for key in wanted if run.get(key) is not None})
        print("   ", run["ledger"]["words"], "| test accuracy", run["metrics"]["test_accuracy"])
    if not (disturbed["ledger"]["exact"] and disturbed["ledger"]["digest"] == calm["ledger"]["digest"]):
        raise SystemExit("the ledgers differ")
    print("ledgers are the same; difference in accuracy, in points:",
          round(100 * (disturbed["metrics"]["test_accuracy"] - calm["metrics"]["test_accuracy"]), 2))


def throughput(args):
    for workers, servers, least in [(1, 1, 0.7), (8, 2, 0.6)]:
        out = subprocess.run([args.push_pull, str(workers), str(servers), "64", "10"], capture_output=True, text=True)
        if out.returncode != 0:
            raise SystemExit(f"it ended with {out.returncode}: {out.stderr[-800:]}")
        run = json.loads(out.stdout)
        print(f"{workers} workers, {servers} servers: push and pull {run['push_pull_gb_s']:.2f} GB/s, a plain copy {run['copy_gb_s']:.2f} GB/s: "
              f"{100 * run['share']:.0f} %, wanted {100 * least:.0f} %", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["chaos", "throughput"])
    parser.add_argument("--binary", default=ROOT / "target/release/polyreme")
    parser.add_argument("--push-pull", default=ROOT / "target/release/examples/push_pull")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--every", default="1s")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sync", default="ps-async")
    parser.add_argument("--share", type=float, default=0.5)
    args = parser.parse_args()
    if args.what == "throughput":
        return throughput(args)
    folder = Path(tempfile.mkdtemp(prefix="servers-"))
    try:
        chaos(args, folder)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
