"""The page of plans on a fabric: links over time, what each collective took."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tutti.fabric.naming import link_name, tier_of
from tutti.fabric.wiring import Floats, Wiring
from tutti.report.heat import Cell, heat_html
from tutti.report.page import Page, Section
from tutti.report.tables import Column, Row, table_html
from tutti.report.tiles import Tile, tiles_html
from tutti.simulate.fabric_step import PlanOnFabric, Sent
from tutti.units import bytes_text, seconds_text

_BINS = 20
_LINKS = 24


def utilisation(
    plans: Sequence[PlanOnFabric], wiring: Wiring, rates: Floats, bins: int = _BINS
) -> tuple[list[int], Floats, float]:
    """Return the busiest links, their share of time busy (link × bin), and a bin's seconds.

    Over the longest step, as simulated on the fabric; plans with shorter steps repeat theirs.
    """
    horizon = max(plan.together_s for plan in plans)
    width = horizon / bins
    runs: list[tuple[Sent, Floats]] = []  # with how many runs there are in each bin
    for plan in plans:
        result = plan.result
        turns = max(1, int(np.ceil(horizon / max(result.step_seconds, 1e-12) - 1e-9)))
        for sent in plan.sent:
            start, end = sent.traffic.windows(result, sent.together_s)
            share = np.zeros(bins)
            edges = np.arange(bins + 1) * width
            for turn in range(turns):
                low, high = start + turn * result.step_seconds, end + turn * result.step_seconds
                inside = np.clip(edges[None, 1:], low[:, None], high[:, None]) - np.clip(
                    edges[None, :-1], low[:, None], high[:, None]
                )
                share += (inside / np.maximum(high - low, 1e-15)[:, None]).sum(axis=0)
            runs.append((sent, share))
    total = np.zeros(len(rates))
    for sent, share in runs:
        total[sent.links] += sent.bytes_by_link * share.sum()
    busy = np.divide(total, rates * horizon, out=np.zeros_like(total), where=rates > 0)
    busy[wiring.island_out :] = 0.0
    chosen = _chosen(busy, wiring)
    table = np.zeros((len(chosen), bins))
    for sent, share in runs:
        own = np.zeros(len(rates))
        own[sent.links] = sent.bytes_by_link
        table += own[chosen][:, None] * share[None, :]
    return chosen, table / (rates[chosen][:, None] * width), width


def _chosen(busy: Floats, wiring: Wiring) -> list[int]:
    """Return the busiest links of every tier and direction, busiest first."""
    busiest: list[int] = []
    spans = [(0, wiring.num_ports), (wiring.num_ports, 2 * wiring.num_ports)]
    for layer in wiring.layers:
        bundles = layer.bundle_down - layer.bundle_up
        spans += [(layer.up, layer.down), (layer.down, layer.bundle_up),
                  (layer.bundle_up, layer.bundle_down),
                  (layer.bundle_down, layer.bundle_down + bundles)]  # fmt: skip
    each = max(2, _LINKS // max(1, len(spans) // 2))
    for low, high in spans:
        order = np.argsort(-busy[low:high], kind="stable")[:each]
        busiest += [low + int(i) for i in order if busy[low + i] > 0]
    return sorted(busiest, key=lambda link: (tier_of(wiring, link), -busy[link]))


def write_fabric_page(
    path: Path, plans: Sequence[PlanOnFabric], wiring: Wiring, rates: Floats, said: str
) -> None:
    """Write one self-contained page."""
    links, shares, width = utilisation(plans, wiring, rates)
    count = shares.shape[1]
    columns = [f"{100 * i // count}" for i in range(count)]
    rows = []
    for link, row in zip(links, shares, strict=True):
        name = link_name(wiring, link)
        cells = {
            column: Cell(
                share=float(np.sqrt(min(value, 1.0))),
                text=f"{100 * value:.0f}" if value >= 0.005 else "",
                detail=f"{name}: {100 * value:.1f} % from {column} % of the step on",
            )
            for column, value in zip(columns, row.tolist(), strict=True)
        }  # fmt: skip
        rows.append((f"{tier_of(wiring, link)}: {name}", cells))
    page = Page(
        title=" beside ".join(plan.name for plan in plans),
        subtitle=f"On {wiring.cluster.name}, flow by flow · {said}",
        sections=(
            Section(id="summary", heading="", body=tiles_html(_tiles(plans)),
                    intro="Flows share links fairly; the model knows no queues: nothing is lost, "
                    "marked or paused."),
            Section(
                id="heat", heading="The busiest links over the step",
                intro=f"Percent of a link's rate, by percent of the step ({seconds_text(width)} "
                "each); the busiest links of each tier and direction.",
                body=heat_html("link", columns, rows),
            ),
            *(_section(plan, number) for number, plan in enumerate(plans)),
        ),
        footer="Made by tutti. This file is complete in itself; it works offline.",
    )  # fmt: skip
    page.write(path)


def _tiles(plans: Sequence[PlanOnFabric]) -> list[Tile]:
    tiles = []
    for plan in plans:
        change = plan.together_s / plan.priced_s - 1.0
        beside = "" if len(plans) == 1 else f", alone {seconds_text(plan.alone_s)}"
        tiles.append(Tile(
            plan.name, seconds_text(plan.together_s),
            f"step on the fabric; priced {seconds_text(plan.priced_s)} ({100 * change:+.1f} %)"
            + beside,
        ))  # fmt: skip
    return tiles


def _section(plan: PlanOnFabric, number: int) -> Section:
    figures = ("bytes", "priced", "alone", "with all", "busbw per chip", "slowest connection")
    heads = [Column("what", kind="name"), Column("program"), Column("groups × ranks"),
             *(Column(name, figures=True) for name in figures)]  # fmt: skip
    rows = [
        Row((
            f"{one.traffic.name}: {one.traffic.operation.value}",
            one.program,
            f"{one.traffic.groups:,} × {one.traffic.ranks:,}",
            bytes_text(one.traffic.num_bytes),
            seconds_text(one.priced_s),
            seconds_text(one.alone_s),
            seconds_text(one.together_s),
            f"{one.bus_bandwidth / 1e9:.1f} GB/s" if one.bus_bandwidth else "–",
            f"{one.slowest_flow / 1e9:.2f} GB/s",
        ))
        for one in sorted(plan.sent, key=lambda one: -one.together_s)
    ]  # fmt: skip
    return Section(
        id=f"traffic-{number}", heading=f"What {plan.name} sends",
        intro="Once each; a collective's groups all at once, then beside what overlaps with it.",
        body=table_html(heads, rows),
    )  # fmt: skip
