"""Stacked bars as plain HTML: they print, they zoom, they need no script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tutti.report.page import escape

MANY = 24  # more bars than this are drawn thin


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar: its parts by category, a mark (a limit) on the same scale, a text at its end."""

    label: str
    aside: str = ""  # small, beside the label
    detail: str = ""  # on hover
    parts: Mapping[str, float]
    mark: float | None = None
    note: str = ""
    alarm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Category:
    """A part that bars have in common; `color` names a variable of page.css."""

    name: str
    color: str


def bars_html(
    bars: Sequence[Bar],
    categories: Sequence[Category],
    *,
    whole: float,
    text: Callable[[float], str],
    mark_name: str = "limit",
    legend: bool = True,
) -> str:
    """Return the bars, below a legend; `whole` fills the width, `text` writes a value."""
    used = [c for c in categories if any(bar.parts.get(c.name, 0.0) > 0 for bar in bars)]
    keys = [f'<li><i style="background:var(--{c.color})"></i>{escape(c.name)}</li>' for c in used]
    if any(bar.mark is not None for bar in bars):
        keys.append(f'<li><i class="mark"></i>{escape(mark_name)}</li>')
    size = "bars thin" if len(bars) > MANY else "bars"
    rows = "".join(_bar(bar, used, whole, text, mark_name) for bar in bars)
    head = f'<ul class="legend">{"".join(keys)}</ul>' if legend else ""
    return f'{head}<div class="{size}">{rows}</div>'


def _bar(
    bar: Bar,
    categories: Sequence[Category],
    whole: float,
    text: Callable[[float], str],
    mark_name: str,
) -> str:
    pieces, said = [], []
    for category in categories:
        value = bar.parts.get(category.name, 0.0)
        if value <= 0:
            continue
        said.append(f"{category.name} {text(value)}")
        pieces.append(
            f'<span style="width:{_percent(value, whole)};background:var(--{category.color})" '
            f'title="{escape(said[-1])}"></span>'
        )
    if bar.mark is not None:
        said.append(f"{mark_name} {text(bar.mark)}")
        pieces.append(
            f'<b style="left:{_percent(bar.mark, whole)}" title="{escape(said[-1])}"></b>'
        )
    about = f"{bar.label}: {', '.join(said)}"
    return (
        f'<div class="row{" alarm" if bar.alarm else ""}">'
        f'<span class="label" title="{escape(bar.detail)}">{escape(bar.label)}'
        f"<small>{escape(bar.aside)}</small></span>"
        f'<div class="bar" role="img" aria-label="{escape(about)}">{"".join(pieces)}</div>'
        f'<span class="note">{escape(bar.note)}</span></div>'
    )


def _percent(value: float, whole: float) -> str:
    return f"{min(100.0, 100 * value / whole if whole > 0 else 0.0):.3f}%"
