"""Runs as arrays: what `price` and the fit take, beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tutti.cost.arrays import Arrays, FloatArray, Machine, Shape, Strategy
from tutti.cost.calibration.rows import Cells, Skipped, UnusableError, read_cells
from tutti.cost.calibration.runs import FORMATS, PEAKS, Run, mfu_in_percent, run_of
from tutti.cost.operators.sizes import flops_per_token, tokens_per_step

Rows = npt.NDArray[np.intp]
A = TypeVar("A", bound=Arrays)

# A step that needs more than the peak of its format for the least work that it may be, causal
# attention, was not measured so; one at less than this share of it, or at more than so many times
# it, is in another unit.
_SLOWEST = 1e-4
_OTHER_UNIT = 10.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunTable:
    """Usable runs, in the order of the file."""

    runs: tuple[Run, ...]
    shape: Shape
    strategy: Strategy
    machine: Machine
    measured: FloatArray
    peak_flops: FloatArray

    @classmethod
    def of(cls, runs: Sequence[Run]) -> RunTable:
        """Stack runs."""
        return cls(
            runs=tuple(runs),
            shape=_stacked(Shape, [run.shape for run in runs]),
            strategy=_stacked(Strategy, [run.strategy for run in runs]),
            machine=_stacked(Machine, [run.machine for run in runs]),
            measured=np.array([run.step_seconds for run in runs]),
            peak_flops=np.array([run.peak_flops for run in runs]),
        )

    def __len__(self) -> int:
        return len(self.runs)

    def take(self, rows: Rows) -> RunTable:
        """Return some of the runs."""
        return RunTable(
            runs=tuple(self.runs[i] for i in rows),
            shape=self.shape.take(rows),
            strategy=self.strategy.take(rows),
            machine=self.machine.take(rows),
            measured=self.measured[rows],
            peak_flops=self.peak_flops[rows],
        )

    def of_groups(self, groups: Sequence[str]) -> RunTable:
        """Return the runs of some groups."""
        rows = [i for i, run in enumerate(self.runs) if run.group in groups]
        return self.take(np.array(rows, dtype=np.intp))

    def column(self, name: str) -> FloatArray:
        """Return a column of shape or strategy, by its field's name."""
        owner: Arrays = self.shape if hasattr(self.shape, name) else self.strategy
        values: FloatArray = getattr(owner, name)
        return values

    @property
    def utilisation(self) -> FloatArray:
        """Measured model FLOPs per second over the chips' peak."""
        return self.ideal_seconds / self.measured

    @property
    def ideal_seconds(self) -> FloatArray:
        """Seconds per step if all chips ran at their peak and computed model FLOPs only."""
        return self._seconds_of(flops_per_token(self.shape, self.strategy.sequence_length))

    @property
    def least_seconds(self) -> FloatArray:
        """Return the same at the peak of the run's format, attention to earlier tokens only."""
        work = flops_per_token(self.shape, 0.5 * self.strategy.sequence_length)
        peaks: FloatArray = np.take(PEAKS, self.strategy.fp8.astype(np.intp))
        return self._seconds_of(work) / peaks

    def _seconds_of(self, flops: FloatArray) -> FloatArray:
        work = flops * tokens_per_step(self.strategy)
        return work / (self.strategy.num_chips * self.peak_flops)


def _stacked(kind: type[A], rows: Sequence[Mapping[str, float]]) -> A:
    names = {name for row in rows for name in row} or {f.name for f in fields(kind)}
    usual = {f.name: f.default_factory for f in fields(kind)}

    def number(row: Mapping[str, float], name: str) -> float:
        default = usual[name]
        return row[name] if name in row or default is MISSING else float(default())

    return kind.filled(**{name: np.array([number(row, name) for row in rows]) for name in names})


def load_runs(path: Path) -> tuple[RunTable, list[Skipped], list[Cells]]:
    """Read a file of runs: those that can be priced, those that cannot with a reason, all cells."""
    every = read_cells(path)
    in_percent = mfu_in_percent(every)
    runs: list[Run] = []
    reasons: dict[int, str] = {}
    lines: list[int] = []  # where in the file each run stands
    seen: set[str] = set()
    for line, cells in enumerate(every):
        name = cells.text("id")
        try:
            if name in seen:
                raise UnusableError("another row has the same 'id'")
            seen.add(name)
            runs.append(run_of(cells, mfu_in_percent=in_percent))
            lines.append(line)
        except UnusableError as error:
            reasons[line] = str(error)
    table = RunTable.of(runs)
    impossible = impossible_steps(table)
    reasons |= {lines[row]: why for row, why in impossible.items()}
    kept = [row for row in range(len(table)) if row not in impossible]
    skipped = [Skipped(id=every[line].text("id"), why=reasons[line]) for line in sorted(reasons)]
    return table.take(np.array(kept, dtype=np.intp)), skipped, every


def impossible_steps(table: RunTable) -> dict[int, str]:
    """Return the rows whose step time no chip can have, such as milliseconds among seconds."""
    shares, over = table.utilisation, table.least_seconds / table.measured
    wrong = np.flatnonzero((shares <= _SLOWEST) | (over >= 1.0))
    return {int(row): _why_impossible(table, row, shares[row], over[row]) for row in wrong}


def _why_impossible(table: RunTable, row: np.intp, share: float, over: float) -> str:
    seconds = f"'step_time_s' {table.measured[row]:g} would be"
    if not 1.0 <= over < _OTHER_UNIT:
        return f"{seconds} {share:.2g} of the peak; is it in another unit?"
    number = int(table.strategy.fp8[row])
    peak = PEAKS[number] * table.peak_flops[row] / 1e12
    return (
        f"{seconds} {over:.3g} × the {FORMATS[number]} peak of a {table.runs[row].chip} "
        f"({peak:g} TFLOP/s); check 'precision', 'n_gpus' and 'gbs'"
    )
