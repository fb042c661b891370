"""The page of one simulated step: figures, timeline, memory, where each second goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tutti.report.bars import Bar, Category, bars_html
from tutti.report.binary import Pack
from tutti.report.gantt import COLORS, gantt_section
from tutti.report.lines import memory_section, peak_of, tightest
from tutti.report.memory_bars import memory_bars_section
from tutti.report.page import Page, Section
from tutti.report.tiles import Tile, notes_html, tiles_html
from tutti.schedule.instruction import Op
from tutti.simulate.estimate import ClassMemory, labels_with_peaks
from tutti.simulate.labels import ClassLabel, labels_of
from tutti.simulate.perturb import Spread
from tutti.simulate.program import Track
from tutti.simulate.result import ClassResult, IdleReason, SimulationResult
from tutti.units import bytes_text, many, seconds_text

_PASS_COLORS = {
    "forward": "forward",
    "backward": "backward-input",
    "recompute": "recompute",
    "optimizer": "step",
}
_SERIES = tuple(f"series-{n}" for n in range(1, 9))
_IDLE_COLORS = {
    IdleReason.COMMUNICATION: "exposed",
    IdleReason.COPY: "copies",
    IdleReason.BUBBLE: "bubble",
}


def write_simulation_page(
    path: Path,
    result: SimulationResult,
    labels: tuple[ClassLabel, ...] | None = None,
    *,
    memory: Sequence[ClassMemory] | None = None,
    title: str = "",
    facts: Sequence[Tile] = (),
    spread: Spread | None = None,
    slowdown: float = 1.0,
) -> None:
    """Write the page of a simulated step; `facts` are further figures for its head.

    `memory` are the parts of each class's peak, where they are known. `slowdown` is the slowest
    node's, which lengthens the whole step; what is drawn is without it.
    """
    page = simulation_page(
        result,
        labels,
        memory=memory,
        title=title,
        facts=facts,
        spread=spread,
        slowdown=slowdown,
    )
    page.write(path)


def simulation_page(
    result: SimulationResult,
    labels: tuple[ClassLabel, ...] | None = None,
    *,
    memory: Sequence[ClassMemory] | None = None,
    title: str = "",
    facts: Sequence[Tile] = (),
    spread: Spread | None = None,
    slowdown: float = 1.0,
) -> Page:
    """Return the page of a simulated step."""
    plan = result.program.schedule.plan
    schedule = result.program.schedule
    if labels is None:
        labels = labels_of(schedule) if memory is None else labels_with_peaks(schedule, memory)
    arrays = Pack()
    summary = Section(
        id="summary",
        heading="",
        body=tiles_html([*_tiles(result, labels, spread, slowdown), *facts])
        + notes_html(result.warnings(labels)),
    )
    return Page(
        title=title or f"{plan.model.name} on {plan.cluster.name}",
        subtitle=f"One training step, simulated · {many(plan.num_ranks, 'chip')} · schedule "
        f"{plan.job.schedule.value} · {many(plan.job.global_batch, 'sequence')} of "
        f"{many(plan.job.sequence_length, 'token')}",
        sections=(
            summary,
            gantt_section(result, labels, arrays),
            memory_section(result, labels, arrays),
            breakdown_section(result, labels),
            peak_section(result, labels, memory),
            critical_section(result),
        ),
        arrays=arrays,
        footer="Made by tutti. This file is complete in itself; it works offline.",
    )


def _tiles(
    result: SimulationResult,
    labels: tuple[ClassLabel, ...],
    spread: Spread | None,
    slowdown: float,
) -> list[Tile]:
    fullest = tightest(result, labels)
    peak, limit = peak_of(result, labels, fullest), labels[fullest].limit_bytes
    used = f"of {bytes_text(limit)}, " if limit else ""
    detail = many(result.program.size, "instruction")
    if slowdown > 1.0:
        detail = f"{seconds_text(result.step_seconds)} without the slowest node, as drawn; {detail}"
    tiles = [
        Tile("Step", seconds_text(result.step_seconds * slowdown), detail),
        Tile(
            "Bubble",
            _percent(result.share(IdleReason.BUBBLE)),
            "compute waits for other ranks' compute",
        ),
        Tile(
            "Exposed communication",
            _percent(result.share(IdleReason.COMMUNICATION)),
            "compute waits for the network alone",
        ),
        Tile(
            "Peak memory",
            bytes_text(peak),
            f"{used}{labels[fullest].name}",
            alarm=limit is not None and peak > limit,
        ),
    ]
    if spread is not None:
        tiles.append(
            Tile(
                "With jitter",
                seconds_text(spread.mean * slowdown),
                f"95 % below {seconds_text(spread.percentile(95) * slowdown)}, "
                f"{many(len(spread.seconds), 'run')}",
            )
        )
    return tiles


def breakdown_section(result: SimulationResult, labels: tuple[ClassLabel, ...]) -> Section:
    """Return how each class spends the step."""
    names = list(result.costs.categories) or list(_PASS_COLORS)
    unnamed = iter(_SERIES * (1 + len(names) // len(_SERIES)))
    categories = [
        Category(name=name, color=_PASS_COLORS.get(name) or next(unnamed)) for name in names
    ]
    categories += [Category(name=r.value, color=color) for r, color in _IDLE_COLORS.items()]
    bars = [_time_bar(c, label) for c, label in zip(result.classes, labels, strict=True)]
    return Section(
        id="breakdown",
        heading="Where the time goes",
        intro="The whole step of each class of ranks, second by second; at the end the busy share.",
        body=bars_html(bars, categories, whole=result.step_seconds, text=seconds_text),
    )


def _time_bar(result: ClassResult, label: ClassLabel) -> Bar:
    idle = {reason.value: seconds for reason, seconds in result.idle.items()}
    busy = result.busy_seconds[Track.COMPUTE] / (result.step_seconds or 1.0)
    return Bar(
        label=label.name,
        aside=label.chip or label.pool,
        detail=label.detail,
        parts={**result.compute, **idle},
        note=_percent(busy),
    )


def peak_section(
    result: SimulationResult, labels: tuple[ClassLabel, ...], memory: Sequence[ClassMemory] | None
) -> Section:
    """Return peak memory per class against its chip's, by what is known of its parts."""
    if memory is not None:
        return memory_bars_section(memory)
    categories = [
        Category(name="always there", color="static"),
        Category(name="activations and buffers at the peak", color="dynamic"),
    ]
    bars = []
    for each, label in zip(result.classes, labels, strict=True):
        limit = label.limit_bytes
        bars.append(
            Bar(
                label=label.name,
                aside=label.chip or label.pool,
                detail=label.detail,
                parts={
                    categories[0].name: each.static_bytes,
                    categories[1].name: each.peak_bytes - each.static_bytes,
                },
                mark=limit,
                note=bytes_text(each.peak_bytes),
                alarm=limit is not None and each.peak_bytes > limit,
            )
        )
    whole = max(max(bar.mark or 0.0, sum(bar.parts.values())) for bar in bars) * 1.02
    return Section(
        id="peak",
        heading="Peak memory per chip",
        body=bars_html(bars, categories, whole=whole, text=bytes_text, mark_name="chip's memory"),
    )


def critical_section(result: SimulationResult) -> Section:
    """Return what the longest chain of waiting instructions is made of."""
    bar = Bar(
        label="critical path",
        parts=result.critical_seconds,
        note=many(len(result.critical_indices), "instruction"),
    )
    categories = [Category(name=op.value, color=COLORS[op]) for op in Op]
    return Section(
        id="critical",
        heading="Critical path",
        intro="The chain of instructions, each waiting for the one before, that lasts the whole "
        "step: only making these faster makes the step faster.",
        body=bars_html([bar], categories, whole=result.step_seconds, text=seconds_text),
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
