"""What hosts keep by the second, as Prometheus fetches it: from their stores in the run's folder.

A gauge is the newest value of the last minute. Stores keep what only grows as its growth per
second; a counter is the sum of that since the collector was made, as a counter of a process is.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tutti.errors import InputError
from tutti.observe.figures import FIGURES, label_of
from tutti.observe.folder import CHECKPOINTS, SERIES
from tutti.observe.packed_rows import CHUNK
from tutti.observe.rank_series import FILE as OF_RANKS
from tutti.observe.store import SeriesStore

MOST_HOSTS = 512  # more would make an answer slow
_KEPT_S = 1.0  # that an answer is good for
_STALE_S = 60  # after which a gauge is not told any more


class HostFigures:
    """A collector of prometheus-client over the stores of a run, but that of its ranks."""

    def __init__(self, folder: Path) -> None:
        self._core: Any = importlib.import_module("prometheus_client.core")
        self._folder = folder / SERIES
        self._lock = threading.Lock()
        self._began = int(time.time())
        self._totals: dict[tuple[str, str], float] = {}  # by file and key
        self._summed: dict[str, int] = {}  # the last second in the totals, by file
        self._gauges: dict[tuple[str, str], float] = {}
        self._at = -math.inf

    def describe(self) -> list[Any]:
        """Return nothing: what there is shows when it is asked for."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield a family of every figure that any host has."""
        with self._lock:
            if time.monotonic() - self._at >= _KEPT_S:
                self._read()
                self._at = time.monotonic()
            told = {**self._gauges, **self._totals, **self._age()}
        families: dict[str, Any] = {}
        for (stem, key), value in told.items():
            figure = FIGURES.get(key.partition("{")[0])
            if figure is None:
                continue
            labels = ["pool", "node", *([figure.label] if figure.label else [])]
            if figure.name not in families:
                counts = figure.kind == "counter"
                core = self._core
                made = core.CounterMetricFamily if counts else core.GaugeMetricFamily
                families[figure.name] = made(figure.name, figure.means, labels=labels)
            pool, _, node = stem.rpartition("-")
            own = [label_of(key)] if figure.label else []
            families[figure.name].add_metric([pool, node if pool else "", *own], value)
        yield from families.values()

    def _age(self) -> dict[tuple[str, str], float]:
        """Return how long ago the newest checkpoint was made; nothing where there is none."""
        newest = 0.0
        for path in (self._folder.parent / CHECKPOINTS).glob("step-*"):
            with contextlib.suppress(OSError):  # it is being deleted
                newest = max(newest, path.stat().st_mtime)
        return {("", "tutti_checkpoint_age_seconds"): time.time() - newest} if newest else {}

    def _read(self) -> None:
        now = int(time.time())
        self._gauges = {}
        paths = [p for p in sorted(self._folder.glob("*.sqlite")) if p.name != OF_RANKS]
        for path in paths[:MOST_HOSTS]:
            try:
                store = SeriesStore(path, read_only=True)
            except InputError:  # not there yet, or of another kind: doctor and dashboard say so
                continue
            try:
                self._take(path.stem, store, now)
            except InputError:
                continue
            finally:
                store.close_reading()

    def _take(self, stem: str, store: SeriesStore, now: int) -> None:
        """Take what a store has got since the last time."""
        after = self._summed.get(stem, self._began - 1)
        newest = after
        for _, start, name, values in store.tables(min(after, now - _STALE_S) + 1, now + 1):
            seconds = start + np.arange(CHUNK)
            known = np.isfinite(values)
            if not known.any():
                continue
            newest = max(newest, int(seconds[known].max()))
            if name.partition("{")[0].endswith("_total"):
                grown = float(values[known & (seconds > after)].sum())
                self._totals[stem, name] = self._totals.get((stem, name), 0.0) + grown
            elif (recent := values[known & (seconds > now - _STALE_S)]).size:
                self._gauges[stem, name] = float(recent[-1])
        self._summed[stem] = newest
