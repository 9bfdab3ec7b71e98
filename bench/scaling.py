#!/usr/bin/env python3
"""How far hosts help: one job on 8 to 4,096 described hosts, split in several ways, over two kinds of links.

    cargo build --release
    python3 bench/scaling.py --polyreme target/release/polyreme

asks `polyreme plan` for each case with every key of the plan set, so that rows can be compared, and once for each number of hosts with the mesh left
to the search. It puts the tables into docs/scaling.md, between the two marks there, and draws docs/scaling-10.svg and docs/scaling-100.svg. The
same input gives the same numbers. It needs nothing but Python and the program, and takes some minutes of one core.
"""

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
JOB = ROOT / "examples/gpt-24.toml"
CLUSTER = ROOT / "examples/clusters/cloud-8x32.toml"
PAGE = ROOT / "docs/scaling.md"
MARKS = ("<!-- by bench/scaling.py -->", "<!-- until here -->")

BATCH = 1024
HOSTS = [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
GBITS = [10, 100]
# Samples of a microbatch on a rank, at most: more of them take more memory than a host has.
MICRO = 4
# A doubling of hosts that makes a step less than this much faster does not help.
HELPS = 1.2

# Ways to split: a name, a colour, and the ranks along tensor and stage. The rest is data. Without ranks they are searched.
WAYS = [
    ("data", "#2563eb", 1, 1),
    ("tensor 4", "#d97706", 4, 1),
    ("stage 8", "#059669", 1, 8),
    ("tensor 2 x stage 8", "#9333ea", 2, 8),
    ("searched", "#111827", None, None),
]


def microbatches(data: int, stage: int) -> int:
    """As few as fit; a pipeline has at least one for each stage, if there are samples for so many."""
    fewest = max(1, BATCH // (data * MICRO))
    return max(fewest, min(stage, BATCH // data))


def keys_of(hosts: int, tensor: int | None, stage: int | None):
    """The keys of `[parallel]` that a way sets; None if this number of hosts cannot be arranged in that way, or some would have no samples."""
    keys = {"ranks": hosts, "sequence": 1}
    if tensor is None or stage is None:
        return keys | {"stage": "auto", "schedule": "zb-h1"}
    data = hosts // (tensor * stage)
    if data < 1 or data * tensor * stage != hosts or data > BATCH:
        return None
    keys |= {"tensor": tensor, "stage": stage, "microbatches": microbatches(data, stage)}
    keys |= {"shard_weights": "false", "shard_gradients": "false"}
    return keys | ({"schedule": "zb-h1"} if stage > 1 else {})


def plan(polyreme: str, cluster: Path, name: str, hosts: int, tensor: int | None, stage: int | None):
    """A row of the study; None if the job cannot be split so."""
    keys = keys_of(hosts, tensor, stage)
    if keys is None:
        return None
    command = [polyreme, "plan", str(JOB), "--cluster", str(cluster), "--json", "--top", "1"]
    command += ["--hosts", str(hosts), "--ranks-per-host", "1"]
    command += ["--set", f"train.batch={BATCH}"]
    for key, value in keys.items():
        command += ["--set", f"parallel.{key}={value}"]
    began = time.monotonic()
    out = subprocess.run(command, capture_output=True, text=True)
    took = time.monotonic() - began
    if out.returncode != 0:
        print(f"  {hosts} hosts, {name}: {out.stderr.strip()}", file=sys.stderr)
        return None
    row = json.loads(out.stdout.splitlines()[0])
    print(f"  {hosts:5} hosts, {name:20} {row['step_ms']:12.1f} ms   {mesh(row):36} ({took:.1f} s)", file=sys.stderr)
    return row


def mesh(row) -> str:
    """How the ranks of a plan are arranged, and what they shard."""
    axes = [f"{axis} {row[axis]:,}" for axis in ("data", "tensor", "stage") if row[axis] > 1]
    return " x ".join(axes) + (", sharded weights" if row["shard_weights"] else "")


def last_that_helps(by_hosts):
    """The number of hosts from which on doubling them helps no more, and why; no reason if it helps to the end."""
    known = [(hosts, by_hosts[hosts]["step_ms"]) for hosts in HOSTS if by_hosts.get(hosts)]
    for (hosts, ms), (_, ms_of_twice) in zip(known, known[1:]):
        if ms / ms_of_twice < HELPS:
            return hosts, f"twice as many are {ms / ms_of_twice:.2f} times as fast"
    return known[-1][0], "no samples for more" if known[-1][0] < HOSTS[-1] else ""


def seconds(ms: float) -> str:
    return f"{ms / 1000:.1f}" if ms >= 10_000 else f"{ms / 1000:.2f}" if ms >= 100 else f"{ms / 1000:.3f}"


def table(results) -> str:
    """Seconds per step, and the share of the ideal speed-up over the fewest hosts of `data`."""
    lines = ["| hosts | " + " | ".join(name for name, *_ in WAYS) + " |", "|---:|" + "---:|" * len(WAYS)]
    base = results["data"][HOSTS[0]]["step_ms"]
    for hosts in HOSTS:
        cells = []
        for name, *_ in WAYS:
            row = results[name].get(hosts)
            ideal = base * HOSTS[0] / hosts
            found = f", {mesh(row)}" if row and name == "searched" else ""
            cells.append(f"{seconds(row['step_ms'])} ({100 * ideal / row['step_ms']:.0f} %){found}" if row else "-")
        lines.append(f"| {hosts:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def stops(results) -> str:
    """Where each way stops helping, and what ranks do there."""
    lines = ["| way | helps up to | | a step then | waits | of it bubble | MiB per host |", "|---|---:|---|---:|---:|---:|---:|"]
    for name, *_ in WAYS:
        at, why = last_that_helps(results[name])
        row = results[name][at]
        share = lambda key: f"{100 * row[key]:.0f} %"
        lines.append(
            f"| {name} | {at:,} hosts | {why} | {seconds(row['step_ms'])} s | {share('waiting')} | {share('bubble')} | {row['memory_mib']:,.0f} |"
        )
    return "\n".join(lines)


def svg(title: str, results) -> str:
    """The share of the ideal speed over hosts, which stand at equal distances for each doubling."""
    width, height, left, right, top, bottom = 900, 500, 70, 190, 76, 64
    base = results["data"][HOSTS[0]]["step_ms"] * HOSTS[0]
    highest = max(base / hosts / row["step_ms"] for by_hosts in results.values() for hosts, row in by_hosts.items() if row)
    high = max(1.0, math.ceil(highest * 10) / 10)

    def x(hosts):
        return left + math.log2(hosts / HOSTS[0]) / math.log2(HOSTS[-1] / HOSTS[0]) * (width - left - right)

    def y(share):
        return height - bottom - share / high * (height - top - bottom)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        "font-family=\"Helvetica, Arial, 'Liberation Sans', sans-serif\" font-size=\"13\">",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="24" y="32" font-size="18" font-weight="bold">{title}</text>',
        f'<text x="24" y="56" fill="#475467">speed, as a share of what as many times the hosts would ideally have</text>',
    ]
    for hosts in HOSTS:
        out.append(f'<path d="M{x(hosts):.1f} {top}V{height - bottom}" stroke="#eef0f4"/>')
        out.append(f'<text x="{x(hosts):.1f}" y="{height - bottom + 20}" text-anchor="middle" fill="#475467">{hosts:,}</text>')
    for tenths in range(0, round(high * 10) + 1, 2):
        out.append(f'<path d="M{left} {y(tenths / 10):.1f}H{width - right}" stroke="#e4e7ec"/>')
        out.append(f'<text x="{left - 10}" y="{y(tenths / 10) + 4:.1f}" text-anchor="end" fill="#475467">{tenths * 10} %</text>')
    out.append(f'<text x="{(left + width - right) / 2}" y="{height - 18}" text-anchor="middle" fill="#475467">hosts of 32 cores</text>')
    ends = []
    for name, colour, *_ in WAYS:
        known = [(h, results[name][h]) for h in HOSTS if results[name].get(h)]
        points = [(x(h), y(base / h / row["step_ms"])) for h, row in known]
        line = 'stroke-dasharray="2 5" stroke-width="2"' if name == "searched" else 'stroke-width="2.5"'
        out.append(f'<path d="M{" L".join(f"{a:.1f} {b:.1f}" for a, b in points)}" fill="none" stroke="{colour}" {line}/>')
        out += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{colour}"/>' for a, b in points]
        ends.append((points[-1][1], points[-1][0], name, colour))
    # Names beside the ends of lines; those at the right edge are pushed apart where they would touch.
    at = -math.inf
    for end, across, name, colour in sorted(ends):
        if across < width - right - 1:
            out.append(f'<text x="{across:.1f}" y="{end - 12:.1f}" text-anchor="middle" fill="{colour}" font-weight="bold">{name}</text>')
            continue
        at = max(end + 4, at + 17)
        out.append(f'<text x="{across + 12:.1f}" y="{at:.1f}" fill="{colour}" font-weight="bold">{name}</text>')
    return "\n".join(out + ["</svg>"]) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--polyreme", default=str(ROOT / "target/release/polyreme"), help="the program")
    parser.add_argument("--hosts-max", type=int, default=HOSTS[-1], help="the largest number of hosts, for a quick try; nothing is written")
    args = parser.parse_args()
    began = time.monotonic()
    text = []
    for gbits in GBITS:
        print(f"links of {gbits} Gbit/s", file=sys.stderr)
        described, n = re.subn(r"(?m)^gbits = .*$", f"gbits = {gbits}", CLUSTER.read_text())
        assert n == 1, f"{CLUSTER} has one line of gbits"
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            file.write(described)
            file.flush()
            cluster = Path(file.name)
            results = {
                name: {hosts: plan(args.polyreme, cluster, name, hosts, tensor, stage) for hosts in HOSTS if hosts <= args.hosts_max}
                for name, _, tensor, stage in WAYS
            }
        if args.hosts_max < HOSTS[-1]:
            continue
        picture = f"scaling-{gbits}.svg"
        (PAGE.parent / picture).write_text(svg(f"A gpt of 24 layers over links of {gbits} Gbit/s", results))
        text += [f"### Links of {gbits} Gbit/s", f"![speed over hosts]({picture})", table(results), stops(results)]
    if text:
        page = PAGE.read_text()
        before, after = page.split(MARKS[0])[0], page.split(MARKS[1])[1]
        PAGE.write_text(f"{before}{MARKS[0]}\n" + "\n\n".join(text) + f"\n{MARKS[1]}{after}")
    print(f"took {time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
