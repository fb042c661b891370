"""A simulated step as a table for the terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tutti.simulate.labels import ClassLabel, labels_of
from tutti.simulate.perturb import Spread
from tutti.simulate.program import Track
from tutti.simulate.result import ClassResult, IdleReason, SimulationResult
from tutti.units import bytes_text, many, seconds_text

MOST_ROWS = 40


def result_table(
    result: SimulationResult,
    labels: tuple[ClassLabel, ...] | None = None,
    *,
    spread: Spread | None = None,
    most: int = MOST_ROWS,
    slowdown: float = 1.0,
) -> RenderableType:
    """Return the step in a few lines and a row per class of ranks.

    `slowdown` is the slowest node's, which lengthens the whole step; the rows are without it.
    """
    labels = labels_of(result.program.schedule) if labels is None else labels
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("ranks of")
    table.add_column("chip")
    for name in ("busy", "bubble", "exposed comm.", "copies", "peak memory", "of"):
        table.add_column(name, justify="right")
    shown = _rows(result, most)
    for index in shown:
        table.add_row(*_row(result.classes[index], labels[index]))
    parts: list[RenderableType] = [_headline(result, spread, slowdown), table]
    hidden = result.num_classes - len(shown)
    if hidden > 0:
        parts.append(
            Text(
                f"… {many(hidden, 'more class', 'more classes')} of ranks between these",
                style="dim",
            )
        )
    parts.append(_critical(result))
    parts += [Text(f"warning: {line}", style="yellow") for line in result.warnings(labels)[:10]]
    return Group(*parts)


def _rows(result: SimulationResult, most: int) -> list[int]:
    """Return the classes to show: all, or the most idle, the busiest and the fullest."""
    everyone = range(result.num_classes)
    if result.num_classes <= most:
        return list(everyone)
    by_idle = sorted(everyone, key=lambda i: result.classes[i].idle_share)
    by_memory = sorted(everyone, key=lambda i: -result.classes[i].peak_bytes)
    third = most // 3
    return sorted({*by_idle[:third], *by_idle[-third:], *by_memory[:third]})


def _headline(result: SimulationResult, spread: Spread | None, slowdown: float) -> Text:
    text = Text.assemble("step ", (seconds_text(result.step_seconds * slowdown), "bold"))
    if slowdown > 1.0:
        text.append(f" ({seconds_text(result.step_seconds)} without the slowest node)")
    for name, share in (
        ("bubble", result.share(IdleReason.BUBBLE)),
        ("exposed communication", result.share(IdleReason.COMMUNICATION)),
        ("exposed copies", result.share(IdleReason.COPY)),
    ):
        if share > 0:
            text.append(f"   {name} {_percent(share)}")
    if spread is not None:
        text.append(
            f"   with jitter: mean {seconds_text(spread.mean * slowdown)}, "
            f"95 % below {seconds_text(spread.percentile(95) * slowdown)} "
            f"({many(len(spread.seconds), 'run')})"
        )
    return text


def _row(result: ClassResult, label: ClassLabel) -> list[RenderableType]:
    step = result.step_seconds or 1.0
    limit = label.limit_bytes
    peak = result.peak_bytes if label.peak_bytes is None else label.peak_bytes
    over = limit is not None and peak > limit
    return [
        label.name,
        label.chip or label.pool,
        _percent(result.busy_seconds[Track.COMPUTE] / step),
        _percent(result.bubble_share),
        _percent(result.exposed_communication_seconds / step),
        _percent(result.idle[IdleReason.COPY] / step),
        Text(bytes_text(peak), style="bold red" if over else ""),
        bytes_text(limit) if limit is not None else "–",
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _critical(result: SimulationResult) -> Text:
    parts = [
        f"{name} {_percent(seconds / result.step_seconds)}"
        for name, seconds in list(result.critical_seconds.items())[:5]
    ]
    length = len(result.critical_indices)
    return Text(f"critical path ({many(length, 'instruction')}): {', '.join(parts)}", style="dim")
