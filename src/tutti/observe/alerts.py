"""Alerts: rules about figures, as data, and what they find in series. Pure but for the file."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from tutti.document import AtLeast, Place, Seconds, build
from tutti.files import parse_yaml, read_file
from tutti.observe.figures import FIGURES, label_of
from tutti.observe.rank_series import JOB as OF_JOB
from tutti.observe.step_figures import JUDGED_FIGURES
from tutti.observe.store import Series


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """When a figure is worth a word."""

    name: str
    figure: str
    says: str
    remedy: str
    component: Literal["chip", "network", "host", "storage", "undetermined"]
    until: float  # the other end of the hysteresis
    above: float | None = None
    below: float | None = None
    for_s: Annotated[float, AtLeast(1)] = 10.0

    def __post_init__(self) -> None:
        if (self.above is None) == (self.below is None):
            raise ValueError("give either 'above' or 'below'")
        if self.figure.partition("{")[0] not in (FIGURES.keys() | JUDGED_FIGURES.keys()):
            raise ValueError(f"no figure is called '{self.figure}'")
        if self.above is not None and self.until > self.above:
            raise ValueError("'until' is beyond 'above'")
        if self.below is not None and self.until < self.below:
            raise ValueError("'until' is under 'below'")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertSettings:
    """How a run's alerts are looked for while it lives, and where they go besides the terminal."""

    every_s: Annotated[Seconds, AtLeast(0)] = 2.0  # between two looks; 0: never
    hook: str = ""  # a web address that gets each as JSON (POST)
    command: str = ""  # that is run for each, JSON on its standard input
    rules: str = ""  # a file of further rules, which replace those of the same names


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A rule that was met."""

    rule: Rule
    host: str
    figure: str  # with its label
    begin: int
    end: int | None  # None while it lasts
    worst: float

    @property
    def place(self) -> str:
        """What it is about, in short: a host, or of the whole job its chip or wire."""
        return (label_of(self.figure) or "the job") if self.host == OF_JOB else self.host

    def words(self) -> str:
        """Return it in one line."""
        lasts = "still" if self.end is None else f"for {self.end - self.begin} s"
        on = "the job" if self.host == OF_JOB else self.host
        return f"{self.rule.says}: {self.figure} was {self.worst:.4g} on {on}, {lasts}"


@functools.cache
def own_rules() -> tuple[Rule, ...]:
    """Return the rules of the package."""
    file = resources.files("tutti.observe") / "alerts.yaml"
    document = parse_yaml(file.read_text(encoding="utf-8"), file.name)
    return build(tuple[Rule, ...], document, Place(file.name))


def rules_with(path: Path) -> tuple[Rule, ...]:
    """Return the rules of the package and those of a file, which replace others of their names."""
    more = build(tuple[Rule, ...], read_file(path), Place(path.name))
    named = {rule.name: rule for rule in (*own_rules(), *more)}
    return tuple(named.values())


def alerts(rule: Rule, series: Sequence[Series]) -> list[Alert]:
    """Return when a rule was met in series of its figure."""
    return [alert for one in series for alert in _of_one(rule, one)]


def _of_one(rule: Rule, series: Series) -> list[Alert]:
    sign = 1.0 if rule.above is not None else -1.0
    edge = rule.above if rule.above is not None else rule.below
    values = sign * (series.most if sign > 0 else series.least).astype(np.float64)
    beyond, back = values > sign * float(edge or 0.0), values <= sign * rule.until
    if not beyond.any():
        return []
    seconds = series.seconds
    alerts_of_series: list[Alert] = []
    begin: int | None = None
    since: int | None = None  # when the present stretch (beyond, or back) began
    worst = -np.inf
    for i, second in enumerate(seconds.tolist()):
        holds = bool(beyond[i]) if begin is None else bool(back[i])
        since = (second if since is None else since) if holds else None
        if begin is not None:
            worst = max(worst, values[i])
        if since is None or second - since + 1 < rule.for_s:
            continue
        if begin is None:
            begin = since
            worst = values[(seconds >= since) & (seconds <= second)].max()
        else:
            alerts_of_series.append(_alert(rule, series, begin, since, sign * worst))
            begin = None
        since = None
    if begin is not None:
        alerts_of_series.append(_alert(rule, series, begin, None, sign * worst))
    return alerts_of_series


def _alert(rule: Rule, series: Series, begin: int, end: int | None, worst: float) -> Alert:
    return Alert(
        rule=rule, host=series.host, figure=series.name, begin=begin, end=end, worst=float(worst)
    )
