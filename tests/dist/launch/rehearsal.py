"""Two hosts as network namespaces, on which the files of `tutti launch --to torchrun` are run.

`ssh` is a script that enters the namespace of the host it is given; everything else, the scripts,
torchrun's agents and their rendezvous, is as on two machines.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.launching import facts_of, plan_of
from tutti.bench.emulated_network import Bed, BedSpec, address
from tutti.document import Place
from tutti.hardware.cluster import Cluster
from tutti.launch.job import Job
from tutti.launch.targets import write_folder
from tutti.launch.torchrun import torchrun_files
from tutti.models.spec import ModelSpec
from tutti.plan.chips import ChipSet
from tutti.plan.plan import Plan, Replica

BED = BedSpec(name="rehearsal", nics=((1000,), (1000,)), ranks_per_host=2)
# The commands of a rank: one that only meets the others, and the real one.
STAND_IN = [sys.executable, str(Path(__file__).with_name("stand_in.py"))]
TRAIN = [sys.executable, "-m", "tutti.cli.main", "train"]


def crossed_pair(*, uneven: bool = False, model: ModelSpec | None = None) -> Plan:
    """Two pools of one node with two CPUs; each stage has a chip of both, so ranks cross.

    `uneven`: one of the four chips is a spare, so the hosts have different numbers of ranks.
    """
    pools = [{"name": name, "node": "CPU-host"} for name in ("left", "right")]
    cluster = Cluster.from_document({"name": "pair", "pools": pools}, Place("pair"))
    first = [Replica(chips=ChipSet.of(f"{pool}/0/0")) for pool in ("left", "right")]
    if uneven:
        second = [Replica(chips=ChipSet.of("left/0/1"), sequences=2)]
        return plan_of(cluster, [first, second], model, spare=ChipSet.of("right/0/1"))
    second = [Replica(chips=ChipSet.of(f"{pool}/0/1")) for pool in ("left", "right")]
    return plan_of(cluster, [first, second], model)


def files_of(
    plan: Plan,
    *arguments: str,
    command: list[str] = STAND_IN,
    config: str | None = None,
    restarts: int = 0,
) -> dict[str, str]:
    """Return the files that start a plan on the two hosts."""
    pools = {
        pool: {
            "hosts": [address(host, 0)],
            "interface": "nic0",
            "launcher": [sys.executable, "-m", "torch.distributed.run"],
            "environment": {"OMP_NUM_THREADS": 1},
        }
        for host, pool in enumerate(("left", "right"))
    }
    facts = facts_of({"pools": pools, "command": command, "restarts": restarts})
    return torchrun_files(Job.of(plan, facts, config=config, arguments=arguments))


@dataclass(frozen=True, slots=True)
class Done:
    """How a rehearsal ended."""

    status: int
    output: str
    sent_bytes: dict[str, int]  # by wire


def run_files(files: dict[str, str], folder: Path, *, timeout_s: float = 120.0) -> Done:
    """Write launch files and run them on two namespaces; nothing of it stays behind."""
    write_folder(folder, files)
    bed = Bed(BED)
    try:
        ssh = _write_ssh(bed, folder)
        before = bed.sent_bytes()
        with _started(["bash", str(folder / "run.sh")], ssh) as process:
            output, _ = process.communicate(timeout=timeout_s)
        after = bed.sent_bytes()
    finally:
        bed.close()
    sent = {wire: after[wire] - before[wire] for wire in after}
    return Done(process.returncode, output, sent)


def _write_ssh(bed: Bed, folder: Path) -> Path:
    holders = [holder for holder, _ in bed.homes()[:: BED.ranks_per_host]]
    cases = "\n".join(
        f"  {address(host, 0)}) holder={holder} ;;" for host, holder in enumerate(holders)
    )
    path = folder / "ssh"
    path.write_text(
        "#!/usr/bin/env bash\n"
        f'case $2 in\n{cases}\n  *) echo "no host $2" >&2; exit 255 ;;\nesac\n'
        'exec nsenter --net="/proc/$holder/ns/net" bash -c "$3"\n',
        encoding="utf-8",
    )
    path.chmod(0o755)
    return path


@contextlib.contextmanager
def _started(command: list[str], ssh: Path) -> Iterator[subprocess.Popen[str]]:
    root = Path(__file__).parents[3]
    paths = [str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={
            **os.environ,
            "TUTTI_SSH": str(ssh),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        },
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)  # run.sh ends what it started
        process.wait()
