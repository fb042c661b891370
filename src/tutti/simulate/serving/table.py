"""A simulated deployment as text for the terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tutti.plan.drawing_serving import limits_text
from tutti.simulate.serving.result import ServingResult
from tutti.units import count_text, many, seconds_text

COLUMNS = (("first token", "first_s"), ("per token", "per_token_s"), ("whole answer", "whole_s"))


def serving_table(result: ServingResult) -> RenderableType:
    """Return latencies, throughput and the use of every kind of engine."""
    head = Text(
        f"{result.request_rate:.4g} requests/s, {count_text(result.output_rate)} tokens/s; ",
        style="bold",
    )
    head.append(f"{100 * result.within:.1f} % of requests within limits")
    head.append(f" ({limits_text(result.limits)})", style="dim")
    latency = Table(box=None, header_style="bold", pad_edge=False)
    latency.add_column("")
    for name in ("mean", "median", "p90", "p99"):
        latency.add_column(name, justify="right")
    for label, column in COLUMNS:
        latency.add_row(label, *map(seconds_text, result.percentiles(column).values()))
    return Group(head, latency, Text(), _engines(result), *_notes(result))


def _engines(result: ServingResult) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("engines")
    table.add_column("role")
    table.add_column("chips")
    for name in ("use of stages", "decodes per step", "tokens per step", "pages", "preempted"):
        table.add_column(name, justify="right")
    for use in result.engines:
        table.add_row(
            f"pipeline {use.pipeline}, {use.copies} ×",
            use.role,
            f"{use.chips} of {' + '.join(use.pools)}",
            " / ".join(f"{100 * share:.0f} %" for share in use.stage_use[:8])
            + (" …" if len(use.stage_use) > 8 else ""),
            f"{use.rows_per_step:.1f}",
            f"{use.tokens_per_step:.1f}",
            f"{use.most_pages:,} of {use.pages:,}",
            f"{use.preemptions:,}",
        )
    return table


def _notes(result: ServingResult) -> list[Text]:
    waiting = int(result.queue[1].max()) if len(result.queue[1]) else 0
    lines = [f"{many(result.requests, 'request')} in {seconds_text(result.seconds)}; at most "
             f"{waiting:,} of those simulated waited"]  # fmt: skip
    if result.simulated < result.requests:
        lines.append(
            f"equal engines are simulated once: {result.simulated:,} requests stand for all"
        )
    stowed, fetched = (
        sum(getattr(use, name) for use in result.engines)
        for name in ("stowed_pages", "fetched_pages")
    )
    if stowed:
        lines.append(f"{stowed:,} pages moved to hosts, {fetched:,} came back")
    basis = "; ".join(dict.fromkeys(use.basis for use in result.engines))
    lines.append(f"prices: {basis}")
    return [Text(line, style="dim") for line in lines]
