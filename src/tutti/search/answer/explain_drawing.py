"""An Explanation on a terminal: at most 100 columns wide, still readable at 80."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tutti.search.answer.explanation import Explanation, PoolRow, StageRow
from tutti.units import count_text, seconds_text

WIDEST = 100
MOST_ROWS = 36
_BAR = 24


class _Narrow:
    """Draws its content no wider than WIDEST, whatever the terminal."""

    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(
            self._content, options.update(width=min(WIDEST, options.max_width))
        )


def render(explanation: Explanation) -> RenderableType:
    """Return the whole explanation for the terminal."""
    parts: list[RenderableType] = [
        Text(explanation.title, style="bold"),
        Text(" ".join((explanation.headline, *explanation.details))),
        Text(),
        _comparison(explanation),
        *_remarks(explanation.missing),
        _heading("stages"),
        _stages(explanation),
        Text(explanation.bottleneck.sentence),
        _heading("pools"),
        _pools(explanation.pools),
        _heading("search"),
        Text(explanation.bound),
        Text(explanation.runner_up),
        *_pruned(explanation),
    ]
    parts += [Text(f"note: {line}", style="yellow") for line in explanation.caveats]
    return _Narrow(Group(*parts))


def _heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _remarks(lines: Sequence[str]) -> Iterator[Text]:
    return (Text(line, style="dim") for line in lines)


# --- comparison --------------------------------------------------------------------------------


def _comparison(explanation: Explanation) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for justify in ("left", "left", "right", "left"):
        grid.add_column(justify=justify, no_wrap=True)
    most = max(item.amount for item in explanation.compared)
    for index, item in enumerate(explanation.compared):
        share = item.amount / most if most else 0.0
        grid.add_row(
            Text(item.name, style="bold" if index == 0 else ""),
            Text("█" * max(1, round(share * _BAR)), style="green" if index == 0 else "blue"),
            item.text,
            "" if index == 0 else f"{100 * (item.ratio - 1):+.1f} %",
        )
    if explanation.alone:
        _add_throughputs(grid, explanation)
    return grid


def _add_throughputs(grid: Table, explanation: Explanation) -> None:
    rows = [("together", explanation.tokens_per_second, True)]
    rows += [
        (f"{item.pool} alone", item.tokens_per_second, item.fits) for item in explanation.alone
    ]
    fastest = max(speed for _, speed, _ in rows)
    grid.add_row("")
    for index, (name, speed, fits) in enumerate(rows):
        efficiency = explanation.mixed_efficiency_pct
        said = f"{efficiency:.1f} % of the sum" if index == 0 and efficiency is not None else ""
        grid.add_row(
            Text(name, style="bold" if index == 0 else ""),
            Text(
                "█" * max(1, round(speed / fastest * _BAR)), style="green" if not index else "cyan"
            ),
            f"{count_text(speed)} tok/s",
            said if fits else "memory unlimited",
        )


# --- stages ------------------------------------------------------------------------------------


def _stages(explanation: Explanation) -> RenderableType:
    moved = any(row.offload for row in explanation.stages)
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for name, right in (
        ("stage", False), ("pool", False), ("replicas", False), ("units", False), ("batch", True),
        ("recomp.", False), ("host holds", False), ("micro-b.", True), ("idle", True),
        ("memory", True),
    ):  # fmt: skip
        if name != "host holds" or moved:
            table.add_column(
                name,
                justify="right" if right else "left",
                no_wrap=right or name == "stage",
                min_width=len("embedding,") if name == "units" else None,
                overflow="fold",
            )
    runs = _runs(explanation.stages)
    several = len({row.pipeline for row in explanation.stages}) > 1
    busiest = explanation.stages[explanation.bottleneck.row]
    shown = runs if len(runs) <= MOST_ROWS else [*runs[: MOST_ROWS // 2], *runs[-MOST_ROWS // 2 :]]
    for run in shown:
        cells = _cells(run, several, moved)
        table.add_row(*map(Text, cells), style="bold" if busiest in run else None)
    if len(shown) < len(runs):
        table.caption = f"{len(runs) - len(shown)} more lines between these"
    return table


def _runs(rows: Sequence[StageRow]) -> list[list[StageRow]]:
    """Join neighbouring stages of one shape into one line."""
    return [
        list(group)
        for _, group in itertools.groupby(
            rows,
            key=lambda r: (
                *(r.pipeline, r.replica, r.pool, r.num_chips, r.degrees, r.dp, r.num_units),
                *(r.sequences, bool(r.recompute), bool(r.offload), r.experts),
            ),
        )
    ]


def _cells(run: Sequence[StageRow], several: bool, moved: bool) -> list[str]:
    first, last = run[0], run[-1]
    alone = len(run) == 1
    name = f"{first.stage}" if alone else f"{first.stage}-{last.stage}"
    host = [(first.offload if alone else "yes") if first.offload else "–"] if moved else []
    return [
        f"{first.pipeline}.{name}" if several else name,
        first.pool,
        f"{first.dp} × {first.degrees}",
        first.units if alone else f"{first.num_units} each",
        f"{100 * first.batch_share:.0f} %",
        (first.recompute if alone else first.recompute.split(",")[0].split()[0])
        if first.recompute
        else "–",
        *host,
        seconds_text(max(row.micro_batch_seconds for row in run)),
        f"{100 * max(row.idle_share for row in run):.1f} %",
        f"{100 * max(row.memory_share for row in run):.0f} %",
    ]


# --- pools and search --------------------------------------------------------------------------


def _pools(rows: Sequence[PoolRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for name, justify, fixed in (
        ("pool", "left", True), ("chips", "right", True), ("peak", "right", True),
        ("work", "right", True), ("idle", "right", True), ("of which", "left", False),
        ("predicted from", "left", False),
    ):  # fmt: skip
        table.add_column(name, justify=justify, no_wrap=fixed)  # type: ignore[arg-type]
    for row in rows:
        why = ", ".join(
            f"{reason.removeprefix('exposed ')} {100 * share:.1f} %"
            for reason, share in row.idle.items()
            if share >= 0.0005
        )
        table.add_row(
            row.pool,
            f"{row.num_chips:,}",
            f"{100 * row.peak_share:.1f} %",
            f"{100 * row.work_share:.1f} %",
            f"{100 * row.idle_share:.1f} %",
            why or "–",
            Text(row.basis, style="yellow" if row.nominal else ""),
        )
    return table


def _pruned(explanation: Explanation) -> Iterator[RenderableType]:
    if explanation.pruned:
        yield Text("Never looked at one by one:")
        for line in explanation.pruned:
            yield Padding(Text(f"· {line}"), (0, 0, 0, 2))
    counted = f"; {explanation.work}" if explanation.work else ""
    yield Text(f"{explanation.search_cpu_seconds:.3g} s of CPU time{counted}", style="dim")
