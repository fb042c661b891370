"""The figures of an elastic run, as its controller writes them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from tutti.observe.alert_watch import alert_watch
from tutti.observe.folder import METRICS
from tutti.observe.record import PoolTimes, StepRecord
from tutti.observe.sinks import JsonLines
from tutti.train.run.planning import Job


class Figures:
    """The figures of a run, by step; a step that is made again replaces what was said of it."""

    def __init__(self, job: Job, say: Callable[[str], None]) -> None:
        self._path = job.config.folder / METRICS
        self._watch = alert_watch(job.config.folder, job.config.measure.alerts, say)
        self._lines: JsonLines | None = None
        self._records: dict[int, dict[str, Any]] = {}
        self._generations: dict[int, int] = {}  # that made each step
        self._validation: dict[int, float] = {}
        self._last = 0  # the newest of the records

    def take(self, values: dict[str, Any]) -> bool:
        """Take a step; False if it was known.

        What ranks tell late is of a generation that ended; it may come before what rank 0 told in
        time, and after the run went back.
        """
        late, generation = bool(values.pop("late", False)), int(values.pop("generation", 0))
        step = int(values["step"])
        if late and (step in self._records or self._is_undone(step, generation)):
            return False
        if step < self._last:
            for later in [n for n in self._records if n > step]:
                if self._generations[later] < generation:
                    del self._records[later]  # the run went back: it is made again
        self._records[step], self._generations[step] = values, generation
        again = [step]
        if self._lines is None or step <= self._last:
            if self._lines is not None:
                self._lines.close()
            self._lines = JsonLines(self._path, after=step - 1)
            again = [n for n in sorted(self._records) if n >= step]
        for number in again:
            self._lines.write(_record(self._records[number]))
        if self._watch is not None:
            self._watch.write(_record(values))
        self._last = again[-1]
        return True

    def _is_undone(self, step: int, generation: int) -> bool:
        """Tell whether a later generation went back to before a step."""
        return any(n < step and self._generations[n] > generation for n in self._records)

    def validation(self, step: int, loss: float) -> None:
        """Take a loss on held-out data."""
        self._validation[step] = loss
        if self._lines is not None:
            self._lines.validation(step, loss)

    def summary(self, job: Job) -> dict[str, Any]:
        """Return what all generations together came to."""
        steps = sorted(self._records)
        if not steps:
            return {}
        seconds = [float(self._records[step]["seconds"]) for step in steps]
        steady = statistics.median(seconds[1:] or seconds)
        return {
            "first_step": steps[0] - 1,
            "losses": [float(self._records[step]["loss"]) for step in steps],
            "validation": sorted(self._validation.items()),
            "seconds_per_step": steady,
            "tokens_per_s": job.plan.job.tokens / steady if steady else 0.0,
        }

    def close(self) -> None:
        """Write no more."""
        if self._watch is not None:
            self._watch.close()
        if self._lines is not None:
            self._lines.close()


def _record(values: dict[str, Any]) -> StepRecord:
    pools = values.get("pools")
    whole = {name: PoolTimes(**times) for name, times in pools.items()} if pools else None
    return StepRecord(**{**values, "pools": whole})
