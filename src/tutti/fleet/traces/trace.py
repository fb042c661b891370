"""Traces: jobs with the times at which they came, read from our CSV or from others' columns.

Ours has `job, submit_s, duration_s` and `nodes` or `chips`, and may have `pool, priority, tenant,
estimate_s, one_group`. Jobs of models have `job, model, tokens` instead: how long they take, on
which nodes, the planner says. What others publish is read by its header: Slurm's `sacct` (with `|`
between), the files of Acme, Helios, Philly and PAI. Jobs that never ran are left out, and counted.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tutti.errors import InputError, hint
from tutti.files import read_text
from tutti.fleet.chips import Grounds
from tutti.fleet.mix_values import request_by_worth
from tutti.fleet.model_jobs import MixTable, ModelJob
from tutti.fleet.request import JobRequest, Shape
from tutti.fleet.traces.trace_columns import FORMATS, Models, NoJob, Ours, TraceColumns
from tutti.units import many

RESTART_S = 300.0  # assumed of jobs whose trace does not say: save, start, load
CHECKPOINT_S = 1800.0  # the same: between checkpoints


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One job of a trace."""

    job: str
    submit_s: float
    duration_s: float
    chips: int
    nodes: int | None = None  # None: as many as the chips need
    pool: str = ""  # "": any
    priority: int = 0
    tenant: str = ""
    estimate_s: float | None = None
    one_group: bool = False  # or not at all
    training: ModelJob | None = None  # then chips and duration are the planner's to say


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Jobs in the order in which they came; times from the first of them on."""

    name: str
    kind: str
    rows: tuple[TraceRow, ...]
    left_out: int = 0  # rows that never ran

    @property
    def span_s(self) -> float:
        """Seconds from the first to the last."""
        return self.rows[-1].submit_s if self.rows else 0.0

    def denser(self, factor: float) -> Trace:
        """Return it with arrivals so many times as close to each other."""
        if not (factor > 0 and math.isfinite(factor)):
            raise InputError(f"arrivals {factor:g} times denser; give a number above 0")
        return replace(self, rows=tuple(
            replace(row, submit_s=row.submit_s / factor) for row in self.rows
        ))  # fmt: skip


def read_trace(path: Path) -> Trace:
    """Read a trace; its header says whose it is."""
    text = read_text(path)
    head = text.split("\n", 1)[0]
    delimiter = max("|\t,", key=head.count)
    reader = csv.DictReader(text.splitlines(), delimiter=delimiter)
    columns = [name.strip() for name in reader.fieldnames or ()]
    if not any(columns):
        raise InputError(f"{path.name}: is empty; a trace needs a header and jobs")
    reader.fieldnames = columns
    kind = _format_of(path.name, columns)
    return make_trace(path.name, kind, list(reader))


def _format_of(name: str, columns: Sequence[str]) -> TraceColumns:
    for known in FORMATS:
        if all(column in columns for column in known.needs):
            if isinstance(known, Ours | Models):
                _refuse_unknown(name, columns, known)
            return known
    best = max(FORMATS, key=lambda known: sum(column in columns for column in known.needs))
    missing = [column for column in best.needs if column not in columns]
    raise InputError(
        f"{name}: no column '{missing[0]}'; it looks most like {best.name}, which needs "
        f"{', '.join(best.needs)} (found: {', '.join(columns[:8])})"
    )


def _refuse_unknown(name: str, columns: Sequence[str], known: Ours | Models) -> None:
    for column in columns:
        if column not in known.knows:
            raise InputError(f"{name}: unknown column '{column}'; {hint(column, known.knows)}")
    if isinstance(known, Models):
        return
    if "nodes" not in columns and "chips" not in columns:
        raise InputError(f"{name}: no column 'nodes' and none 'chips'; a job needs one of them")


def make_trace(name: str, kind: TraceColumns, rows: Sequence[Mapping[str, str]]) -> Trace:
    """Return the jobs of rows, checked and in order."""
    rows_read: list[TraceRow] = []
    seen: dict[str, int] = {}
    left_out = 0
    for number, values in enumerate(rows, start=2):
        where = f"{name}: line {number}"
        if None in values or any(value is None for value in values.values()):
            raise InputError(f"{where}: has another number of columns than the header")
        try:
            row = TraceRow(**kind.read(values))
        except NoJob:
            left_out += 1
            continue
        except ValueError as error:
            raise InputError(f"{where}: {error}") from None
        _check(row, where)
        if row.job in seen:
            raise InputError(f"{where}: job '{row.job}' stands on line {seen[row.job]}, too")
        seen[row.job] = number
        if isinstance(kind, Ours | Models) and rows_read and row.submit_s < rows_read[-1].submit_s:
            raise InputError(
                f"{where}: job '{row.job}' came at {row.submit_s:g} s, before the line above "
                f"({rows_read[-1].submit_s:g} s); sort the trace by submit_s"
            )
        rows_read.append(row)
    if not rows_read:
        if not rows:
            raise InputError(f"{name}: has a header and no job; a trace needs at least one")
        raise InputError(
            f"{name}: no job ran; {many(left_out, 'row')} without a start, an end or chips left out"
        )
    rows_read.sort(key=lambda row: row.submit_s)  # what others publish is not always in order
    first = rows_read[0].submit_s
    return Trace(
        name=name, kind=kind.name, left_out=left_out,
        rows=tuple(replace(row, submit_s=row.submit_s - first) for row in rows_read),
    )  # fmt: skip


def _check(row: TraceRow, where: str) -> None:
    for key in ("submit_s", "duration_s"):
        value = getattr(row, key)
        if not math.isfinite(value) or (value < 0 and key == "duration_s"):
            raise InputError(f"{where}: job '{row.job}': {key} is {value:g}; give 0 or more")
    if row.submit_s < 0:
        raise InputError(f"{where}: job '{row.job}': submit_s is {row.submit_s:g}; give 0 or more")
    if row.training is not None:
        return
    if row.chips < 0 or (row.nodes is not None and row.nodes < 1) or not (row.chips or row.nodes):
        raise InputError(f"{where}: job '{row.job}' asks for nothing; give nodes or chips")
    if row.estimate_s is not None and not row.estimate_s > 0:
        raise InputError(f"{where}: job '{row.job}': estimate_s is {row.estimate_s:g}")


def requests_of(
    trace: Trace,
    grounds: Grounds,
    *,
    checkpoint_s: float = CHECKPOINT_S,
    restart_s: float = RESTART_S,
    speeds: Mapping[str, float] | None = None,
    mixes: MixTable | None = None,
) -> list[tuple[float, JobRequest]]:
    """Return what each job asks of a fleet, with the time at which it comes.

    A job that names no pool may run on every pool, best on the fastest; `speeds` are those of the
    pools, relative to what the trace's durations were measured on. `mixes` says what mixes of pools
    are worth to jobs that are models; without one the planner is asked.
    """
    mixes = mixes or MixTable(grounds.cluster)
    paces = {name: (speeds or {}).get(name, 1.0) for name in grounds.pool_names}
    shaper = _shaper(grounds, paces)
    requests = []
    for row in trace.rows:
        if row.training is not None:
            requests.append((row.submit_s, request_by_worth(
                row.job, row.training.tokens, mixes.worths(row.training), priority=row.priority,
                tenant=row.tenant, checkpoint_s=checkpoint_s, restart_s=restart_s,
            )))  # fmt: skip
            continue
        if row.pool and row.pool not in grounds.pool_names:
            raise InputError(
                f"{trace.name}: job '{row.job}': no pool '{row.pool}'; "
                f"{hint(row.pool, grounds.pool_names)}"
            )
        shapes = shaper(row)
        if not shapes:
            asked = many(row.nodes, "node") if row.nodes else many(row.chips, "chip")
            raise InputError(
                f"{trace.name}: job '{row.job}' asks for {asked}, more than "
                f"'{grounds.cluster.name}' has in one pool; {_nearest(grounds, row.pool)}"
            )
        if row.one_group:  # where none of its pools has such a group, the scheduler says so
            shapes = tuple(shape for shape in shapes if _in_a_group(grounds, shape)) or shapes
        requests.append((row.submit_s, JobRequest(
            job=row.job, seconds=row.duration_s, shapes=shapes, priority=row.priority,
            tenant=row.tenant, estimate_s=row.estimate_s, checkpoint_s=checkpoint_s,
            restart_s=restart_s, one_group=row.one_group,
        )))  # fmt: skip
    return requests


def _in_a_group(grounds: Grounds, shape: Shape) -> bool:
    ((name, count),) = shape.nodes
    return count <= grounds.largest_group(grounds.pool_names.index(name))


def _nearest(grounds: Grounds, pool: str) -> str:
    """Say how much the largest pool has that a job may run on."""
    sizes = [
        (mask.bit_count(), size, name)
        for name, size, mask in zip(
            grounds.pool_names, grounds.sizes, grounds.pool_masks, strict=True
        )
        if pool in ("", name)
    ]
    nodes, size, name = max(sizes, key=lambda one: one[0] * one[1])
    return f"nearest is '{name}' with {many(nodes, 'node')}, {many(nodes * size, 'chip')}"


def _shaper(
    grounds: Grounds, paces: Mapping[str, float]
) -> Callable[[TraceRow], tuple[Shape, ...]]:
    known: dict[tuple[str, int, int | None], tuple[Shape, ...]] = {}

    def shapes(row: TraceRow) -> tuple[Shape, ...]:
        key = (row.pool, row.chips, row.nodes)
        if key not in known:
            names = sorted(
                (name for name in grounds.pool_names if row.pool in ("", name)),
                key=lambda name: -paces[name],
            )
            made = (_shape(grounds, name, row, paces[name]) for name in names)
            known[key] = tuple(shape for shape in made if shape is not None)
        return known[key]

    return shapes


def _shape(grounds: Grounds, name: str, row: TraceRow, pace: float) -> Shape | None:
    pool = grounds.pool_names.index(name)
    size, held = grounds.sizes[pool], grounds.pool_masks[pool].bit_count()
    chips = row.chips or (row.nodes or 1) * size
    nodes = max(row.nodes or 1, math.ceil(chips / size))
    if nodes > held:
        return None
    each = math.ceil(chips / nodes)
    return Shape(((name, nodes),), None if each >= size else each, pace)
