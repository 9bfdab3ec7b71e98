#!/usr/bin/env python3
"""What a slow link adds to a step, by the format in which gradients travel.

    cargo build --release
    bench/wire.py [--mbits 100] [--job cnn] [--steps 20] [--binary target/release/polyreme]

Two ranks of one thread each, in network namespaces that the script makes and deletes, joined by links of --mbits. The step without a link is
that of two processes over loopback, f32. Prints one line for each format: the step, what it takes beyond the step without a link, and that
beside f32's. Needs root, `ip` and `tc`. Nothing else should run meanwhile.
"""

import argparse
import json
from pathlib import Path

import predict

FORMATS = ["f32", "bf16", "f16", "int8"]


def step_ms(lines):
    return json.loads(lines.splitlines()[0])["step_ms"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbits", type=int, default=100)
    parser.add_argument("--job", default="cnn")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--binary", type=Path, default=predict.BINARY)
    args = parser.parse_args()
    predict.BINARY = args.binary.resolve()
    command = ["bench", "step", "--job", args.job, "--steps", str(args.steps), "--json", "--transport", "tcp", "--threads", "1"]
    without = step_ms(predict.run([predict.BINARY, *command, "--processes", "2"]))
    print(f"without a link  {without:8.1f} ms")
    plain = None
    for name in FORMATS:
        wire = [] if name == "f32" else ["--wire", name]
        with predict.Namespaces(2, args.mbits) as hosts:
            # Ranks in namespaces do not know that they share this machine's cores.
            took = step_ms(hosts.bench([*command, "--no-pin", *wire]))
        beyond = took - without
        plain = plain or beyond
        print(f"{name:14}  {took:8.1f} ms  {beyond:8.1f} ms beyond, {beyond / plain:.3f} of f32's", flush=True)


if __name__ == "__main__":
    main()
