"""The page of a real step over the simulated one: timelines, kinds of instruction, totals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tutti.report.bars import Bar, Category, bars_html
from tutti.report.binary import Pack
from tutti.report.gantt import GanttRow, simulated_row, timeline_section
from tutti.report.page import Page, Section
from tutti.report.tables import Column, Row, table_html
from tutti.report.tiles import Tile, tiles_html
from tutti.schedule.instruction import Lane
from tutti.simulate.compare import (
    PARTS,
    KindTimes,
    PoolParts,
    compare_kinds,
    compare_parts,
)
from tutti.simulate.labels import labels_of
from tutti.simulate.measured import MeasuredStep
from tutti.simulate.result import SimulationResult
from tutti.units import many, seconds_text

MOST_RANKS = 4  # real ranks that are drawn below their class
PART_COLORS = {
    "compute": "forward",
    "communication": "exposed",
    "bubble": "bubble",
    "copies": "copies",
    "data": "fetch",
    "other": "norm",
}
# What the head says of waiting; `recorder.times` splits a wait for the network in two.
_WAITS = (
    ("bubble", "Bubble", "compute of a mean rank waited for other ranks"),
    (
        "communication",
        "Exposed communication",
        "compute of a mean rank waited for the network itself, of each wait at most what was "
        "predicted for the transfer",
    ),
)
PART_CATEGORIES = tuple(Category(name=n, color=PART_COLORS[n]) for n in PARTS)


def write_overlay_page(path: Path, result: SimulationResult, step: MeasuredStep) -> None:
    """Write the page of a real step."""
    overlay_page(result, step).write(path)


def overlay_page(result: SimulationResult, step: MeasuredStep) -> Page:
    """Return the page of a real step over the simulated one."""
    plan, arrays = result.program.schedule.plan, Pack()
    pools = compare_parts(result, step)
    emulated = " · emulated chips" if step.emulated else ""
    return Page(
        title=f"{plan.model.name} on {plan.cluster.name}: simulated and real",
        subtitle=f"Step {step.step} of a run, {many(len(step.ranks), 'rank')} · schedule "
        f"{plan.job.schedule.value}{emulated} · {step.clock}",
        sections=(
            Section(id="summary", heading="", body=tiles_html(_tiles(result, step, pools))),
            overlay_timeline(result, step, arrays),
            _kinds(compare_kinds(result, step), ""),
            *(_kinds(compare_kinds(result, step, p.pool), p.pool) for p in pools if len(pools) > 1),
            _parts(pools),
        ),
        arrays=arrays,
        footer="Made by tutti. This file is complete in itself; it works offline.",
    )


def _tiles(result: SimulationResult, step: MeasuredStep, pools: Sequence[PoolParts]) -> list[Tile]:
    simulated, real = result.step_seconds, step.step_seconds
    tiles = [
        Tile("Simulated", seconds_text(simulated), "the whole step"),
        Tile("Real", seconds_text(real), f"first begin to last end, step {step.step}"),
        Tile("Real ÷ simulated", f"{real / simulated:.3f}", "1 is a perfect prediction"),
    ]
    ranks = sum(pool.ranks for pool in pools)
    for name, title, meaning in _WAITS:
        predicted = sum(p.ranks * p.predicted[name] for p in pools) / ranks
        measured = sum(p.ranks * p.measured[name] for p in pools) / ranks
        tiles.append(
            Tile(title, seconds_text(measured), f"{meaning}; simulated {seconds_text(predicted)}")
        )
    return tiles


def overlay_timeline(result: SimulationResult, step: MeasuredStep, arrays: Pack) -> Section:
    """Return the timelines of the simulated classes, each above its real ranks."""
    rows: list[GanttRow] = []
    simulated: list[int] = []  # the row of each class
    hidden = 0
    for index, label in enumerate(labels_of(result.program.schedule)):
        row = simulated_row(result, label, index)
        simulated.append(len(rows))
        rows.append(replace(row, aside="simulated", detail=f"{row.aside} · {row.detail}"))
        ranks = step.of_class(index)
        hidden += max(0, len(ranks) - MOST_RANKS)
        rows += [
            GanttRow(
                label=f"rank {own.rank}",
                aside="real",
                detail=f"{own.pool} · {label.name}",
                rank_class=index,
                start=own.start,
                end=own.end,
                waited=own.waited,
            )
            for own in ranks[:MOST_RANKS]
        ]
    more = f" {many(hidden, 'further rank')} not drawn." if hidden else ""
    return timeline_section(
        result.program,
        rows,
        max(result.step_seconds, step.step_seconds),
        arrays,
        path=[
            (simulated[index], position)
            for index, position in map(result.program.place, result.critical_indices)
        ],
        intro="Below each simulated class its real ranks, on one scale of time. What a real rank "
        "sends, receives or copies is pale from when it was started until it was known to be over, "
        "waiting for other ranks included, and full where compute waited for it: only that part "
        f"lengthens the step.{more}",
    )


def _kinds(kinds: Sequence[KindTimes], pool: str) -> Section:
    columns = (
        Column("instruction", kind="whole"),
        Column("lane"),
        Column("per rank", figures=True, detail="instructions of a mean rank"),
        Column("predicted", figures=True),
        Column("measured", figures=True),
        Column("measured ÷ predicted", figures=True),
        Column("compute waited", figures=True, detail="that compute was kept waiting for it"),
    )
    rows = [
        Row(
            cells=(
                kind.op.value,
                kind.lane.value,
                f"{kind.count:,.4g}",
                seconds_text(kind.predicted_s),
                seconds_text(kind.measured_s),
                "–" if kind.ratio is None else f"{kind.ratio:.3f}",
                seconds_text(kind.waited_s) if kind.lane is not Lane.COMPUTE else "",
            ),
            strong=kind.lane is Lane.COMPUTE,
        )
        for kind in kinds
    ]
    return Section(
        id=f"kinds-{pool}" if pool else "kinds",
        heading=f"Kinds of instruction, {pool}" if pool else "Kinds of instruction",
        intro=""
        if pool
        else "Seconds of a mean rank in one step. Compute lane: busy. Other lanes: at least one "
        "was under way, which in reality counts from its start until it was known to be over, "
        "waiting for other ranks included; what that cost the step is in the last column.",
        body=table_html(columns, rows),
    )


def _parts(pools: Sequence[PoolParts]) -> Section:
    bars = [
        Bar(
            label=pool.pool,
            aside=side,
            detail=many(pool.ranks, "rank"),
            parts=parts,
            note=seconds_text(sum(parts.values())),
        )
        for pool in pools
        for side, parts in (("simulated", pool.predicted), ("real", pool.measured))
    ]
    whole = max(sum(bar.parts.values()) for bar in bars)
    return Section(
        id="parts",
        heading="Where the step goes",
        intro="A mean rank of each pool, from its own begin to its own end: computing, and waiting "
        "for the network itself (of each wait at most what was predicted for the transfer), for "
        "other ranks (bubble: the rest of such waits), for copies and for data.",
        body=bars_html(bars, PART_CATEGORIES, whole=whole, text=seconds_text),
    )
