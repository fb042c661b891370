"""A run's folder as evidence: its rings and its figures; and the one answer to what is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tutti.diagnose.finding import Component, Evidence, Finding, Where
from tutti.diagnose.runs.clocks import on_one_clock
from tutti.diagnose.runs.generations import diagnose_generations
from tutti.diagnose.runs.recorded_hang import diagnose_rings
from tutti.diagnose.runs.stalled_ranks import diagnose_still
from tutti.diagnose.runs.steps import Figure, diagnose_steps
from tutti.errors import InputError
from tutti.observe.alerts import Alert, alerts, own_rules
from tutti.observe.figures import label_of
from tutti.observe.folder import ELASTIC, JOURNAL, METRICS, RINGS, SERIES
from tutti.observe.rank_series import JOB
from tutti.observe.ring import RingReading, read_rings
from tutti.observe.sinks import figure_lines
from tutti.observe.stalled_ranks import read_still
from tutti.observe.step_alerts import step_series
from tutti.observe.store import SeriesStore

_MOST_ALERTS = 6
_NEWEST = 5000  # lines of figures, in which alerts are looked for


def diagnose_run(folder: Path, *, now_ns: int | None = None, name: str = "") -> Finding:
    """Return what is wrong with a run, live or over.

    `now_ns` is the wall clock of a run elsewhere that lives; `name` is what to call such a run.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; name the output folder of a run")
    rings, notes = read_rings(folder / RINGS)
    figures = read_figures(folder / METRICS, notes)
    if not rings and not figures:
        said = f" ({notes[0]})" if notes else ""
        raise InputError(f"{folder}: has neither rings nor figures of a run{said}")
    rings, apart = on_one_clock(rings, "" if name else platform.node())
    notes += apart
    if now_ns is None and any_alive(rings):
        now_ns = time.time_ns()
    if name:
        rings = [replace(ring, file=f"{name} {Path(ring.file).name}") for ring in rings]
    still = diagnose_still(read_still(folder / RINGS), rings)
    hang = still or diagnose_rings(rings, now_ns=now_ns)
    slow, more = diagnose_steps(
        figures, rings, f"{name} {METRICS}" if name else str(folder / METRICS)
    )
    notes += [*more, f"{len(rings)} rings; the run is {'over' if now_ns is None else 'alive'}"]
    met = read_alerts(folder / SERIES, notes)
    told = [*met, *read_step_alerts(folder / METRICS)]
    notes += [alert.words() for alert in told[:_MOST_ALERTS]]
    ended = diagnose_generations(folder / ELASTIC / JOURNAL)
    finding = hang or ended or _confirmed(slow, met) or _alerted(met, folder)
    if ended is not None and finding is not ended:
        notes.append(ended.cause)
    if finding is None:
        cause = "nobody hangs, and steps are as regular as they were"
        return Finding(component=Component.UNDETERMINED, healthy=True, confidence=0.6,
                       cause=cause, notes=tuple(notes))  # fmt: skip
    return replace(finding, notes=(*finding.notes, *notes))


def _confirmed(slow: Finding | None, met: Sequence[Alert]) -> Finding | None:
    """Return what is slow, with the host that has an alert of the same component."""
    if slow is None:
        return None
    same = [alert for alert in met if alert.rule.component == slow.component.value]
    if not same:
        return slow
    hosts = tuple(dict.fromkeys(alert.host for alert in same if alert.host != JOB))
    devices = tuple(dict.fromkeys(label_of(a.figure) for a in same if a.host == JOB))
    where = replace(
        slow.where, hosts=slow.where.hosts or hosts, devices=slow.where.devices or devices
    )
    return replace(slow, where=where, confidence=max(slow.confidence, 0.85))


def _alerted(met: Sequence[Alert], folder: Path) -> Finding | None:
    """Return the finding of a host's figures alone: what was met longest counts."""
    if not met:
        return None
    worst = max(met, key=lambda a: float("inf") if a.end is None else a.end - a.begin)
    file = str(folder / SERIES)
    return Finding(
        component=Component(worst.rule.component),
        cause=worst.rule.says,
        confidence=0.6,
        where=_where(worst),
        evidence=(
            Evidence(
                file=file,
                line=0,
                text=worst.words(),
                host=None if worst.host == JOB else worst.host,
            ),
        ),
        remedy=worst.rule.remedy,
    )


def _where(alert: Alert) -> Where:
    """Return the host of an alert; of one about the whole job the chip or wire that it names."""
    if alert.host == JOB:
        return Where(devices=(label_of(alert.figure),))
    return Where(hosts=(alert.host,))


def read_alerts(folder: Path, notes: list[str]) -> list[Alert]:
    """Return what the figures of the hosts are worth a word about."""
    raised: list[Alert] = []
    for path in sorted(folder.glob("*.sqlite")):
        try:
            store = SeriesStore(path, read_only=True)
            names = set(store.names())
            for rule in own_rules():
                if any(n == rule.figure or n.startswith(rule.figure + "{") for n in names):
                    raised += alerts(rule, store.read(rule.figure, 0, 1 << 40))
        except InputError as error:
            notes.append(str(error))
    return raised


def read_step_alerts(path: Path) -> list[Alert]:
    """Return what a run's newest steps are worth a word about."""
    steps = []
    for line in figure_lines(path)[-_NEWEST:]:
        with contextlib.suppress(ValueError):
            steps.append(json.loads(line))
    series = step_series([step for step in steps if isinstance(step, dict)])
    return [
        alert
        for rule in own_rules()
        for alert in alerts(rule, [one for one in series if one.name == rule.figure])
    ]


def any_alive(rings: Sequence[RingReading]) -> bool:
    """Tell whether a process of these rings lives on this host."""
    for ring in rings:
        if ring.host != platform.node():
            continue
        try:
            os.kill(ring.process, 0)
        except PermissionError:
            return True
        except (OSError, OverflowError):
            continue
        return True
    return False


def read_figures(path: Path, notes: list[str]) -> list[Figure]:
    """Return the figures of a run's steps; a last line that is not whole is left out."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    figures: list[Figure] = []
    bad = 0
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
            if "validation_loss" in value:
                continue
            figures.append(
                Figure(line=number, step=int(value["step"]), seconds=float(value["seconds"]),
                       predicted_s=value.get("predicted_s"), pools=value.get("pools") or {})
            )  # fmt: skip
        except (ValueError, KeyError, TypeError):
            bad += number < len(lines)
    if bad:
        notes.append(f"{path}: {bad} lines are no figures of a step")
    return figures
