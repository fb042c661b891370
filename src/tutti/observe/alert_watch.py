"""A run's alerts while it lives: a thread beside whoever writes its figures looks every moment.

What is looked at are the newest steps, the time since the last one and since the last checkpoint,
and what every host keeps by the second. A look that takes long is followed by a longer pause.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tutti.errors import InputError
from tutti.observe.alert_outlets import Notice, Outlets, Say
from tutti.observe.alerts import Alert, AlertSettings, Rule, alerts, own_rules, rules_with
from tutti.observe.folder import CHECKPOINTS, EVENTS, SERIES
from tutti.observe.record import StepRecord
from tutti.observe.step_alerts import RECENT, series_of, step_series
from tutti.observe.store import Series, SeriesStore, Table, joined

_STEPS = 4 * RECENT  # that are looked at
_WINDOW_S = 180  # of hosts' figures; of rules that wait long, twice as long as they wait
_LEAST_STEP_S = 1.0  # a pause of so little is none
_SHARE = 0.005  # of a core, at most
_OF_STEPS = ("tutti_step_", "tutti_loss_", "tutti_data_", "tutti_checkpoint_")


def alert_watch(folder: Path, settings: AlertSettings, say: Say) -> AlertWatch | None:
    """Return the watch of a run, which looks already; None where none is wanted."""
    if not settings.every_s:
        return None
    rules = rules_with(Path(settings.rules)) if settings.rules else own_rules()
    outlets = Outlets(events=folder / EVENTS, say=say, hook=settings.hook, command=settings.command)
    return AlertWatch(folder, outlets, rules, every_s=settings.every_s).start()


class AlertWatch:
    """Takes the records of steps, as a sink, and tells what begins and what ends, once each."""

    def __init__(
        self, folder: Path, outlets: Outlets, rules: Sequence[Rule], *, every_s: float = 2.0
    ) -> None:
        self._folder, self._outlets, self._rules = folder, outlets, tuple(rules)
        self._every = every_s
        self._window = max(_WINDOW_S, *(int(2 * rule.for_s) for rule in self._rules))
        self._began = int(time.time())
        self._steps: deque[dict[str, Any]] = deque(maxlen=_STEPS)
        self._ages: dict[str, deque[tuple[int, float]]] = {}
        self._lasting: dict[tuple[str, str, str], Alert] = {}
        self._told: dict[tuple[str, str, str], int] = {}
        self._places: dict[tuple[str, ...], list[int]] = {}  # of figures that rules are about
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="alerts", daemon=True)

    def start(self) -> AlertWatch:
        """Begin to look."""
        self._thread.start()
        return self

    def write(self, record: StepRecord) -> None:
        """Take a step."""
        self._steps.append({"at": time.time(), **record.to_document()})

    def validation(self, step: int, loss: float) -> None:
        """Take a loss on held-out data: no rule looks at it."""

    def close(self) -> None:
        """Look once more, at what has ended, and no more."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=10.0)
        self._outlets.tell(self.look(time.time(), lives=False))

    def _run(self) -> None:
        pause = self._every
        while not self._stop.wait(pause):
            began = time.thread_time()
            self._outlets.tell(self.look(time.time()))
            pause = max(self._every, (time.thread_time() - began) / _SHARE)

    def look(self, now: float, *, lives: bool = True) -> list[Notice]:
        """Return what began and ended since the last look."""
        notices: list[Notice] = []
        series = step_series(list(self._steps))
        if lives:
            series += self._of_ages(now)
        series += self._of_hosts(int(now))
        for rule in self._rules:
            wanted = [s for s in series if _is(rule.figure, s.name)]
            raised: dict[tuple[str, str], list[Alert]] = {}
            for alert in alerts(rule, wanted):
                raised.setdefault((alert.host, alert.figure), []).append(alert)
            for (host, figure), of_one in raised.items():
                notices += self._news((rule.name, host, figure), of_one, int(now))
        return notices

    def _news(self, key: tuple[str, str, str], raised: list[Alert], now: int) -> list[Notice]:
        """Return what of a figure's alerts was not told yet."""
        notices = []
        for alert in raised:
            lasting = self._lasting.get(key)
            if lasting is not None and alert.end is not None and alert.end <= lasting.begin:
                continue  # one before it, which was told
            if lasting is None and alert.begin <= self._told.get(key, self._began - 1):
                continue
            if lasting is None:
                notices.append(Notice(what="began", at=now, alert=alert))
                self._lasting[key] = alert
            self._told[key] = alert.begin if alert.end is None else alert.end
            if alert.end is not None:
                notices.append(Notice(what="ended", at=now, alert=alert))
                del self._lasting[key]
        return notices

    def _of_ages(self, now: float) -> list[Series]:
        """Return how long ago the last step and the last checkpoint were, beside what is usual."""
        ages: dict[str, float] = {}
        if len(self._steps) > 1:
            usual = statistics.median(step["seconds"] for step in self._steps)
            age = now - self._steps[-1]["at"]
            ages["tutti_step_age_ratio"] = age / max(usual, _LEAST_STEP_S)
        times = sorted(_modified(path) for path in (self._folder / CHECKPOINTS).glob("step-*"))
        times = [at for at in times if at >= self._began]
        if len(times) > 1 and times[-1] > times[-2]:
            usual = max(times[-1] - times[-2], _LEAST_STEP_S)
            ages["tutti_checkpoint_age_ratio"] = (now - times[-1]) / usual
        for name, age in ages.items():
            points = self._ages.setdefault(name, deque(maxlen=self._window))
            points.append((int(now), age))
        return [series_of(name, points) for name, points in self._ages.items()]

    def _of_hosts(self, now: int) -> list[Series]:
        """Return the newest of what hosts keep, of the figures that rules are about."""
        kept: list[Series] = []
        after = max(self._began, now - self._window)
        for path in sorted((self._folder / SERIES).glob("*.sqlite")):
            try:
                store = SeriesStore(path, read_only=True)
            except InputError:  # not there yet, or of another kind: doctor and dashboard say so
                continue
            minutes: dict[tuple[str, str], list[Table]] = {}
            try:
                for one in store.tables(after, now + 1, self._watched):
                    minutes.setdefault((one.host, one.name), []).append(one)
            except InputError:
                continue
            finally:
                store.close_reading()
            kept += [joined(tables, after) for tables in minutes.values()]
        return kept

    def _watched(self, names: Sequence[str]) -> list[int]:
        """Return which of some figures rules are about."""
        key = tuple(names)
        if key not in self._places:
            figures = {rule.figure for rule in self._rules if not rule.figure.startswith(_OF_STEPS)}
            bases = {figure.partition("{")[0] for figure in figures}
            self._places[key] = [
                i
                for i, name in enumerate(names)
                if name.partition("{")[0] in bases and any(_is(figure, name) for figure in figures)
            ]
        return self._places[key]


def _is(figure: str, name: str) -> bool:
    """Tell whether a rule's figure, with or without its label, is the series of a name."""
    return name == figure or name.startswith(figure + "{")


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
