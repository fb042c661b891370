"""The page of a simulated fleet: policies side by side, nodes × time by job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tutti.fleet.figures import FleetFigures
from tutti.fleet.simulate import History
from tutti.fleet.traces.trace import Trace
from tutti.report.page import Page, Section, escape
from tutti.report.tables import Column, Row, table_html
from tutti.report.tiles import Tile, tiles_html
from tutti.units import many, seconds_text

_WIDTH = 1200.0  # of a picture, in its own units
_MOST_BOXES = 4000  # the largest of them are drawn
_MOST_BORDERS = 64
_HUE_STEP = 137.5  # neighbours in number are far apart in colour


@dataclass(frozen=True, slots=True)
class _Box:
    """A job on neighbouring nodes, for a while."""

    start: float
    end: float
    first: int
    count: int
    job: str
    number: int
    said: str

    @property
    def area(self) -> float:
        return (self.end - self.start) * self.count


def write_fleet_page(
    path: Path, histories: Sequence[History], rows: Sequence[FleetFigures], trace: Trace
) -> None:
    """Write one self-contained page."""
    grounds = histories[0].grounds
    page = Page(
        title=f"{trace.name} on {grounds.cluster.name}",
        subtitle=f"{many(len(trace.rows), 'job')} over {seconds_text(trace.span_s)} · "
        f"{many(grounds.num_nodes, 'node')}, {many(grounds.num_chips, 'chip')}",
        sections=(
            Section(id="summary", heading="", body=tiles_html(_tiles(rows))),
            Section(id="policies", heading="Policies side by side", body=_table(rows)),
            *(_picture(history, row, number, max(one.end for one in histories))
              for number, (history, row) in enumerate(zip(histories, rows, strict=True))),
        ),
        footer="Made by tutti. This file is complete in itself; it works offline.",
    )  # fmt: skip
    page.write(path)


def _tiles(rows: Sequence[FleetFigures]) -> list[Tile]:
    soonest = min(rows, key=lambda row: row.completion_mean_s)
    tightest = min(rows, key=lambda row: row.spread_jobs)
    return [
        Tile("done soonest", seconds_text(soonest.completion_mean_s),
             f"mean from coming to end, by {soonest.policy}"),
        Tile("least spread out", f"{100 * tightest.spread_jobs:.1f} %",
             f"of {many(tightest.multi_node_jobs, 'multi-node job')} in more groups than they "
             f"need, by {tightest.policy}"),
        Tile("chips in use", f"{100 * soonest.utilisation:.1f} %", "while jobs came"),
    ]  # fmt: skip


def _table(rows: Sequence[FleetFigures]) -> str:
    names = ("wait, mean", "wait, p95", "done, mean", "done, p95", "in use", "fragmented",
             "spread out", "groups", "network", "moves", "stops")  # fmt: skip
    heads = [Column("policy", kind="name"), *(Column(name, figures=True) for name in names)]
    lines = [
        Row((
            row.policy, seconds_text(row.wait_mean_s), seconds_text(row.wait_p95_s),
            seconds_text(row.completion_mean_s), seconds_text(row.completion_p95_s),
            f"{100 * row.utilisation:.1f} %", f"{100 * row.fragmentation:.1f} %",
            f"{100 * row.spread_jobs:.1f} %", f"{row.groups_over_fewest:.2f}×",
            f"{100 * row.network_share:.2f} %", str(row.moves), str(row.preemptions + row.lost),
        ))
        for row in rows
    ]  # fmt: skip
    return table_html(heads, lines)


def _boxes(history: History) -> Iterator[_Box]:
    for number, job in enumerate(history.jobs.values()):
        for spell in job.spells:
            if spell.end <= spell.start:
                continue
            nodes = spell.allocation.nodes
            groups = history.grounds.spread(spell.allocation.mask)
            said = (
                f"{job.request.job}: {many(len(nodes), 'node')} in {many(groups, 'group')}, "
                f"{seconds_text(spell.end - spell.start)}, waited {seconds_text(job.wait_s)}"
            )
            first = 0
            for at in range(1, len(nodes) + 1):
                if at == len(nodes) or nodes[at] != nodes[at - 1] + 1:
                    yield _Box(spell.start, spell.end, nodes[first], at - first,
                               job.request.job, number, said)  # fmt: skip
                    first = at


def _moment(seconds: float) -> str:
    return seconds_text(seconds) if seconds else "0"


def _picture(history: History, row: FleetFigures, number: int, horizon: float) -> Section:
    grounds = history.grounds
    each = max(0.6, min(6.0, 480.0 / grounds.num_nodes))
    height = each * grounds.num_nodes
    scale = _WIDTH / max(horizon, 1e-9)
    everyone = sorted(_boxes(history), key=lambda box: -box.area)
    body = [
        f'<rect x="{box.start * scale:.1f}" y="{box.first * each:.1f}" '
        f'width="{max(0.4, (box.end - box.start) * scale):.1f}" '
        f'height="{max(0.4, box.count * each - 0.3):.1f}" '
        f'fill="oklch(0.68 0.13 {box.number * _HUE_STEP % 360:.0f})">'
        f"<title>{escape(box.said)}</title></rect>"
        for box in everyone[:_MOST_BOXES]
    ]
    groups = grounds.node_group[grounds.border] if grounds.node_group else (0,) * grounds.num_nodes
    borders = [n for n in range(1, grounds.num_nodes) if groups[n] != groups[n - 1]]
    if len(borders) <= _MOST_BORDERS:  # hosts in no order have one at every node
        body += [
            f'<line x1="0" x2="{_WIDTH:g}" y1="{node * each:.1f}" y2="{node * each:.1f}" '
            'stroke="currentColor" stroke-width="0.6" stroke-dasharray="3 3"/>'
            for node in borders
        ]
    ticks = "".join(
        f'<text x="{part * _WIDTH / 6 + (3 if part < 6 else 0):.0f}" y="{height + 14:.0f}" '
        f'text-anchor="{"start" if part < 6 else "end"}" '
        f'font-size="11" fill="currentColor">{_moment(part * horizon / 6)}</text>'
        for part in range(7)
    )
    left = len(everyone) - _MOST_BOXES
    more = f" The {_MOST_BOXES:,} largest boxes are drawn, {left:,} are not." if left > 0 else ""
    return Section(
        id=f"nodes-{number}", heading=row.policy,
        intro="Nodes from top to bottom, time from left to right, a colour per job; dashed lines "
        f"are borders of groups. Point at a box for its job.{more}",
        body=f'<svg viewBox="0 -2 {_WIDTH:g} {height + 22:.0f}" role="img" '
        f'style="width:100%;height:auto" aria-label="nodes over time under {escape(row.policy)}">'
        f"{''.join(body)}{ticks}</svg>",
    )  # fmt: skip
