"""Faults that are injected for a rehearsal: at one instruction of one step, once per run."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tutti.elastic.journal import FOLDER
from tutti.nn.batch import Batch
from tutti.ranks.links import Handle
from tutti.schedule.instruction import Instruction, Lane
from tutti.train.data.feeder import Feeder
from tutti.train.run.config import DrillConfig
from tutti.train.sync.comm_links import CommLinks

if TYPE_CHECKING:
    from tutti.train.run.worker import Worker

LONG_S = 3600.0


class DrillError(RuntimeError):
    """What an injected exception is."""


def install(worker: Worker, drills: Sequence[DrillConfig], folder: Path, chip: str) -> None:
    """Let the faults that are meant for this rank, or its chip, happen when their time comes."""
    rank = worker.context.rank
    mine = [
        (number, drill)
        for number, drill in enumerate(drills)
        if (drill.chip == chip if drill.chip else drill.rank == rank)
    ]
    if not mine:
        return
    own = [(number, drill) for number, drill in mine if drill.fault != "slow"]
    slow = [drill for _, drill in mine if drill.fault == "slow"]
    engine = worker.engine

    def around(entry: Instruction, run: Callable[[], Handle]) -> Handle:
        step = worker.progress.step + 1
        for number, drill in own:
            due = drill.step == step and drill.instruction == engine.end.at
            if due and _first(folder / FOLDER / f"drill-{number}"):
                _happen(drill, worker, folder / FOLDER / f"fifo-{number}")
        began = time.perf_counter()
        handle = run()
        for drill in slow:
            now = drill.step <= step and (not drill.until or step <= drill.until)
            if now and entry.lane is Lane.COMPUTE:
                factor = _factor(drill, chip, step)
                time.sleep(max(factor - 1, 0.0) * (time.perf_counter() - began))
        return handle

    engine.around = around


def _factor(drill: DrillConfig, chip: str, step: int) -> float:
    """Return how much slower a chip is in a step; the same whenever the step is made."""
    drawn = random.Random(f"{chip} {step}").gauss(0.0, drill.spread)
    return drill.factor * (1 + drawn)


def _first(mark: Path) -> bool:
    """Tell whether this is the first time; the mark holds when it happened."""
    try:
        with mark.open("x", encoding="ascii") as file:
            file.write(f"{time.time()}\n")
    except FileExistsError:
        return False
    return True


def _happen(drill: DrillConfig, worker: Worker, fifo: Path) -> None:
    comm = worker.joined.comm
    match drill.fault:
        case "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(LONG_S)
        case "abort":
            os.abort()
        case "segfault":
            ctypes.string_at(0)
        case "file":  # that nobody writes to
            os.mkfifo(fifo)
            fifo.read_bytes()
        case "operation":  # another than all others are at
            comm.barrier().wait()
        case "size":
            _sum_of_seven(worker)
        case "data":
            Feeder.batch = _never  # type: ignore[method-assign, assignment]
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(LONG_S)
        case "spin":  # in one call of C code, which does not let go of the interpreter's lock
            sum(range(1 << 60))
        case "exception":
            raise DrillError(f"drill: step {drill.step}, instruction {drill.instruction}")


def _sum_of_seven(worker: Worker) -> None:
    """Bring seven numbers to a sum of gradients; where a plan has none, to one of all ranks."""
    links, numbers = worker.engine.links, torch.zeros(7)
    groups = links.groups if isinstance(links, CommLinks) else ()
    for group in groups:
        if group.use == "gradients":
            links.all_reduce(group.ranks, numbers, use="gradients").wait()
            return
    worker.joined.comm.all_reduce(numbers).wait()


def _never(*_: object) -> Batch:
    """Be a source of samples that does not answer."""
    time.sleep(LONG_S)
    raise DrillError("drill: data")
