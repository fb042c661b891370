"""Curves over steps as plain SVG: they print, they zoom, they need no script."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tutti.report.page import escape

MOST_POINTS = 600  # of a curve that are drawn, spread evenly
MOST_DOTS = 120  # more points than this are a line only
# About as wide as a column of the page, so that texts keep the size that page.css gives them.
_WIDTH, _HEIGHT = 420, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 32
_TICKS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A figure over steps; `color` names a variable of page.css."""

    name: str
    color: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


def curves_html(
    title: str,
    curves: Sequence[Curve],
    *,
    text: Callable[[float], str],
    ticks: Callable[[float], str] | None = None,
    from_zero: bool = False,
) -> str:
    """Return a figure with all curves on one scale.

    `text` writes the value of a point, `ticks` one of the axis (left out: as plain numbers).
    """
    drawn = [(curve, _finite(curve.points)) for curve in curves]
    drawn = [(curve, points) for curve, points in drawn if points]
    if not drawn:
        return ""
    xs = [x for _, points in drawn for x, _ in points]
    ys = [y for _, points in drawn for _, y in points]
    scale = _Scale(xs, [0.0, *ys] if from_zero else ys)
    body = [scale.grid(ticks)]
    body += [_line(curve, points, scale, text) for curve, points in drawn]
    keys = "".join(
        f'<li><i class="{"dash" if c.dashed else ""}" style="{_key(c)}"></i>{escape(c.name)}</li>'
        for c, _ in drawn
    )
    return (
        f'<figure class="curve"><figcaption>{escape(title)}</figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)} over steps">'
        f"{''.join(body)}</svg>"
        f'<ul class="legend">{keys}</ul></figure>'
    )


def _key(curve: Curve) -> str:
    kind = "border-color" if curve.dashed else "background"
    return f"{kind}:var(--{curve.color})"


def _finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    kept = [point for point in points if math.isfinite(point[1])]
    if len(kept) <= MOST_POINTS:
        return kept
    last = len(kept) - 1
    return [kept[round(i * last / (MOST_POINTS - 1))] for i in range(MOST_POINTS)]


class _Scale:
    """From values to places in the figure."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self.low_x, self.high_x = min(xs), max(xs)
        self.ticks_y = nice_ticks(min(ys), max(ys))
        self.low_y, self.high_y = self.ticks_y[0], self.ticks_y[-1]

    def x(self, value: float) -> float:
        share = (value - self.low_x) / ((self.high_x - self.low_x) or 1.0)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.low_y) / ((self.high_y - self.low_y) or 1.0)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def grid(self, text: Callable[[float], str] | None) -> str:
        """Return lines at round values, and their texts."""
        parts = []
        for value, said in zip(self.ticks_y, tick_texts(self.ticks_y, text), strict=True):
            y = self.y(value)
            parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
            parts.append(
                f'<text class="tick" x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">'
                f"{escape(said)}</text>"
            )
        parts += [
            f'<text x="{self.x(value):.1f}" y="{_HEIGHT - _BOTTOM + 19}" '
            f'text-anchor="middle">{int(value):,}</text>'
            for value in nice_ticks(self.low_x, self.high_x)
            if self.low_x <= value <= self.high_x and value == int(value)
        ]
        return f'<g class="grid">{"".join(parts)}</g>'


def tick_texts(ticks: Sequence[float], text: Callable[[float], str] | None) -> list[str]:
    """Return what stands at round values: all decimals that their step has, or by `text`.

    Where `text` rounds two of them to one, it is not used.
    """
    said = [text(value) for value in ticks] if text is not None else []
    if said and len(set(said)) == len(said):
        return said
    step = min(b - a for a, b in itertools.pairwise(ticks))
    decimals = next(n for n in range(16) if math.isclose(round(step, n), step, rel_tol=1e-6))
    return [f"{value:.{decimals}f}" for value in ticks]


def nice_ticks(low: float, high: float) -> list[float]:
    """Return about five round values from at most `low` to at least `high`."""
    if high <= low:
        width = abs(low) * 0.1 or 1.0
        low, high = low - width, high + width
    rough = (high - low) / (_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(m for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = 2 - math.floor(math.log10(step))  # 0.1 + 0.2 is 0.3; of 1e-14 nothing is lost
    return [round(i * step, digits) for i in range(first, last + 1)]


def _line(
    curve: Curve,
    points: Sequence[tuple[float, float]],
    scale: _Scale,
    text: Callable[[float], str],
) -> str:
    places = " ".join(f"{scale.x(x):.1f},{scale.y(y):.1f}" for x, y in points)
    dashes = ' stroke-dasharray="6 4"' if curve.dashed else ""
    line = f'<polyline points="{places}" style="stroke:var(--{curve.color})"{dashes}/>'
    if len(points) > MOST_DOTS:
        return line
    dots = "".join(
        f'<circle cx="{scale.x(x):.1f}" cy="{scale.y(y):.1f}" r="3" '
        f'style="fill:var(--{curve.color})"><title>'
        f"{escape(f'{curve.name}, step {x:,.0f}: {text(y)}')}</title></circle>"
        for x, y in points
    )
    return line + dots
