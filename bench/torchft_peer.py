#!/usr/bin/env python3
"""How long a rank that is killed holds the other one with torchft (PyPI `torchft`), beside `bench/elastic.py kills`.

    pip install torch torchft
    bench/torchft_peer.py [--kills 5] [--heartbeat-ms 5000]     # 5000 is torchft's default

Two replica groups of one rank each train a small network over gloo; one is killed with SIGKILL and started again. Prints the longest time between
two steps of the other one after each kill.
"""

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from datetime import timedelta


def worker():
    import torch
    from torch.distributed import TCPStore
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    inner = torch.optim.SGD(model.parameters(), lr=0.01)

    def load(state):
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optim"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optim": inner.state_dict()},
        min_replica_size=1,
        replica_id=sys.argv[2],
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    x, y = torch.randn(64, 64), torch.randint(0, 10, (64,))
    while True:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()
        print(manager.current_step(), manager.num_participants(), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--heartbeat-ms", type=int, default=5000)
    args = parser.parse_args()
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=args.heartbeat_ms)
    # Its address names the host, which need not be known to a resolver.
    address = lighthouse.address().replace(socket.gethostname(), "127.0.0.1")
    env = {**os.environ, "TORCHFT_LIGHTHOUSE": address, "TORCHFT_MANAGER_PORT": "0", "LOGLEVEL": "ERROR"}
    start = lambda name: subprocess.Popen([sys.executable, __file__, "worker", name], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    stays, other, times = start("stays_"), start("other_"), []

    def until(wanted):
        while line := stays.stdout.readline():
            if wanted(int(line.split()[1])):
                return
        raise SystemExit("the rank that was to stay has ended")

    try:
        for _ in range(args.kills):
            until(lambda ranks: ranks == 2)
            for _ in range(50):
                until(lambda ranks: ranks == 2)
            other.send_signal(signal.SIGKILL)
            other.wait()
            # The next steps: the longest wait is that for the loss.
            longest, last, began = 0.0, time.monotonic(), time.monotonic()
            while time.monotonic() - began < 0.5 or longest < 0.5:
                until(lambda ranks: True)
                now = time.monotonic()
                longest, last = max(longest, now - last), now
                if now - began > 20:
                    break
            times.append(longest)
            other = start("other_")
    finally:
        for process in (stays, other):
            process.kill()
            process.wait()
    print(f"torchft: {len(times)} kills hold the other rank for {statistics.median(times):.2f} s in the median, {max(times):.2f} s at most")


if __name__ == "__main__":
    worker() if sys.argv[1:2] == ["worker"] else main()
