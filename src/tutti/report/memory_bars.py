"""Peak memory per chip: a bar per class of ranks, by what it holds, against what the chip has."""

from __future__ import annotations

from collections.abc import Sequence

from tutti.report.bars import Bar, Category, bars_html
from tutti.report.page import Section
from tutti.report.tables import MOST_ROWS
from tutti.simulate.estimate import ClassMemory
from tutti.units import bytes_text

_MEMORY = (
    Category(name="parameters", color="series-1"),
    Category(name="gradients", color="series-2"),
    Category(name="optimizer", color="series-3"),
    Category(name="activations and buffers", color="series-5"),
    Category(name="runtime", color="series-8"),
)


def memory_bars_section(memory: Sequence[ClassMemory]) -> Section:
    """Return the bars; a page that draws memory over time reaches the same peaks."""
    names = [category.name for category in _MEMORY]
    bars = []
    for m in memory[:MOST_ROWS]:
        sizes = (m.parameters, m.gradients, m.optimizer, m.moving, m.runtime)
        bars.append(
            Bar(
                label=m.name,
                aside=m.pool,
                parts=dict(zip(names, sizes, strict=True)),
                mark=m.limit,
                note=bytes_text(m.total),
                alarm=not m.fits,
            )
        )
    whole = 1.02 * max(max(m.limit, m.total) for m in memory)
    return Section(
        id="peak",
        heading="Peak memory per chip",
        intro="What a chip of each class holds when it holds most; runtime is the driver's context "
        "and what the allocator keeps to spare.",
        body=bars_html(bars, _MEMORY, whole=whole, text=bytes_text, mark_name="chip's memory"),
    )
