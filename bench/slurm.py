#!/usr/bin/env python3
"""`deploy/slurm/elastic.sbatch` under the real Slurm, on this machine alone: a task is killed, the run goes on, is requeued and is completed.

    apt-get install slurmctld slurmd slurm-client munge
    cargo build --release
    bench/slurm.py                                          # as root; everything is in a temporary folder and ended afterwards

Starts `munged`, `slurmctld` and `slurmd` with a configuration of its own, submits the script with 3 tasks, kills the process of one with
SIGKILL, then the coordinator, then lets the time be up, so that the job is started again; prints what it did, and checks that all
samples of each epoch counted once.
"""

import json
import os
import pathlib
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONF = """ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctl}
SlurmdPort={d}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
# More tasks than this machine may have cores.
SlurmdParameters=config_overrides
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=here Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def until(what, done, limit=60.0):
    began = time.monotonic()
    while time.monotonic() - began < limit:
        if seen := done():
            return seen
        time.sleep(0.05)
    raise SystemExit(f"{what}: not within {limit} s")


def main():
    folder = pathlib.Path(tempfile.mkdtemp())
    host = socket.gethostname().split(".")[0]
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(host=host, ctl=free_port(), d=free_port(), folder=folder))
    for name in ("state", "spool", "munge", "bin", "work"):
        (folder / name).mkdir()
    key = folder / "munge/key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    folder.chmod(0o755)
    env = {**os.environ, "SLURM_CONF": str(conf), "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    (folder / "bin/polyreme").symlink_to(ROOT / "target/release/polyreme")
    slurm = lambda *words: subprocess.run(words, env=env, cwd=folder / "work", capture_output=True, text=True)
    munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge/socket", f"--key-file={key}"]
    munge += [f"--pid-file={folder}/munge/pid", f"--log-file={folder}/munge/log", f"--seed-file={folder}/munge/seed"]
    quiet = dict(env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    daemons = [subprocess.Popen(munge, **quiet)]
    try:
        until("munge", lambda: (folder / "munge/socket").exists())
        daemons.append(subprocess.Popen(["slurmctld", "-D", "-f", conf], **quiet))
        daemons.append(subprocess.Popen(["slurmd", "-D", "-f", conf, "-N", host], **quiet))
        until("a node", lambda: "idle" in slurm("sinfo", "-h", "-o", "%t").stdout)
        shutil.copytree(ROOT / "examples/data", folder / "work/data")
        job = (ROOT / "examples/digits.toml").read_text()
        job = job.replace("epochs = 25", "epochs = 400") + "\n[parallel]\nelastic = { min = 1, max = 4 }\nthreads = 1\n"
        (folder / "work/digits.toml").write_text(job)
        sets = ["--nodes=1", "--ntasks=3", "--ntasks-per-node=3", "--cpus-per-task=1"]
        script = (ROOT / "deploy/slurm/elastic.sbatch").read_text().replace("#SBATCH --exclusive\n", "")
        (folder / "work/elastic.sbatch").write_text(script)
        sent = slurm("sbatch", "--parsable", *sets, "elastic.sbatch", "digits.toml")
        number = sent.stdout.strip()
        assert number, sent.stderr
        log = folder / f"work/polyreme-{number}.log"

        def of(word):
            out = subprocess.run(["pgrep", "-f", f"^[^ ]*polyreme {word} "], capture_output=True, text=True)
            return [int(pid) for pid in out.stdout.split()]

        metrics = folder / "work/runs/digits/metrics.jsonl"
        rows = lambda: [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        step = lambda: max((row["step"] for row in rows()), default=0)
        try:
            until("it trains", lambda: step() > 200)
            os.kill(of("join")[-1], signal.SIGKILL)
            until("two go on", lambda: any(row.get("ranks") == 2 for row in rows()))
            before = step()
            os.kill(of("coordinator")[-1], signal.SIGKILL)
            until("they go on", lambda: step() > before + 200)
            slurm("scancel", "--signal=TERM", number)
            until("it is to start again", lambda: "JobState=PENDING" in slurm("scontrol", "show", "job", number).stdout)
            # Slurm would wait for two minutes.
            slurm("scontrol", "update", f"JobId={number}", "StartTime=now")
            before = step()
            until("it goes on", lambda: step() > before + 200)
            until("it ends", lambda: slurm("squeue", "-h", "-j", number).stdout.strip() == "", 300)
        finally:
            print(log.read_text() if log.exists() else "no log")
        print(f"generations: {[row['ranks'] for row in rows() if 'generation' in row]} ranks; {step()} steps")
        shown = subprocess.run([folder / "bin/polyreme", "inspect", metrics.parent], capture_output=True, text=True).stdout
        counted = [line for line in shown.splitlines() if "counted once in each" in line]
        print(*counted, sep="\n")
        assert counted
        assert slurm("scontrol", "show", "job", number).stdout.count("JobState=COMPLETED") == 1
    finally:
        slurm("scancel", "--full", "--signal=KILL", "--user=root")
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
