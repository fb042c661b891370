"""A Plan drawn for the terminal: the pipeline as boxes, the stages as a table, the chips as a map.

Equal neighbours are drawn once, so that 64 stages on 16,384 chips still fit a screen. Returns rich
renderables; imported only by the command line.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator
from dataclasses import dataclass

from rich import box
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tutti.models.parameters import ParameterClass
from tutti.plan.chips import ChipSet
from tutti.plan.drawing_serving import draw_routes, engine_text, service_text
from tutti.plan.plan import Pipeline, Plan, Replica, Stage, UnitRange, UnitRanges
from tutti.plan.schedules import schedule_record
from tutti.units import bytes_text, many

_COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "red")
_MOST_BOXES = 8
_MARKS = string.digits + string.ascii_uppercase + string.ascii_lowercase


def draw_plan(plan: Plan) -> Group:
    """Return the whole drawing."""
    last_unit = max((stop for _, _, s in plan.stages() for _, stop in s.units), default=1) - 1
    parts: list[RenderableType] = [_title(plan), Text()]
    for number, pipeline in enumerate(plan.pipelines):
        parts += [
            _pipeline_title(plan, number, pipeline),
            _boxes(pipeline, last_unit),
            _stage_table(pipeline, last_unit),
        ]
    parts += [_chip_map(plan), *draw_routes(plan), *_rules(plan)]
    if plan.collectives:
        parts += [Text("collective programs", style="bold"), _collectives(plan)]
    return Group(*parts)


def program_text(algorithm: str, chunks: int) -> str:
    """Return what tables call a collective program."""
    return algorithm if chunks == 1 else f"{algorithm} in {chunks} chunks"


def _collectives(plan: Plan) -> Table:
    """Return which program serves which use, group and size."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("use", "operation", "pools", "ranks", "islands", "bytes", "program"):
        table.add_column(name, justify="right" if name in ("ranks", "islands", "bytes") else "left")
    for choice in plan.collectives:
        most = choice.max_bytes
        table.add_row(
            choice.use,
            choice.operation,
            " + ".join(choice.pools) or "any",
            "any" if choice.ranks is None else f"{choice.ranks:,}",
            "any" if choice.islands is None else f"{choice.islands:,}",
            "any" if most is None else f"up to {bytes_text(most)}",
            program_text(choice.algorithm, choice.chunks),
        )
    return table


def _title(plan: Plan) -> Text:
    job = plan.job
    title = Text(f"{plan.model.name} on {plan.cluster.name}", style="bold")
    if job.serving is not None:
        title.append(f"  {many(plan.num_ranks, 'chip')}, serves {service_text(job.serving)}")
        return title
    title.append(
        f"  {many(plan.num_ranks, 'chip')}, schedule {job.schedule}, {job.precision.label}, "
        f"{job.global_batch:,} × {job.sequence_length:,} = {job.tokens:,} tokens per step"
    )
    return title


def _pipeline_title(plan: Plan, number: int, pipeline: Pipeline) -> Text:
    name = f"pipeline {number}" if len(plan.pipelines) > 1 else "pipeline"
    text = Text(name, style="bold")
    if pipeline.engine is not None and pipeline.stages:
        text.append(f"  {engine_text(pipeline, pipeline.engine)}")
        return text
    text.append(
        f"  {pipeline.micro_batches:,} micro-batches of {pipeline.micro_batch:,} "
        f"sequence{'s' if pipeline.micro_batch > 1 else ''}, {len(pipeline.stages)} "
        f"stage{'s' if len(pipeline.stages) > 1 else ''}"
    )
    if schedule_record(plan.job.schedule).several_ranges:
        text.append(f", {len(pipeline.stages[0].units)} unit ranges each")
    return text


# --- units and degrees as text ---------------------------------------------------------------


def units_text(ranges: UnitRanges, last_unit: int) -> str:
    """Return unit ranges as people call them: "embedding, 1-20"."""
    return ", ".join(word for span in ranges for word in _span_words(span, last_unit))


def _span_words(span: UnitRange, last_unit: int) -> Iterator[str]:
    start, stop = span
    if start == 0:
        yield "embedding"
    low, high = max(start, 1), min(stop, last_unit)
    if low < high:
        yield str(low) if high - low == 1 else f"{low}-{high - 1}"
    if stop > last_unit > 0:
        yield "head"


def degrees_text(replica: Replica) -> str:
    """Return how one replica is spread: "tp 8 + sp, cp 2"."""
    words = []
    if replica.tp > 1:
        words.append(f"tp {replica.tp}" + (" + sp" if replica.sequence_parallel else ""))
    if replica.cp > 1:
        words.append(f"cp {replica.cp} ({replica.context_kind})")
    if replica.tp_overlap_chunks > 1:
        words.append(f"overlap {replica.tp_overlap_chunks}")
    return ", ".join(words) or "one chip"


def memory_text(replica: Replica) -> str:
    """Return what saves memory: "full 1-5, offload optimizer 1-5"."""
    words = [
        f"{kind} {_plain_ranges(ranges)}"
        for kind, ranges in (
            ("full", replica.recompute.full),
            ("selective", replica.recompute.selective),
        )
        if ranges
    ]
    kinds = replica.offload.kinds()
    words += [f"{what} to host {_plain_ranges(ranges)}" for what, ranges in kinds]
    return ", ".join(words) or "–"


def _plain_ranges(ranges: UnitRanges) -> str:
    return ", ".join(str(a) if b - a == 1 else f"{a}-{b - 1}" for a, b in ranges)


# --- stages ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """Neighbouring stages that differ only in which units and chips they are."""

    first: int
    stages: tuple[Stage, ...]

    @property
    def label(self) -> str:
        last = self.first + len(self.stages) - 1
        return str(self.first) if last == self.first else f"{self.first}-{last}"

    @property
    def units(self) -> UnitRanges:
        if len(self.stages) == 1:
            return self.stages[0].units
        return ((self.stages[0].units[0][0], self.stages[-1].units[-1][1]),)


def _runs(pipeline: Pipeline) -> list[_Run]:
    runs: list[_Run] = []
    shapes = [_shape(stage) for stage in pipeline.stages]
    numbered = enumerate(pipeline.stages)
    for _, group in itertools.groupby(numbered, key=lambda item: shapes[item[0]]):
        members = list(group)
        if len(members[0][1].units) > 1:  # interleaved ranges do not join
            runs += [_Run(index, (stage,)) for index, stage in members]
        else:
            runs.append(_Run(members[0][0], tuple(stage for _, stage in members)))
    return runs


def _shape(stage: Stage) -> object:
    """Return what equal stages share."""
    return (
        stage.num_units,
        stage.experts,
        tuple(
            (
                *(r.count, r.tp, r.cp, r.sequence_parallel, r.sequences, r.chips.pools),
                *(bool(r.recompute.full), bool(r.recompute.selective), r.offload),
            )
            for r in stage.replicas
        ),
    )


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _boxes(pipeline: Pipeline, last_unit: int) -> RenderableType:
    runs = _runs(pipeline)
    if len(runs) > _MOST_BOXES:
        return Text(f"  {len(runs)} unlike stages; see the table", style="dim")
    panels: list[RenderableType] = []
    for index, run in enumerate(runs):
        if index:
            panels.append(Text("\n\n►"))
        panels.append(_box(run, _colour(run.first), last_unit))
    return Columns(panels, padding=(0, 0))


def _box(run: _Run, colour: str, last_unit: int) -> Panel:
    stage = run.stages[0]
    units = many(stage.num_units, "unit")
    lines = [
        units_text(run.units, last_unit),
        f"{units} each" if len(run.stages) > 1 else units,
        *(
            f"{r.count} × {degrees_text(r)}, {r.chips.pools[0] if r.chips.pools else '?'}"
            for r in stage.replicas
        ),
    ]
    title = f"stage {run.label}" if len(run.stages) == 1 else f"stages {run.label}"
    return Panel(Text("\n".join(lines)), title=title, border_style=colour, expand=False)


def _stage_table(pipeline: Pipeline, last_unit: int) -> Table:
    table = Table(box=box.SIMPLE, header_style="bold", pad_edge=False)
    for name, justify in (
        ("stage", "right"), ("units", "left"), ("replicas", "right"), ("each", "left"),
        ("chips", "left"), ("sequences", "right"), ("experts", "left"), ("memory", "left"),
    ):  # fmt: skip
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for run in _runs(pipeline):
        stage = run.stages[0]
        for index, replica in enumerate(stage.replicas):
            first = index == 0
            chips = ChipSet.join(s.replicas[index].chips for s in run.stages)
            table.add_row(
                Text(run.label, style=_colour(run.first)) if first else "",
                units_text(run.units, last_unit) if first else "",
                f"{replica.count:,}",
                degrees_text(replica),
                str(chips),
                str(replica.sequences),
                _experts_text(stage) if first else "",
                memory_text(replica),
            )
    return table


def _experts_text(stage: Stage) -> str:
    return (
        ", ".join(
            f"{group.count} × {many(group.chips, 'chip')}"
            + (f" ({'/'.join(map(str, group.experts))})" if group.experts else "")
            for group in stage.experts
        )
        or "–"
    )


# --- chips and rules -------------------------------------------------------------------------


def _chip_map(plan: Plan) -> Table:
    """Draw each node as a row of marks, one per chip: the stage that runs there."""
    table = Table(box=box.SIMPLE, header_style="bold", pad_edge=False)
    table.add_column("nodes", justify="right")
    table.add_column("stage on each slot (· idle)")
    for pool, rows in _marks(plan).items():
        table.add_row(Text(pool, style="bold"), "")
        for row, group in itertools.groupby(sorted(rows.items()), key=lambda item: item[1]):
            nodes = [node for node, _ in group]
            for _, run in itertools.groupby(enumerate(nodes), key=lambda item: item[1] - item[0]):
                members = [node for _, node in run]
                first, last = members[0], members[-1]
                label = str(first) if first == last else f"{first}-{last}"
                line = Text()
                for mark, stage in row:
                    line.append(mark + " ", style=_colour(stage) if stage >= 0 else "dim")
                table.add_row(label, line)
    return table


def _marks(plan: Plan) -> dict[str, dict[int, tuple[tuple[str, int], ...]]]:
    """Return pool → node → (mark, stage) per slot, idle slots as far as they are named."""
    slots: dict[str, dict[int, dict[int, tuple[str, int]]]] = {}
    several = len(plan.pipelines) > 1
    num_stages = max((len(pipeline.stages) for pipeline in plan.pipelines), default=0)
    width = len(str(num_stages - 1)) if num_stages > len(_MARKS) else 0

    def put(chips: ChipSet, mark: str, stage: int) -> None:
        for chip in chips:
            slots.setdefault(chip.pool, {}).setdefault(chip.node, {})[chip.slot] = (mark, stage)

    for p, s, stage in plan.stages():
        mark = (f"{p}." if several else "") + (f"{s:{width}d}" if width else _MARKS[s])
        put(stage.chips, mark, s)
    put(plan.idle, "·", -1)
    put(plan.spare, "s", -1)
    return {
        pool: {
            node: tuple(row.get(slot, ("·", -1)) for slot in range(max(row) + 1))
            for node, row in nodes.items()
        }
        for pool, nodes in slots.items()
    }


def _rules(plan: Plan) -> Iterator[Text]:
    names = ("replicated", "optimizer sharded", "gradients sharded", "parameters sharded")
    for rule in plan.synchronisation:
        kind = "" if rule.parameter_class is ParameterClass.DENSE else "experts of "
        ragged = ", ragged shards" if rule.shares else ""
        yield Text(
            f"{kind}units {rule.units[0]}-{rule.units[1] - 1}: level {rule.shard_level} "
            f"({names[rule.shard_level]}), buckets of {rule.bucket}"
            f"{', overlapped' if rule.overlap else ''}{ragged}"
        )
    if plan.tied_owner is not None:
        yield Text(f"tied weights belong to unit {plan.tied_owner}")
    if len(plan.idle):
        yield Text(f"idle: {plan.idle} ({many(len(plan.idle), 'chip')})")
    if len(plan.spare):
        yield Text(f"spare: {plan.spare} ({many(len(plan.spare), 'chip')})")
