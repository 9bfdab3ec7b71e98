#!/usr/bin/env python3
"""What it costs to lose ranks, to lose the coordinator, to have many ranks, to let one join, and to be elastic at all.

    cargo build --release
    bench/elastic.py kills [--seconds 120] [--every 1s] [--transport shm]  # examples/digits.toml on 4 ranks, a kill and a join each second
    bench/elastic.py faults --seconds 330                   # the same in network namespaces: kills, cut links and pauses
    bench/elastic.py coordinator [--kills 50]               # 3 ranks; the coordinator is killed and started again
    bench/elastic.py successor [--kills 50]                 # 4 ranks; the process that coordinates is killed, and another rank joins
    bench/elastic.py etcd [--kills 20]                      # 3 ranks and 3 servers of etcd: its leader and the coordinating process are killed
    bench/elastic.py many [--ranks 64]                      # how long a group takes to form, and to replace a rank
    bench/elastic.py join                                   # a third rank joins two that train a gpt of 163 million parameters
    bench/elastic.py cost [--rounds 3]                      # gpt on 2 processes over TCP, elastic and not, by turns

`kills` also trains undisturbed on one rank to the same step and compares the weights. Nothing else should run meanwhile.
"""

import argparse
import collections
import json
import os
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BINARY = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release/polyreme"
JOB = ROOT / "examples/digits.toml"
SETTINGS = ["parallel.reproducible=true", "parallel.threads=1", "train.epochs=1000000", 'train.schedule={ kind = "constant" }']


def sets(*more):
    return [word for setting in [*SETTINGS, *more] for word in ("--set", setting)]


def run(*args, **options):
    return subprocess.Popen([BINARY, *args], cwd=ROOT, text=True, **options)


def status(at):
    out = subprocess.run([BINARY, "status", at, "--json"], capture_output=True, text=True, cwd=ROOT)
    return json.loads(out.stdout) if out.returncode == 0 else None


def until(what, done, limit=120.0):
    """Waits; the seconds that it took, and what was seen."""
    began = time.monotonic()
    while time.monotonic() - began < limit:
        seen = done()
        if seen:
            return time.monotonic() - began, seen
        time.sleep(0.02)
    raise SystemExit(f"{what}: not within {limit} s")


def under_chaos(folder, seconds, chaos, *more):
    """Trains for so long while faults happen; prints what they cost, and compares the weights."""
    args = ["train", JOB, "--elastic", "--processes", "4", "--json", "--output", folder / "run", "--chaos", chaos, *more]
    process = run(*args, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    lines = []
    reader = threading.Thread(target=lambda: lines.extend(process.stdout))
    reader.start()
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    process.wait()
    reader.join()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    summary = events[-1]
    faults = collections.Counter(event["fault"] for event in events if event.get("event") == "fault")
    ways = {row["transport"] for event in events if event.get("event") == "placed" for row in event["ranks"]}
    print("over", ", ".join(sorted(ways)), "faults:", dict(faults))
    wanted = ["ranks_lost", "ranks_joined", "steps", "steps_redone", "stall_ms_p50", "stall_ms_p99", "stall_ms_max", "stall_parts_ms_p50"]
    print({key: summary[key] for key in wanted}, "each sample once:", summary["ledger"]["exact"])
    compare(folder, summary["steps"], "")


def kills(folder, seconds, every, transport):
    under_chaos(folder, seconds, f"kill={every},join={every},seed=7", "--transport", transport, *sets())


def faults(folder, seconds):
    chaos = "kill=1500ms,cut=6s:500ms..5s,stop=15s:2s..20s,join=1s,seed=7"
    under_chaos(folder, seconds, chaos, *sets("parallel.patience=3"))


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def coordinator(folder, n_kills):
    at = free_address()
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    patience = "parallel.patience=10"
    start = lambda: run("coordinator", JOB, "--listen", at, "--start", "3", "--output", folder / "run", *sets(patience), **quiet)
    boss = start()
    ranks = [run("join", at, JOB, *sets(patience), **quiet) for _ in range(3)]
    step = lambda: max((row["step"] for row in (status(at) or {"members": []})["members"]), default=0)
    try:
        until("it begins", lambda: step() > 100)
        times = []
        for _ in range(n_kills):
            before = step()
            boss.kill()
            boss.wait()
            boss = start()
            knows = lambda: (now := status(at)) and now["trains"] and now["ranks"] == 3 and max(r["step"] for r in now["members"]) > before
            times.append(until("it goes on", knows)[0])
        now = status(at)
        print(f"{n_kills} kills: known again after {statistics.median(times):.2f} s, at most {max(times):.2f} s;", end=" ")
        print(f"generation {now['generation']}, {now['ranks_lost']} ranks lost, step {step()}")
    finally:
        for process in [*ranks, boss]:
            process.kill()
            process.wait()


def successor(folder, n_kills):
    at = free_address()
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    start = ["train", JOB, "--elastic", "--processes", "4", "--listen", at, "--output", folder / "run"]
    started, times = [run(*start, *sets(), **quiet)], []
    try:
        until("it begins", lambda: (now := status(at)) and now["trains"] and now["members"][0]["step"] > 100)
        for kill in range(n_kills):
            now = status(at)
            before, gone = max(row["step"] for row in now["members"]), now["coordinator_pid"]
            os.kill(gone, signal.SIGKILL)
            # The first is the process that started the run, and no rank.
            left = 3 if kill else 4

            def goes_on():
                now = status(at)
                trains = now and now["coordinator_pid"] != gone and now["trains"] and now["ranks"] == left
                return trains and max(row["step"] for row in now["members"]) > before

            times.append(until("it goes on", goes_on)[0])
            [process.poll() for process in started]
            if kill:
                started.append(run("join", at, JOB, "--threads", "1", *sets(), **quiet))
                until("another rank joins", lambda: (now := status(at)) and now["trains"] and now["ranks"] == 4)
        now = status(at)
        print(f"{n_kills} kills: known to train again after {statistics.median(times):.2f} s, at most {max(times):.2f} s;", end=" ")
        print(f"generation {now['generation']}, {now['ranks_lost']} ranks lost, {now['steps_redone']} steps done again")
    finally:
        for row in (status(at) or {"members": []})["members"]:
            os.kill(row["pid"], signal.SIGKILL)
        for process in started:
            process.kill()
            process.wait()


class Etcd:
    """Three servers of etcd on loopback."""

    def __init__(self, folder):
        self.folder = folder
        self.clients, self.peers = [free_address() for _ in range(3)], [free_address() for _ in range(3)]
        self.servers = [None] * 3
        [self.start(k) for k in range(3)]

    def start(self, k):
        client, peer = f"http://{self.clients[k]}", f"http://{self.peers[k]}"
        cluster = ",".join(f"n{i}=http://{peer}" for i, peer in enumerate(self.peers))
        args = ["etcd", "--name", f"n{k}", "--data-dir", str(self.folder / f"etcd{k}"), "--initial-cluster", cluster]
        args += ["--listen-client-urls", client, "--advertise-client-urls", client]
        args += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        self.servers[k] = subprocess.Popen(args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def leader(self):
        for k, client in enumerate(self.clients):
            try:
                ask = urllib.request.Request(f"http://{client}/v3/maintenance/status", data=b"{}")
                answer = json.loads(urllib.request.urlopen(ask, timeout=1).read())
                if answer.get("leader") == answer["header"]["member_id"]:
                    return k
            except OSError:
                pass
        return None

    def kill(self, k):
        self.servers[k].kill()
        self.servers[k].wait()


def stored(folder, n_kills):
    etcd = Etcd(folder)
    store = f"etcd://{','.join(etcd.clients)}/runs/bench"
    more = [f'parallel.elastic={{ min = 1, max = 4, store = "{store}" }}', "parallel.patience=10"]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    enter = lambda: run("join", store, JOB, "--threads", "1", *sets(*more), **quiet)
    boss = run("coordinator", JOB, "--listen", free_address(), "--start", "3", "--output", folder / "run", *sets(*more), **quiet)
    started, times = [boss], []
    best = lambda now: max(row["step"] for row in now["members"])
    trains = lambda n, above=0: lambda: (now := status(store)) and now["trains"] and now["ranks"] == n and best(now) > above and now
    try:
        until("etcd has a leader", lambda: etcd.leader() is not None)
        started += [enter() for _ in range(3)]
        _, now = until("it begins", trains(3, 100))
        for kill in range(n_kills):
            leader, gone, before = etcd.leader(), now["coordinator_pid"], best(now)
            etcd.kill(leader)
            os.kill(gone, signal.SIGKILL)
            # The first that coordinates is no rank.
            times.append(until("it goes on", trains(2 if kill else 3, before))[0])
            [process.poll() for process in started]
            etcd.start(leader)
            if kill:
                started.append(enter())
            _, now = until("all are there", lambda: etcd.leader() is not None and trains(3, before)())
        steps = best(now)
        print(f"{n_kills} kills of etcd's leader and of the coordinating process: the others are known to train again after", end=" ")
        print(f"{statistics.median(times):.2f} s, at most {max(times):.2f} s; generation {now['generation']}, {now['ranks_lost']} ranks lost")
        for row in now["members"]:
            os.kill(row["pid"], signal.SIGTERM)
        until("they save and leave", lambda: all(process.poll() is not None for process in started))
    finally:
        for process in [*started, *etcd.servers]:
            process.kill()
            process.wait()
    saved = max(int(path.name.removeprefix("step-")) for path in (folder / "run" / "checkpoints").glob("step-*"))
    compare(folder, saved, f"no step lost: {saved >= steps};")


def compare(folder, steps, said):
    calm = folder / "calm"
    args = ["train", JOB, "--ranks", "1", "--json", "--output", calm, *sets()]
    args = [f"train.steps={steps}" if str(arg).startswith("train.epochs") else arg for arg in args]
    subprocess.run([BINARY, *args], cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    files = [run / "checkpoints" / f"step-{steps:08}" / "model.safetensors" for run in (folder / "run", calm)]
    print(said, "the weights of an undisturbed run:", files[0].read_bytes() == files[1].read_bytes())


def many(folder, n):
    at = free_address()
    more = [f"parallel.elastic={{ min = 1, max = {n} }}", f"parallel.shards={n}", f"train.batch={max(64, n)}"]
    args = ["train", JOB, "--elastic", "--processes", str(n), "--listen", at, "--json", "--output", folder / "run", *sets(*more)]
    began = time.monotonic()
    process = run(*args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        trains = lambda ranks: lambda: (now := status(at)) and now["trains"] and now["ranks"] == ranks and now
        _, now = until("all train", trains(n))
        print(f"{n} ranks train {time.monotonic() - began:.1f} s after the start")
        pid = now["members"][-1]["pid"]
        fds, threads = len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))
        print(f"a rank has {fds} open files and {threads} threads")
        os.kill(pid, signal.SIGKILL)
        less, _ = until("the others train", trains(n - 1))
        joined = run("join", at, JOB, *sets(*more), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        back, _ = until("it is replaced", trains(n))
        print(f"a lost rank: the others train after {less:.2f} s; replaced {back:.2f} s after its successor was started")
        joined.kill()
        joined.wait()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


LARGE = """
[model]
kind = "gpt"
vocab = 50257
layers = 12
width = 768
heads = 12
context = 128

[data]
kind = "text"
path = "{text}"
validation = 0.01

[train]
batch = 8
epochs = 1000
optimizer = {{ kind = "adamw", lr = 1e-4 }}

[output]
every_epochs = 100

[parallel]
threads = 1
elastic = {{ min = 1, max = 4 }}
"""


def join(folder):
    """What is between two steps of the ranks that train, when another one enters, beside what a step takes."""
    job = folder / "large.toml"
    job.write_text(LARGE.format(text=ROOT / "examples/data/moby-dick.txt"))
    at = free_address()
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    args = ["train", job, "--elastic", "--processes", "2", "--listen", at, "--json", "--output", folder / "run"]
    process = run(*args, **quiet)
    joined = None
    times = {}

    def look():
        now = status(at)
        if not now or not now.get("members"):
            return False
        # The step that the first rank has done, when that was seen first, and how many ranks there were. Ranks tell it once a second.
        times.setdefault(max(row["step"] for row in now["members"]), (time.monotonic(), now["ranks"]))
        return now

    try:
        until("it begins", lambda: look() and max(times) >= 6, 300)
        joined = run("join", at, job, **quiet)
        until("it enters", lambda: (now := look()) and now["ranks"] == 3 and now["trains"], 300)
        entered = max(times)
        until("it goes on", lambda: look() and max(times) >= entered + 4, 300)
    finally:
        process.send_signal(signal.SIGINT)
        if joined:
            joined.kill()
            joined.wait()
        process.wait()
    steps = sorted(times)
    print("seconds from step to step, to a second, with the ranks before and after:")
    for a, b in zip(steps, steps[1:]):
        print(f"  step {a} to {b}: {times[b][0] - times[a][0]:.1f} s, {times[a][1]} -> {times[b][1]}")


def cost(folder, rounds):
    """Samples per second with and without --elastic."""
    job = ROOT / "examples/gpt.toml"
    each = ["--processes", "2", "--json", "--set", "train.steps=60", "--set", "parallel.threads=1"]
    rates = {"plain": [], "elastic": []}
    for k in range(rounds):
        for what, flags in [("plain", ["--transport", "tcp"]), ("elastic", ["--elastic"])]:
            out = folder / f"{what}{k}"
            command = [BINARY, "train", job, "--output", out, *flags, *each]
            lines = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
            rates[what].append(json.loads(lines.splitlines()[-1])["samples_per_s"])
    ratios = [a / b for a, b in zip(rates["plain"], rates["elastic"])]
    print("samples per second:", {what: [round(rate, 1) for rate in all] for what, all in rates.items()})
    print("time of an elastic step beside a plain one:", [round(ratio, 3) for ratio in ratios])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kills", "faults", "coordinator", "successor", "etcd", "many", "join", "cost"])
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--every", default="1s")
    parser.add_argument("--transport", choices=["shm", "tcp"], default="shm")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    os.environ.setdefault("POLYREME_SECRET", secrets.token_hex(32))
    folder = Path(tempfile.mkdtemp())
    try:
        if args.what == "kills":
            kills(folder, args.seconds, args.every, args.transport)
        elif args.what == "faults":
            faults(folder, args.seconds)
        elif args.what == "coordinator":
            coordinator(folder, args.kills)
        elif args.what == "successor":
            successor(folder, args.kills)
        elif args.what == "etcd":
            stored(folder, args.kills)
        elif args.what == "join":
            join(folder)
        elif args.what == "cost":
            cost(folder, args.rounds)
        else:
            many(folder, args.ranks)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
