"""Hangs of every kind as the doctor sees them: live, and from the folder after all was killed.

    python -m benchmarks.doctor_hangs [--kinds stop,spin,…] [--times 2] [--staged]

Each is a run of its own, in processes of its own, that goes on with nothing (`hang_after_s` is
huge): a tiny model on two emulated chips, two replicas or (--staged) two stages. Once the fault has
happened and nothing has moved for some seconds `diagnose_run` is asked until it names somebody (a
pause counts as a hang once it is long beside the steps before, which others on the machine may
stretch); then every process of the run is killed by SIGKILL, and it is asked again. Right is: the
rank, the instruction, the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.support.train_job import write_job
from tutti.diagnose.finding import Finding
from tutti.diagnose.runs.folder import diagnose_run
from tutti.document import plain
from tutti.elastic.journal import FOLDER
from tutti.errors import InputError
from tutti.files import write_text
from tutti.train.run.config import TrainConfig, with_changes

REASONS = {
    "stop": "its process is stopped",
    "spin": "it holds the interpreter's lock",
    "sleep": "its main thread sleeps",
    "file": "its main thread opens a file",
    "data": "its samples do not come",
    "operation": "it is in barrier",
}
# Replicas that call a collective with other sizes do not hang: their communicator says so, and the
# generation ends. Which of two ranks was wrong cannot be told; the operation and both ranks can. A
# stage without replicas waits in it for ever.
ENDED = {"size": "all_reduce"}
STILL_S, LONGEST_S = 8.0, 60.0


@dataclass(frozen=True, slots=True)
class Drill:
    """A fault."""

    kind: str
    rank: int
    step: int
    instruction: int


def started(folder: Path, name: str, plan: str, drill: Drill) -> subprocess.Popen[bytes]:
    """Start a run with a fault."""
    elastic = {
        "copies": 0, "replan": "never", "hang_after_s": 3600.0,
        "drill": [{"fault": drill.kind, "rank": drill.rank, "step": drill.step,
                   "instruction": drill.instruction}],
    }  # fmt: skip
    config = with_changes(
        TrainConfig.load(folder / "train.yaml"),
        {"output": str(folder / name), "plan": str(folder / plan), "steps": 1000,
         "elastic": elastic, "model": str(folder / "model")},
    )  # fmt: skip
    write_text(folder / f"{name}.yaml", json.dumps(plain(config)))
    command = [sys.executable, "-m", "tutti.cli.main", "train", str(folder / f"{name}.yaml")]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def right(finding: Finding, drill: Drill, staged: bool) -> bool:
    """Tell whether an answer names the rank, the instruction and the reason."""
    if drill.kind in ENDED and not staged:
        return finding.where.ranks == (0, 1) and ENDED[drill.kind] in finding.cause
    at = f"instruction {drill.instruction} ("
    step = f"step {drill.step}"
    return (
        finding.where.ranks == (drill.rank,)
        and (at in finding.cause or drill.kind == "data")  # it is noticed at the next fetch
        and (step in finding.cause or drill.kind == "data")
        and (REASONS | {"size": "it is in all_reduce"})[drill.kind] in finding.cause
    )


def asked(folder: Path) -> Finding:
    """Ask, as `tutti doctor run` does."""
    try:
        return diagnose_run(folder)
    except InputError as error:
        raise SystemExit(str(error)) from None


def everything(process: subprocess.Popen[bytes]) -> None:
    """Kill a run and all that it started."""
    import psutil

    processes = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for one in processes:
        try:
            one.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    process.wait()
    psutil.wait_procs(processes, timeout=10)


def main() -> None:
    """Run the faults, and print what was said of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default=",".join([*REASONS, *ENDED]))
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--staged", action="store_true")
    given = parser.parse_args()
    plan = "plan.json" if given.staged else "larger.json"
    good = {"live": 0, "after": 0}
    count = 0
    for kind in given.kinds.split(","):
        for number in range(given.times):
            count += 1
            drill = Drill(kind, number % 2, 3 + number, 1 + 2 * number)
            with tempfile.TemporaryDirectory() as temporary:
                folder = write_job(Path(temporary))
                process = started(folder, "run", plan, drill)
                try:
                    mark, until = folder / "run" / FOLDER / "drill-0", time.monotonic() + 600
                    while not mark.is_file() and time.monotonic() < until:
                        time.sleep(0.1)
                    if not mark.is_file():
                        raise SystemExit("the fault has not happened within 600 s; nothing is told")
                    time.sleep(STILL_S + (1.5 if kind == "data" else 0.0))
                    live, until = asked(folder / "run"), time.monotonic() + LONGEST_S
                    while not live.where.ranks and time.monotonic() < until:
                        time.sleep(1.0)
                        live = asked(folder / "run")
                finally:
                    everything(process)
                after = asked(folder / "run")
            said = {"live": live, "after": after}
            for when, finding in said.items():
                fits = right(finding, drill, given.staged)
                good[when] += fits
                print(f"{kind} at rank {drill.rank}, step {drill.step}, instruction "
                      f"{drill.instruction}: {when} {'right' if fits else 'WRONG'}: "
                      f"{finding.component.value}, {finding.cause}", flush=True)  # fmt: skip
    print(f"{count} hangs: {good['live']} right live, {good['after']} right after all was killed")


if __name__ == "__main__":
    main()
