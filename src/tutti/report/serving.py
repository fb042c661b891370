"""The page of a simulated deployment: figures, latencies, the queue, the use of every chip."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tutti.plan.drawing_serving import limits_text, service_text
from tutti.plan.plan import Plan
from tutti.report.curves import Curve, curves_html
from tutti.report.page import Page, Section
from tutti.report.tables import Column, Row, meter_html, table_html
from tutti.report.tiles import Tile, tiles_html
from tutti.simulate.serving.result import ServingResult
from tutti.units import count_text, many, seconds_text

_POINTS = 200


def write_serving_page(path: Path, plan: Plan, result: ServingResult) -> None:
    """Write the page as a whole or not at all."""
    serving_page(plan, result).write(path)


def serving_page(plan: Plan, result: ServingResult) -> Page:
    """Return the page."""
    assert plan.job.serving is not None
    return Page(
        title=f"{plan.model.name} on {plan.cluster.name}",
        subtitle=f"simulated at {result.request_rate:.4g} requests/s; planned for "
        f"{service_text(plan.job.serving)}",
        sections=(_figures(result), _latencies(result), _queue(result), _engines(result)),
        footer="Prices: " + "; ".join(dict.fromkeys(use.basis for use in result.engines)) + ".",
    )


def _figures(result: ServingResult) -> Section:
    first, later = result.percentiles("first_s"), result.percentiles("per_token_s")
    tiles = [
        Tile(
            "Requests", f"{result.request_rate:.4g}/s", f"{many(result.requests, 'request')} came"
        ),
        Tile("Throughput", count_text(result.output_rate), "tokens per second"),
        Tile(
            "Within limits",
            f"{100 * result.within:.1f} %",
            limits_text(result.limits),
            alarm=not result.keeps_limits,
        ),
        Tile("First token", seconds_text(first["p50"]), f"p99 {seconds_text(first['p99'])}"),
        Tile("Per token", seconds_text(later["p50"]), f"p99 {seconds_text(later['p99'])}"),
    ]
    return Section(id="figures", heading="", body=tiles_html(tiles))


def _latencies(result: ServingResult) -> Section:
    figures = []
    for title, name, limit in (
        ("First token", "first_s", result.limits.first_token_s),
        ("Per token", "per_token_s", result.limits.per_token_s),
    ):
        values = getattr(result, name)
        values = np.sort(values[np.isfinite(values)])
        if not len(values):
            continue
        shares = np.linspace(0.0, 100.0, _POINTS)
        points = list(zip(shares.tolist(), np.percentile(values, shares).tolist(), strict=True))
        curves = [Curve(name="requests", color="series-1", points=points)]
        if limit is not None:
            line = ((0.0, limit), (100.0, limit))
            curves.append(Curve(name="limit", color="series-2", points=line, dashed=True))
        figures.append(
            curves_html(
                f"{title}, by share of requests in %", curves,
                text=seconds_text, ticks=seconds_text, from_zero=True,
            )
        )  # fmt: skip
    return Section(
        id="latencies",
        heading="Latencies",
        intro="How long requests wait for their first token, and for each later one on average: "
        "the share of requests below, the seconds at the side.",
        body=f'<div class="curves">{"".join(figures)}</div>',
    )


def _queue(result: ServingResult) -> Section:
    times, waiting, running = (column.tolist() for column in result.queue)
    figures = [
        curves_html(
            title, [Curve(name=title, color=color, points=list(zip(times, values, strict=True)))],
            text=lambda value: f"{value:,.0f}", from_zero=True,
        )
        for title, color, values in (
            ("waiting, over seconds", "series-2", waiting),
            ("with a slot, over seconds", "series-1", running),
        )
    ]  # fmt: skip
    return Section(
        id="queue",
        heading="The queue",
        intro="Requests that wait for a slot, and those that have one, on the engines that were "
        "simulated; equal engines are simulated once.",
        body=f'<div class="curves">{"".join(figures)}</div>',
    )


def _engines(result: ServingResult) -> Section:
    columns = (
        Column("engines", kind="name"), Column("role"), Column("chips"), Column("stage"),
        Column("in use"), Column("decodes per step", figures=True),
        Column("tokens per step", figures=True), Column("pages at most", figures=True),
        Column("preempted", figures=True),
    )  # fmt: skip
    rows = []
    for use in result.engines:
        for stage, share in enumerate(use.stage_use):
            first = stage == 0
            rows.append(
                Row((
                    f"pipeline {use.pipeline}, {many(use.copies, 'engine')}" if first else "",
                    use.role if first else "",
                    f"{use.chips} of {' + '.join(use.pools)}" if first else "",
                    str(stage),
                    meter_html(share, f"{100 * share:.0f} %"),
                    f"{use.rows_per_step:.1f}" if first else "",
                    f"{use.tokens_per_step:.1f}" if first else "",
                    f"{use.most_pages:,} of {use.pages:,}" if first else "",
                    f"{use.preemptions:,}" if first else "",
                ))
            )  # fmt: skip
    return Section(
        id="engines",
        heading="Use of the chips",
        intro="The share of the time in which each stage computed.",
        body=table_html(columns, rows),
    )
