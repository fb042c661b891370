"""The page of a search's answer: the plan on the map, against its rivals, stage by stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tutti.hardware.cluster import Cluster
from tutti.models.spec import ModelSpec
from tutti.report.bars import Bar, Category, bars_html
from tutti.report.binary import Pack
from tutti.report.cluster_map import cluster_map_section, stage_colors
from tutti.report.gantt import gantt_section
from tutti.report.lines import memory_section
from tutti.report.memory_bars import memory_bars_section
from tutti.report.page import Page, Section, escape
from tutti.report.simulation import breakdown_section
from tutti.report.tables import MOST_ROWS, Column, Html, Row, meter_html, table_html
from tutti.report.tiles import Tile, notes_html, tiles_html
from tutti.search.answer.explain import explain
from tutti.search.answer.explanation import PROVEN, Explanation, PoolRow, StageRow, step_text
from tutti.search.answer.result import SearchResult
from tutti.search.pricing.money_and_energy import Spending
from tutti.simulate.estimate import Estimate
from tutti.units import bytes_text, count_text, many, seconds_text

MOST_INSTRUCTIONS = 500_000  # in the timeline, so that a page stays below 5 MB
_COMPARED = {
    "this plan": "series-1",
    "runner-up": "series-4",
    "best uniform": "series-2",
    "lower bound": "series-8",
}


def write_planning_page(
    path: Path, result: SearchResult, model: ModelSpec, cluster: Cluster
) -> None:
    """Write the page of a search's answer."""
    planning_page(result, model, cluster).write(path)


def planning_page(result: SearchResult, model: ModelSpec, cluster: Cluster) -> Page:
    """Return the page of a search's answer."""
    explanation = explain(result, model, cluster)
    plan, arrays = result.best.plan, Pack()
    return Page(
        title=explanation.title,
        subtitle=f"Training plan · {plan.num_ranks:,} of {many(cluster.num_chips, 'chip')} · "
        f"{many(plan.job.global_batch, 'sequence')} of "
        f"{many(plan.job.sequence_length, 'token')} · "
        f"{plan.job.precision.label} · schedule {plan.job.schedule.value}",
        sections=(
            _summary(explanation),
            cluster_map_section(plan, cluster, arrays),
            _comparison(explanation),
            *([_throughput(explanation)] if explanation.alone else []),
            _stages(explanation, result),
            _pools(explanation),
            *_step(result.best.estimate, explanation, arrays),
            _search(explanation),
        ),
        arrays=arrays,
        footer="Made by tutti. This file is complete in itself; it works offline.",
    )


# --- head --------------------------------------------------------------------------------------


def _summary(explanation: Explanation) -> Section:
    words = " ".join((explanation.headline, *explanation.details))
    return Section(
        id="summary",
        heading="",
        body=tiles_html(_tiles(explanation))
        + f'<p class="lead">{_prose(words)}</p>'
        + _list(explanation.caveats, "caveats"),
    )


def _tiles(explanation: Explanation) -> list[Tile]:
    efficiency, speedup, gap = (
        explanation.mixed_efficiency_pct,
        explanation.speedup,
        explanation.gap_pct,
    )
    slower = 100 * (explanation.slowdown - 1)
    return [
        Tile(
            "Step",
            step_text(explanation.step_seconds),
            f"8 of 10 times {explanation.step_interval}"
            + (f"; slowest node {slower:.1f} % above a typical one" if slower > 0.05 else ""),
        ),
        Tile("Throughput", count_text(explanation.tokens_per_second), "tokens per second"),
        Tile("MFU", f"{100 * explanation.mfu:.1f} %", "of all chips' dense peak"),
        Tile(
            "Mixed-chip efficiency",
            "–" if efficiency is None else f"{efficiency:.1f} %",
            "no figure; see below" if efficiency is None else "of the pools' sum, each alone",
        ),
        Tile(
            "Against uniform",
            "–" if speedup is None else f"{speedup:.2f} ×",
            "no uniform plan; see below" if speedup is None else "as fast as the best uniform plan",
        ),
        Tile(
            "Proven gap",
            "–" if gap is None else "0 %" if gap < PROVEN else f"≤ {gap:.1f} %",
            "no bound" if gap is None else f"no plan has less than {explanation.bound_text}",
        ),
        *_spending_tiles(explanation.spending),
        Tile("Search", f"{explanation.search_cpu_seconds:.3g} s", "of CPU time"),
    ]


def _spending_tiles(spent: Spending | None) -> Iterator[Tile]:
    if spent is not None and spent.cost_per_million_tokens is not None:
        yield Tile("Cost", spent.cost_text(spent.cost_per_million_tokens), "per million tokens")
    if spent is not None and spent.tokens_per_joule is not None:
        yield Tile("Energy", f"{spent.tokens_per_joule:.4g}", "tokens per joule")


# --- comparison --------------------------------------------------------------------------------


def _comparison(explanation: Explanation) -> Section:
    bars = [
        Bar(
            label=item.name,
            detail=item.detail,
            parts={item.name: item.amount},
            note=f"{item.text}{'' if item.ratio == 1.0 else _signed(item.ratio)}",
        )
        for item in explanation.compared
    ]
    categories = [Category(name=name, color=color) for name, color in _COMPARED.items()]
    whole = 1.02 * max(item.amount for item in explanation.compared)
    texts = {item.amount: item.text for item in explanation.compared}
    return Section(
        id="comparison",
        heading="Against other plans",
        intro=f"{explanation.counted.capitalize()}; shorter is better.",
        body=bars_html(bars, categories, whole=whole, text=texts.__getitem__, legend=False)
        + _facts([(item.name, item.detail) for item in explanation.compared if item.detail])
        + _list(explanation.missing, "missing")
        + _paragraphs(explanation.bound, explanation.runner_up),
    )


def _throughput(explanation: Explanation) -> Section:
    colors = {item.pool: f"series-{1 + i % 8}" for i, item in enumerate(explanation.alone, start=1)}
    together = sum(item.tokens_per_second for item in explanation.alone)
    efficiency = explanation.mixed_efficiency_pct
    share = "" if efficiency is None else f" · {efficiency:.1f} %"
    bars = [
        Bar(
            label="all pools in one job",
            parts={"one job": explanation.tokens_per_second},
            note=f"{_speed(explanation.tokens_per_second)}{share}",
        ),
        Bar(
            label="sum of the pools alone",
            parts={f"{item.pool} alone": item.tokens_per_second for item in explanation.alone},
            note=_speed(together),
        ),
        *(
            Bar(
                label=f"{item.pool} alone",
                aside="" if item.fits else "memory unlimited",
                detail=item.detail,
                parts={f"{item.pool} alone": item.tokens_per_second},
                note=_speed(item.tokens_per_second),
            )
            for item in explanation.alone
        ),
    ]
    categories = [Category(name="one job", color="series-1")]
    categories += [Category(name=f"{pool} alone", color=color) for pool, color in colors.items()]
    return Section(
        id="throughput",
        heading="Mixed-chip efficiency",
        intro="Tokens per second of the mixed job against what the pools do by themselves, each "
        "with its share of the batch; longer is better.",
        body=bars_html(
            bars,
            categories,
            whole=1.02 * max(together, explanation.tokens_per_second),
            text=_speed,
            legend=False,
        )
        + _facts([(f"{item.pool} alone", item.detail) for item in explanation.alone]),
    )


# --- stages and pools --------------------------------------------------------------------------


def _stages(explanation: Explanation, result: SearchResult) -> Section:
    colors = stage_colors(result.best.plan)
    several = len(result.best.plan.pipelines) > 1
    optional = [
        (name, attribute)
        for name, attribute in (
            ("Experts", "experts"),
            ("Recomputed", "recompute"),
            ("On the host", "offload"),
        )
        if any(getattr(row, attribute) for row in explanation.stages)
    ]
    columns = [
        Column("Stage"),
        Column("Pool", kind="whole"),
        Column("Chips", figures=True),
        Column("dp × each", detail="equal replicas, and how one is spread", kind="list"),
        Column("Units", kind="list"),
        Column("Batch", detail="replicas × sequences of each micro-batch", kind="list"),
        *(Column(name, kind="list") for name, _ in optional),
        Column("Micro-batch", figures=True, detail="compute from forward to weight gradient"),
        Column("Idle", detail="share of the step in which the chips compute nothing"),
        Column("Memory", detail="peak of one chip against what it has"),
    ]
    rows = []
    for index, row in enumerate(explanation.stages):
        cells = [
            Html(
                f'<i class="stage" style="{colors[row.pipeline, row.stage].style}"></i>'
                f"{escape(_stage_name(row, explanation.stages, several))}"
            ),
            row.pool,
            f"{row.num_chips:,}",
            f"{row.dp:,} × {row.degrees}",
            f"{row.units} ({row.num_units})",
            f"{row.dp:,} × {row.sequences:,} = {100 * row.batch_share:.3g} %",
            *(getattr(row, attribute) or "–" for _, attribute in optional),
            seconds_text(row.micro_batch_seconds),
            meter_html(row.idle_share, f"{100 * row.idle_share:.1f} %", color="series-8"),
            _memory_meter(row),
        ]
        rows.append(Row(cells, strong=index == explanation.bottleneck.row))
    return Section(
        id="stages",
        heading="Stages",
        intro=explanation.bottleneck.sentence,
        body=table_html(columns, rows),
    )


def _stage_name(row: StageRow, rows: Sequence[StageRow], several: bool) -> str:
    """Return "stage 3", as the map calls it; several pipelines make it "stage 1.3"."""
    name = f"stage {row.pipeline}.{row.stage}" if several else f"stage {row.stage}"
    place = (row.pipeline, row.stage)
    mixed = sum((other.pipeline, other.stage) == place for other in rows) > 1
    return f"{name} · replica {row.replica}" if mixed else name


def _memory_meter(row: StageRow) -> Html:
    used, limit = bytes_text(row.memory_bytes), bytes_text(row.limit_bytes)
    if used.split()[1] == limit.split()[1]:
        used = used.split()[0]  # the unit once: 12.9 of 96.0 GiB
    text = f"{used} of {limit}"
    return meter_html(row.memory_share, text, color="series-1", alarm=row.memory_share > 1)


def _pools(explanation: Explanation) -> Section:
    columns = [
        Column("Pool"), Column("Chips", figures=True), Column("Without work", figures=True),
        Column("Peak", figures=True, detail="share of the cluster's peak FLOP/s"),
        Column("Work", figures=True, detail="share of the model FLOPs of a step"),
        Column("Idle"), Column("Of which", kind="prose"), Column("Predicted by", kind="prose"),
    ]  # fmt: skip
    return Section(
        id="pools",
        heading="Pools",
        intro="How well each pool is used, and what the prediction of its times rests on.",
        body=table_html(columns, [_pool_row(row) for row in explanation.pools]),
    )


def _pool_row(row: PoolRow) -> Row:
    reasons = ", ".join(
        f"{reason} {100 * share:.1f} %" for reason, share in row.idle.items() if share >= 0.0005
    )
    label = '<em class="nominal">nominal</em> ' if row.nominal else ""
    spare = f" + {row.spare_chips:,} spare" if row.spare_chips else ""
    return Row(
        [
            f"{row.pool} ({row.chip})",
            f"{row.num_chips:,}",
            f"{row.unused_chips:,}{spare}",
            f"{100 * row.peak_share:.1f} %",
            f"{100 * row.work_share:.1f} %",
            meter_html(row.idle_share, f"{100 * row.idle_share:.1f} %", color="series-8"),
            Html(_prose(reasons or "–")),
            Html(label + escape(row.basis)),
        ]
    )


# --- the step ----------------------------------------------------------------------------------


def _step(estimate: Estimate, explanation: Explanation, arrays: Pack) -> list[Section]:
    """Return timeline, memory and where the time goes, in the parts of a simulated step."""
    result, labels = estimate.result, estimate.labels
    shown = _shown_classes(result.program.size, result.num_classes, explanation.bottleneck.row)
    gantt = gantt_section(result, labels, arrays, shown=shown)
    if shown is not None:
        intro = f"{gantt.intro} {len(shown):,} of {result.num_classes:,} classes are drawn."
        gantt = dataclasses.replace(gantt, intro=intro)
    sections = [gantt, memory_section(result, labels, arrays), memory_bars_section(estimate.memory)]
    if result.num_classes <= MOST_ROWS:
        sections.append(breakdown_section(result, labels))
    warnings = notes_html(result.warnings(labels))
    if warnings:
        sections[0] = dataclasses.replace(gantt, body=warnings + gantt.body)
    return sections


def _shown_classes(size: int, num_classes: int, bottleneck: int) -> list[int] | None:
    """Return the classes whose instructions are drawn, spread evenly; None where all fit."""
    if size <= MOST_INSTRUCTIONS:
        return None
    count = max(1, num_classes * MOST_INSTRUCTIONS // size - 1)
    spread = np.linspace(0, num_classes - 1, count).round().astype(int).tolist()
    return sorted({*spread, bottleneck})


# --- the search --------------------------------------------------------------------------------


def _search(explanation: Explanation) -> Section:
    counted = f" {explanation.work[0].upper()}{explanation.work[1:]}." if explanation.work else ""
    cost = f"The search took {explanation.search_cpu_seconds:.3g} s of CPU time.{counted}"
    if explanation.pruned:
        body = (
            _paragraphs("The time of these strategies was never predicted one by one:")
            + _list(explanation.pruned, "plain")
            + _paragraphs(cost)
        )
    else:
        body = _paragraphs("Nothing was pruned.", cost)
    return Section(id="search", heading="The search", body=body)


# --- small pieces ------------------------------------------------------------------------------


def _prose(text: str) -> str:
    """Return sentences as HTML in which no percent sign begins a line."""
    return escape(text).replace(" %", "\u00a0%")


def _paragraphs(*texts: str) -> str:
    return "".join(f"<p>{_prose(text)}</p>" for text in texts if text)


def _list(lines: Sequence[str], kind: str) -> str:
    items = "".join(f"<li>{_prose(line)}</li>" for line in lines)
    return f'<ul class="{kind}">{items}</ul>' if lines else ""


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts)
    return f'<dl class="facts">{rows}</dl>' if facts else ""


def _signed(ratio: float) -> str:
    return f" · {100 * (ratio - 1):+.1f} %".replace("-", "−")


def _speed(value: float) -> str:
    return f"{count_text(value)} tok/s"
