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
from tutti.cost.calibration.runs import Run, run_of
from tutti.cost.sizes import flops_per_token, tokens_per_step

Rows = npt.NDArray[np.intp]
A = TypeVar("A", bound=Arrays)

# A step that would be faster than this multiple of the peak, or slower than this share of it, is
# in another unit. FP4 computes at four times the 16-bit peak.
_FASTEST, _SLOWEST = 5.0, 1e-4


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
        work = flops_per_token(self.shape, self.strategy.sequence_length)
        work = work * tokens_per_step(self.strategy)
        return work / (self.strategy.num_chips * self.peak_flops)


def _stacked(kind: type[A], rows: Sequence[Mapping[str, float]]) -> A:
    names = {name for row in rows for name in row} or {f.name for f in fields(kind)}
    usual = {f.name: f.default_factory for f in fields(kind)}

    def number(row: Mapping[str, float], name: str) -> float:
        default = usual[name]
        return row[name] if name in row or default is MISSING else float(default())

    return kind.filled(**{name: np.array([number(row, name) for row in rows]) for name in names})


def load_runs(path: Path, group: str | None = None) -> tuple[RunTable, list[Skipped], list[Cells]]:
    """Read a file of runs: those that can be priced, those that cannot with a reason, all cells."""
    every = [c for c in read_cells(path) if group is None or c.text("group") == group]
    runs: list[Run] = []
    skipped: list[Skipped] = []
    seen: set[str] = set()
    for cells in every:
        name = cells.text("id")
        try:
            if name in seen:
                raise UnusableError("another row has the same 'id'")
            seen.add(name)
            run = run_of(cells)
            check_measured(run)
            runs.append(run)
        except UnusableError as error:
            skipped.append(Skipped(id=name, why=str(error)))
    return RunTable.of(runs), skipped, every


def check_measured(run: Run) -> None:
    """Refuse a run whose step time no chip can have, such as milliseconds among seconds."""
    share = float(RunTable.of([run]).utilisation[0])
    if not _SLOWEST < share < _FASTEST:
        raise UnusableError(
            f"'step_time_s' {run.step_seconds:g} would be {share:.2g} of the peak; "
            "is it in another unit?"
        )
