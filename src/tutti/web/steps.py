"""The steps of a run as columns, as they come; thinned where there are more than a page draws."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

COLUMNS = ("step", "loss", "seconds", "tokens_per_s", "mfu", "predicted_s", "at")
MOST_POINTS = 2000
_RECENT = 20  # steps whose mean is what pools do now
_PARTS = ("compute_s", "communication_s", "bubble_s", "copy_s", "data_s", "other_s")


class Steps:
    """What a run's lines of figures came to."""

    def __init__(self) -> None:
        self._columns: dict[str, list[float | None]] = {name: [] for name in COLUMNS}
        self._validation: list[tuple[int, float]] = []
        self._pools: list[Mapping[str, Mapping[str, Any]]] = []
        self._overrun = 0.0
        self._repeated = 0

    def __len__(self) -> int:
        return len(self._columns["step"])

    def add(self, line: Mapping[str, Any]) -> None:
        """Take a line; a step that was done again replaces those from it on."""
        step, loss = line.get("step"), line.get("loss")
        if not isinstance(step, int):
            return
        if (held_out := _number(line.get("validation_loss"))) is not None:
            self._validation = [v for v in self._validation if v[0] < step] + [(step, held_out)]
        if "loss" not in line or not isinstance(loss, int | float):
            return
        steps = self._columns["step"]
        while steps and (steps[-1] or 0) >= step:
            self._repeated += 1
            for column in self._columns.values():
                column.pop()
        for name, column in self._columns.items():
            column.append(step if name == "step" else _number(line.get(name)))
        pools = line.get("pools")
        if isinstance(pools, Mapping):
            self._pools = [*self._pools[1 - _RECENT :], pools]
            overruns = (_number(own.get("overrun")) for own in pools.values())
            self._overrun = max(self._overrun, *(overrun or 0.0 for overrun in overruns), 0.0)

    def last(self, name: str) -> float | None:
        """Return a figure of the last step."""
        column = self._columns[name]
        return column[-1] if column else None

    def median(self, name: str) -> float | None:
        """Return a figure of the median step, without the first, which warms up."""
        column = self._columns[name]
        known = [v for v in (column[1:] or column) if v is not None]
        return statistics.median(known) if known else None

    @property
    def overrun(self) -> float:
        """How far the host fell behind emulated chips, at most."""
        return self._overrun

    @property
    def repeated(self) -> int:
        """How many steps were made in vain, and again."""
        return self._repeated

    @property
    def effective(self) -> float | None:
        """The share of the time since the first step began that went into steps that count."""
        ends, lengths = self._columns["at"], self._columns["seconds"]
        if not ends or ends[0] is None or ends[-1] is None or lengths[0] is None:
            return None
        whole = ends[-1] - (ends[0] - lengths[0])
        spent = math.fsum(length or 0.0 for length in lengths)
        return min(1.0, spent / whole) if whole > 0 else None

    def columns(
        self, names: Sequence[str] = COLUMNS, most: int = MOST_POINTS
    ) -> dict[str, list[float | None]]:
        """Return columns, of many steps every n-th and the last."""
        every = max(1, math.ceil(len(self) / most))
        last = len(self) - 1
        kept = [i for i in range(len(self)) if i % every == 0 or i == last]
        return {name: [self._columns[name][i] for i in kept] for name in names}

    @property
    def validation(self) -> list[tuple[int, float]]:
        """Steps and losses on held-out data."""
        return self._validation

    def pools(self) -> list[dict[str, object]]:
        """Return where a mean rank of each pool spends its step at present."""
        shares: list[dict[str, object]] = []
        for pool in dict.fromkeys(name for own in self._pools for name in own):
            rows = [own[pool] for own in self._pools if pool in own]
            parts = {
                part.removesuffix("_s"): statistics.fmean(
                    _number(row.get(part)) or 0.0 for row in rows
                )
                for part in _PARTS
            }
            shares.append({"pool": pool, "ranks": rows[-1].get("ranks"), "parts": parts})
        return shares


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
