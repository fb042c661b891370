"""Effective training time under random deaths: seconds in steps that were kept ÷ wall.

    python -m benchmarks.elastic_effective [--minutes 10] [--every 60] [--hangs 0.2] [--seed 0]
        [--torchrun]

A tiny model on emulated chips of this machine, copies after every step. Every `--every` seconds on
average (at random) a random rank is killed by SIGKILL, or, with the chance of `--hangs`, stopped by
SIGSTOP. Steps that were made again count once, as they were made last; what lies between two steps
(saves, figures) does not count, as it does not in an undisturbed run, which comes first. With
`--torchrun` a job under torchrun (`elastic_torchrun`) has faults drawn by the same rules at the
same time, beside ours on the same cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.elastic_faults import run, write_job
from benchmarks.elastic_torchrun import Run as TorchRun
from benchmarks.elastic_torchrun import effective
from tutti.elastic.agent_settings import IN_MEMORY
from tutti.elastic.join import JOB_FILE
from tutti.elastic.journal import read_journal
from tutti.elastic.rank_processes import is_alive
from tutti.errors import InputError
from tutti.observe.folder import METRICS
from tutti.observe.pulse import Activity, PulseReader

CALIBRATED = 20  # steps of the undisturbed run


def records(folder: Path) -> list[dict[str, Any]]:
    """Return the steps that a run has kept so far."""
    path = folder / METRICS
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def running(folder: Path) -> list[int]:
    """Return the process ids of the ranks that train."""
    name = (folder / JOB_FILE).read_text(encoding="ascii").strip()
    found = []
    for pulse in Path("/dev/shm").glob(f"{IN_MEMORY}{name}-*/pulse-*"):
        with contextlib.suppress(InputError, OSError):
            reading = PulseReader(pulse).read()
            trains = reading.activity in (Activity.STEP, Activity.WAITING, Activity.BETWEEN)
            if trains and is_alive(reading.process):
                found.append(reading.process)
    return found


class Reaper:
    """Ends ranks of a run at random; then the run."""

    def __init__(self, folder: Path, given: argparse.Namespace) -> None:
        self.folder, self.given = folder, given
        self.chance = random.Random(given.seed)
        self.deaths, self.hangs = 0, 0
        self.span: tuple[float, float] = (0.0, 0.0)
        self.kept, self.kept_s = 0, 0.0
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self) -> None:
        """Wait for the first steps, then do what the run is to survive."""
        while len(records(self.folder)) < 3:
            time.sleep(0.05)
        begin, first = time.monotonic(), len(records(self.folder))
        end = begin + 60 * self.given.minutes
        due = begin + self.chance.expovariate(1 / self.given.every)
        while time.monotonic() < end:
            time.sleep(0.05)
            if time.monotonic() >= due:
                due = time.monotonic() + self.chance.expovariate(1 / self.given.every)
                self.strike()
        self.span = (begin, time.monotonic())
        kept = records(self.folder)[first:]
        self.kept, self.kept_s = len(kept), sum(float(record["seconds"]) for record in kept)
        os.kill(os.getpid(), signal.SIGTERM)

    def strike(self) -> None:
        """End or stop a rank that trains."""
        there = running(self.folder)
        if not there:  # all are on their way into a generation: that counts as one more at once
            return
        hang = self.chance.random() < self.given.hangs
        os.kill(self.chance.choice(there), signal.SIGSTOP if hang else signal.SIGKILL)
        self.hangs += hang
        self.deaths += not hang


def beside(
    folder: Path, given: argparse.Namespace, step_s: float, stack: contextlib.ExitStack
) -> None:
    """Run torchrun with the same faults, until the end of a block."""
    folder.mkdir()
    peer = TorchRun(folder, given.ranks, step_s)
    stack.callback(peer.close)
    thread = threading.Thread(target=effective, args=(peer, given))
    stack.callback(thread.join)
    thread.start()


def main() -> None:
    """Run, and print the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between deaths, mean")
    parser.add_argument("--hangs", type=float, default=0.0, help="share of deaths that are hangs")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--torchrun", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_job(folder, given.ranks)
        elastic = {"copies": 1, "replan": "never"}
        run(folder, "calm", steps=CALIBRATED, elastic=elastic)
        calm = [float(record["seconds"]) for record in records(folder / "calm")]
        calm_s = statistics.median(calm[3:])
        with contextlib.ExitStack() as stack:
            if given.torchrun:
                beside(folder / "torchrun", given, calm_s, stack)
            reaper = Reaper(folder / "run", given)
            run(folder, "run", steps=1_000_000, elastic=elastic)
            reaper.thread.join()
        generations = [e for e in read_journal(folder / "run") if e.phase == "entering"]
    wall = reaper.span[1] - reaper.span[0]
    print(
        f"{reaper.deaths} deaths, {reaper.hangs} hangs in {wall:.0f} s; {len(generations)} "
        f"generations; {reaper.kept} steps kept, {reaper.kept_s / reaper.kept * 1e3:.0f} ms each "
        f"({calm_s * 1e3:.0f} undisturbed): {reaper.kept_s / wall:.1%} of the time"
    )


if __name__ == "__main__":
    main()
