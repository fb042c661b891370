"""A real slurmctld with 64 emulated nodes reads our topology.conf: jobs that ask stay in a group.

    apt-get download slurmctld slurmd slurm-client slurm-wlm-basic-plugins libmunge2 libhwloc15
    python benchmarks/slurm_topology.py FOLDER [--times 20]      # root

FOLDER holds these packages. They are unpacked into a temporary folder and laid over /usr in a mount
namespace of this script alone: nothing is installed. 64 slurmd on this machine, one per node, are
put on eight leaves by what `tutti fleet export --to slurm-tree` writes. In each round some
nodes of all groups but one are taken; `srun -N8 --switches=1` must run in the one group left. As a
control, `srun -N8` without it, while no group is whole, runs in several.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GROUPS, WIDTH = 8, 8
BUSY_S = 240
_INSIDE = "--inside"
CONF = """\
ClusterName=tutti
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort=16817
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/linear
SchedulerType=sched/backfill
SlurmdParameters=config_overrides
ReturnToService=2
TopologyPlugin=topology/tree
NodeName=h-[0000-0063] NodeHostname={host} NodeAddr=127.0.0.1 Port=[17000-17063] CPUs=1
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
CLUSTER = {
    "name": "c64",
    "pools": [{"name": "h", "node": "HGX-H800", "nodes": GROUPS * WIDTH}],
    "fabric": {
        "rail_optimized": True,
        "tiers": [{"name": "leaf", "nodes": WIDTH}, {"name": "spine", "oversubscription": 4}],
    },
}


def main() -> None:
    """Unpack, go into a mount namespace, run there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument(_INSIDE, type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside is not None:
        sys.exit(run(given.inside, given.times))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "root")
        for package in sorted(given.folder.glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", package, root], check=True)
        for daemon in ("slurmctld", "slurmd", "slurmstepd"):
            (root / "usr/sbin" / daemon).symlink_to(f"{daemon}-wlm")
        laid = f'mount -t overlay overlay -o lowerdir={root}/usr:/usr /usr && exec "$@"'
        again = [sys.executable, __file__, str(given.folder), "--times", str(given.times)]
        command = ["unshare", "-m", "--propagation", "private", "sh", "-c", laid, "sh"]
        sys.exit(subprocess.run([*command, *again, _INSIDE, folder], check=False).returncode)


def run(folder: Path, times: int) -> int:
    """Start controller and nodes, ask `times` times; return 0 if all stayed in one group."""
    from tutti.document import Place
    from tutti.fleet.exports import slurm_tree
    from tutti.fleet.host_names import named_hosts
    from tutti.hardware.cluster import Cluster

    host = os.uname().nodename
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(CONF.format(host=host, folder=folder))
    cluster = Cluster.from_document(CLUSTER, Place("c64"))
    written = slurm_tree(cluster, named_hosts(cluster, None))
    (folder / "topology.conf").write_text(written)
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    daemons = [subprocess.Popen(["slurmctld", "-D"], stderr=subprocess.DEVNULL)]
    try:
        for node in range(GROUPS * WIDTH):
            (folder / f"spool-h-{node:04d}").mkdir()
            daemons.append(
                subprocess.Popen(["slurmd", "-D", "-N", f"h-{node:04d}"], stderr=subprocess.DEVNULL)
            )
        _wait_idle()
        print(_said(["slurmctld", "-V"]).strip(), "-", GROUPS * WIDTH, "nodes idle")
        print(_said(["scontrol", "show", "topology"]).strip())
        together = sum(_round(seed) for seed in range(times))
        print(f"srun -N8 --switches=1: in one group {together} of {times}")
        print(f"srun -N8 while no group is whole: in {_spread()} groups")
        return 0 if together == times else 1
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _said(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _wait_idle() -> None:
    until = time.monotonic() + BUSY_S
    while time.monotonic() < until:
        found = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%T"], capture_output=True, text=True, check=False
        ).stdout.split()
        if len(found) == GROUPS * WIDTH and set(found) == {"idle"}:
            return
        time.sleep(0.5)
    sys.exit(f"not idle after {BUSY_S} s: {sorted(set(found))}")


def _held(nodes: list[int]) -> str:
    names = ",".join(f"h-{node:04d}" for node in nodes)
    command = ["salloc", "--no-shell", "-w", names, "-N", str(len(nodes))]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return said.split("allocation ")[1].split()[0]


def _groups(command: list[str]) -> set[int]:
    script = ["sh", "-c", "echo $SLURMD_NODENAME"]
    names = _said([*command, *script]).split()
    assert len(set(names)) == WIDTH, names
    return {int(name.removeprefix("h-")) // WIDTH for name in names}


def _round(seed: int) -> bool:
    """Take nodes of every group but one, and run a job that wants one."""
    dice = random.Random(seed)
    whole = dice.randrange(GROUPS)
    taken = [
        group * WIDTH + slot
        for group in range(GROUPS)
        if group != whole
        for slot in dice.sample(range(WIDTH), dice.randint(1, WIDTH - 1))
    ]
    job = _held(taken)
    try:
        return _groups(["srun", "-N8", "--switches=1"]) == {whole}
    finally:
        subprocess.run(["scancel", job], check=True)
        _wait_idle()


def _spread() -> int:
    job = _held([group * WIDTH for group in range(GROUPS)])
    try:
        return len(_groups(["srun", "-N8"]))
    finally:
        subprocess.run(["scancel", job], check=True)


if __name__ == "__main__":
    main()
