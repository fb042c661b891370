"""A run's output folder, watched: while it runs, hangs, is over, or has vanished."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tutti.diagnose.runs.folder import any_alive, diagnose_run, read_alerts, read_step_alerts
from tutti.errors import InputError, TuttiError
from tutti.files import read_file, require_folder
from tutti.hardware.cluster import Cluster
from tutti.observe.alerts import Alert
from tutti.observe.figures import FIGURES
from tutti.observe.folder import METRICS, PLAN_FILE, RINGS, RUN_FILE, SERIES, SOON
from tutti.observe.rank_series import FILE
from tutti.observe.ring import read_rings
from tutti.observe.step_alerts import JOB
from tutti.plan.check import embedded_cluster
from tutti.plan.files import load_plan
from tutti.plan.plan import Plan, RankMap
from tutti.report.binary import Pack
from tutti.report.cluster_map import cluster_map_section
from tutti.units import many
from tutti.web.elastic_log import ElasticLog
from tutti.web.figures import Matrix, RunSeries, packed
from tutti.web.lines import GrowingLines
from tutti.web.live_step import SimulatedPlan, step_view
from tutti.web.log_lines import logs_view
from tutti.web.steps import Steps
from tutti.web.watched import (
    Document,
    Kept,
    Query,
    finding_document,
    missing,
    span_of,
    whole_number,
)

_QUIET_S = 30.0  # a file that was written within is of a run that is alive
_COSTLY_S = 5.0  # the doctor and the alerts look again so often
_SUMMARY_POINTS = 400


class RunFolder:
    """A run, from what lies in its folder."""

    def __init__(self, folder: Path, name: str = "") -> None:
        require_folder(folder)
        marks = (METRICS, SOON, PLAN_FILE, RUN_FILE, RINGS, SERIES)
        if not any((folder / mark).exists() for mark in marks):
            raise InputError(f"{folder}: no run's folder; name the output folder of `tutti train`")
        self.folder, self.name = folder.resolve(), name or folder.resolve().name
        self._lock = threading.Lock()
        self._lines, self._starts = GrowingLines(self.folder / METRICS), 0
        self._steps, self._series = Steps(), RunSeries(self.folder / SERIES)
        self._kept, self._log = Kept(), ElasticLog(self.folder)
        self._plan: Plan | None = None
        self._ranks: RankMap | None = None
        self._simulated: SimulatedPlan | None = None

    # --- what is there ---------------------------------------------------------------------------

    def _read(self) -> None:
        more = self._lines.more()
        if self._lines.starts != self._starts:
            self._starts, self._steps = self._lines.starts, Steps()
        for line in more:
            self._steps.add(line)

    def _known_plan(self) -> Plan | None:
        if self._plan is None and (self.folder / PLAN_FILE).is_file():
            self._plan = load_plan(self.folder / PLAN_FILE)
        return self._plan

    def _state(self) -> str:
        if not self.folder.is_dir():
            return "vanished"
        if any_alive(self._heads()):
            return "alive"
        if not self._made_all():
            names = [self.folder / METRICS, self.folder / SOON, self.folder / SERIES / FILE]
            touched = max((p.stat().st_mtime for p in names if p.exists()), default=0.0)
            if time.time() - touched < _QUIET_S:
                return "alive"
        return "over" if len(self._steps) else "no step yet"

    def _made_all(self) -> bool:
        """Whether all steps that were asked for are made: then nobody waits for another one."""
        try:
            asked = read_file(self.folder / RUN_FILE)
        except InputError:  # a copy without it, or half of one
            return False
        wanted = asked.get("steps") if isinstance(asked, Mapping) else None
        made = self._steps.last("step")
        return isinstance(wanted, int) and made is not None and made >= wanted

    def _heads(self) -> list[Any]:
        """Return one ring: the ranks of a run live and die together, as far as this host goes."""
        return read_rings(self.folder / RINGS, most=1)[0]

    # --- documents -------------------------------------------------------------------------------

    def summary(self) -> Document:
        """Return what stands in the list of runs."""
        with self._lock:
            self._read()
            plan, steps = self._said_plan(), self._steps
            return {
                "name": self.name,
                "state": self._state(),
                "model": Path(plan.model.name).name if plan else "",
                "cluster": plan.cluster.name if plan else "",
                "ranks": plan.num_ranks if plan else 0,
                "steps": steps.last("step"),
                "loss": steps.last("loss"),
                "seconds": steps.median("seconds"),
                "predicted_s": steps.last("predicted_s"),
                "tokens_per_s": steps.median("tokens_per_s"),
                "mfu": steps.median("mfu"),
                "effective": steps.effective,
                "overrun": steps.overrun,
                "generations": max((e.generation for e in self._log.entries([])), default=0),
                "curves": steps.columns(("step", "loss", "tokens_per_s", "mfu"), _SUMMARY_POINTS),
            }

    def _said_plan(self) -> Plan | None:
        try:
            return self._known_plan()
        except TuttiError:
            return None

    def stamp(self, name: str) -> object:
        """Return what differs once a view of figures has changed."""
        with self._lock:
            return self._series.stamp() if name in {"heat", "map"} else None

    def view(self, name: str, query: Query) -> Document:
        """Return the document of a view."""
        with self._lock:
            self._read()
            if not self.folder.is_dir():
                return missing(f"{self.folder} is gone; what was read of it is in the list of runs")
            try:
                document: Document = getattr(self, f"_{name}_view")(query)
            except (InputError, OSError) as error:
                return missing(str(error))
            if "notes" in document:
                document["notes"] = list(dict.fromkeys(document["notes"]))
            return document

    def _run_view(self, query: Query) -> Document:
        del query
        steps, state = self._steps, self._state()
        notes: list[str] = []
        now = time.time() if state == "alive" else steps.last("at")
        return {
            "state": state,
            "columns": steps.columns(),
            "validation": steps.validation,
            "pools": steps.pools(),
            "effective": steps.effective,
            "overrun": steps.overrun,
            "repeated": steps.repeated,
            **self._log.document(now, notes),
            "notes": notes,
        }

    def _figure(self, query: Query, notes: list[str]) -> tuple[str, list[str]]:
        names = self._series.names(notes)
        if not names:
            said = f" ({notes[0]})" if notes else ""
            raise InputError(f"no figures by the second in {SERIES}/ of this run{said}")
        usual = "tutti_rank_compute_seconds"
        asked = query.get("figure", usual if usual in names else names[0])
        if asked not in names:
            raise InputError(f"no figure '{asked}' in this run")
        return asked, names

    def _heat_view(self, query: Query) -> Document:
        notes: list[str] = []
        figure, names = self._figure(query, notes)
        after, until = whole_number(query, "after", 0), whole_number(query, "until", 0)
        matrix = self._series.matrix(
            figure, span_s=span_of(query), notes=notes, after=after, until=until
        )
        return matrix.to_document() | {
            "figures": names, "span": span_of(query), "notes": notes, "more": bool(after),
        }  # fmt: skip

    def _map_view(self, query: Query) -> Document:
        plan = self._known_plan()
        cluster = None if plan is None else embedded_cluster(plan)
        if plan is None or cluster is None:
            return missing(f"the run has no {PLAN_FILE} with its cluster")
        notes: list[str] = []
        figure, names = self._figure(query, notes)
        matrix = self._series.matrix(figure, span_s=60, notes=notes)
        values = {pool.name: np.full(pool.num_chips, np.nan, np.float32) for pool in cluster.pools}
        slots = {pool.name: pool.node.num_chips for pool in cluster.pools}
        for position, value in self._placed(plan, matrix, slots):
            pool, node, slot = position
            if pool in values and 0 <= node * slots[pool] + slot < len(values[pool]):
                values[pool][node * slots[pool] + slot] = value
        return self._kept.get("map", id(plan), lambda: _drawn_map(plan, cluster)) | {
            "figure": figure, "figures": names, "means": FIGURES[figure].means,
            "values": [packed(values[pool.name]) for pool in cluster.pools],
            "at": int(matrix.seconds[-1]) if len(matrix.seconds) else 0, "notes": notes,
        }  # fmt: skip

    def _placed(
        self, plan: Plan, matrix: Matrix, slots: dict[str, int]
    ) -> list[tuple[tuple[str, int, int], float]]:
        """Return chips and the last value of each: of its rank, its own, or its node's."""
        if self._ranks is None:
            self._ranks = RankMap(plan)
        ranks = self._ranks
        values: list[tuple[tuple[str, int, int], float]] = []
        for host, label, row in zip(matrix.hosts, matrix.labels, matrix.values, strict=True):
            known = row[np.isfinite(row)]
            if not len(known):
                continue
            value = float(known[-1])
            if not host:
                if label.isdigit() and int(label) < ranks.num_ranks:
                    place = ranks.place(int(label)).chip
                    values.append(((place.pool, place.node, place.slot), value))
                continue
            pool, _, node = host.rpartition("-")
            if not node.isdigit():
                continue
            own = FIGURES[matrix.figure].label == "chip" and label.isdigit()
            chips = [int(label)] if own else range(slots.get(pool, 0))
            values += [((pool, int(node), slot), value) for slot in chips]
        return values

    def _step_view(self, query: Query) -> Document:
        if not (self.folder / PLAN_FILE).is_file():
            return missing(f"the run has no {PLAN_FILE}")
        if self._simulated is None:
            self._simulated = SimulatedPlan(self.folder)
        return step_view(self.folder, self._simulated, query.get("step", ""))

    def _soon(self) -> int:
        """Return a number that changes when what is costly may be looked at again."""
        return int(time.monotonic() / _COSTLY_S) if self._state() == "alive" else -len(self._steps)

    def _alerts_view(self, query: Query) -> Document:
        del query
        return self._kept.get("alerts", self._soon(), self._alerts)

    def _alerts(self) -> Document:
        notes: list[str] = []
        met = read_alerts(self.folder / SERIES, notes) + read_step_alerts(self.folder / METRICS)
        met.sort(key=lambda a: -a.begin)
        return {"alerts": [_alert(one) for one in met[:1000]], "notes": notes}

    def _doctor_view(self, query: Query) -> Document:
        del query
        return self._kept.get(
            "doctor", self._soon(), lambda: finding_document(diagnose_run(self.folder))
        )

    def _logs_view(self, query: Query) -> Document:
        return logs_view(self.folder, query)


def _drawn_map(plan: Plan, cluster: Cluster) -> Document:
    """Return the map as it is whatever the figures say."""
    arrays = Pack()
    section = cluster_map_section(plan, cluster, arrays)
    captions = [
        f"{p.num_chips:,} × {p.chip.name}, {many(p.nodes, 'node')} of {p.node.num_chips}"
        for p in cluster.pools
    ]
    return {
        "captions": captions, "data": dict(section.data),
        "arrays": arrays.directory, "packed": arrays.text(),
    }  # fmt: skip


def _alert(alert: Alert) -> Document:
    kept = alert.host != JOB  # by the second, so that there is a picture of it
    return {
        "name": alert.rule.name, "words": alert.words(), "remedy": alert.rule.remedy,
        "component": alert.rule.component, "begin": alert.begin, "end": alert.end,
        "host": alert.host, "figure": alert.rule.figure.partition("{")[0] if kept else "",
    }  # fmt: skip
