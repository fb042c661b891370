"""The page of training runs: losses, speed, where each pool's step went, and a comparison.

What a run is comes as plain figures; `observe.history` reads them from a run's folder.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tutti.hardware.chip import LARGEST_OVERRUN
from tutti.report.bars import Bar, Category, bars_html
from tutti.report.curves import Curve, curves_html
from tutti.report.overlay import PART_CATEGORIES
from tutti.report.page import Page, Section
from tutti.report.tables import Column, Row, table_html
from tutti.report.tiles import Tile, notes_html, tiles_html
from tutti.units import bytes_text, count_text, many, seconds_text

_COLORS = tuple(f"series-{n}" for n in range(1, 9))


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFigures:
    """A pool's mean rank in a mean step; `parts` by the names of PART_CATEGORIES."""

    pool: str
    ranks: int
    parts: Mapping[str, float]
    peak_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """One step."""

    step: int
    loss: float
    seconds: float
    tokens_per_s: float
    mfu: float
    reward: float | None = None  # of answers that the model sampled
    margin: float | None = None  # by which chosen answers are ahead of rejected ones


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """What a run's folder says of it."""

    name: str
    model: str
    cluster: str
    num_ranks: int
    uniform: bool  # planned as if all chips were alike
    emulated: bool
    overrun: float  # the largest of all steps and pools
    predicted_s: float | None
    steps: Sequence[StepFigures]
    validation: Sequence[tuple[int, float]]
    pools: Sequence[PoolFigures]

    @property
    def steady(self) -> Sequence[StepFigures]:
        """The steps that speak for the run's speed: all but the first, which warms up."""
        return self.steps[1:] or self.steps

    @property
    def seconds(self) -> float:
        """Of the median step."""
        return statistics.median(step.seconds for step in self.steady)

    @property
    def tokens_per_s(self) -> float:
        """Of the median step."""
        return statistics.median(step.tokens_per_s for step in self.steady)

    @property
    def mfu(self) -> float:
        """Of the median step."""
        return statistics.median(step.mfu for step in self.steady)

    def loss_at(self, step: int) -> float:
        """Return the loss of a step that the run has."""
        return next(record.loss for record in self.steps if record.step == step)

    @property
    def learns_rewards(self) -> bool:
        """Whether it samples answers: then a validation is minus their mean reward."""
        return any(step.reward is not None for step in self.steps)

    @property
    def counts(self) -> bool:
        """Whether the host kept up with what it emulates."""
        return self.overrun <= LARGEST_OVERRUN


def baseline_of(runs: Sequence[RunFigures]) -> RunFigures:
    """Return what other runs are compared with: the only uniform one, or else the last."""
    uniform = [run for run in runs if run.uniform]
    return uniform[0] if len(uniform) == 1 else runs[-1]


def shared_step(runs: Sequence[RunFigures]) -> int | None:
    """Return the last step that all runs have, where some go on after it: losses compare there."""
    lasts = {run.steps[-1].step for run in runs}
    common = set.intersection(*({step.step for step in run.steps} for run in runs))
    return max(common) if len(lasts) > 1 and common else None


def write_training_page(path: Path, runs: Sequence[RunFigures]) -> None:
    """Write the page of some runs."""
    training_page(runs).write(path)


def training_page(runs: Sequence[RunFigures]) -> Page:
    """Return the page of one run, or of several beside each other."""
    head = tiles_html(_tiles(runs[0])) if len(runs) == 1 else ""
    sections = [Section(id="summary", heading="", body=head + notes_html(_notes(runs)))]
    if len(runs) > 1:
        sections.append(_comparison(runs))
    sections += [_curves(runs), _predictions(runs)]
    if any(run.pools for run in runs):
        sections.append(_parts(runs))
    models = ", ".join(dict.fromkeys(run.model for run in runs))
    clusters = ", ".join(dict.fromkeys(run.cluster for run in runs))
    emulated = " · emulated chips" if any(run.emulated for run in runs) else ""
    what = "A training run" if len(runs) == 1 else f"{len(runs)} training runs"
    return Page(
        title=f"{models} on {clusters}",
        subtitle=f"{what}: {', '.join(run.name for run in runs)}{emulated}",
        sections=tuple(sections),
        footer="Made by tutti. This file is complete in itself; it works offline.",
    )


def _notes(runs: Sequence[RunFigures]) -> list[str]:
    return [
        f"{run.name}: the host fell behind the emulated chips by {run.overrun:.1%}, more than "
        f"{LARGEST_OVERRUN:.0%}: its times do not count"
        for run in runs
        if run.emulated and not run.counts
    ]


def _tiles(run: RunFigures) -> list[Tile]:
    last = run.steps[-1]
    said = "emulated" if run.emulated else many(run.num_ranks, "rank")
    first = _four(run.steps[0].loss)
    tiles = [
        Tile("Loss", _four(last.loss), f"step {last.step:,}; first {first}"),
        Tile("Throughput", count_text(run.tokens_per_s), f"tokens per second; {said}"),
        Tile("MFU", f"{100 * run.mfu:.1f} %", "of all chips' dense peak"),
        Tile("Step", seconds_text(run.seconds), _predicted(run)),
    ]
    if run.validation:
        what = "Held-out reward" if run.learns_rewards else "Validation loss"
        tiles.insert(1, Tile(what, _held_out(run), f"at step {run.validation[-1][0]:,}"))
    if run.emulated:
        limit = f"host behind the emulated chips; times count up to {100 * LARGEST_OVERRUN:.0f} %"
        overrun = f"{100 * run.overrun:.1f} %"
        tiles.append(Tile("Overrun", overrun, limit, alarm=not run.counts))
    return tiles


def _held_out(run: RunFigures) -> str:
    """Return what the last validation says: a loss, or the reward of held-out prompts."""
    if not run.validation:
        return "–"
    value = run.validation[-1][1]
    return _four(-value if run.learns_rewards else value)


def _four(value: float) -> str:
    """Return four decimals, and no minus before a zero."""
    return f"{round(value, 4) + 0.0:.4f}"


def _predicted(run: RunFigures) -> str:
    if run.predicted_s is None:
        return "median, without the first"
    error = run.predicted_s / run.seconds - 1.0
    return f"median; predicted {seconds_text(run.predicted_s)} ({_signed(error)})"


def _comparison(runs: Sequence[RunFigures]) -> Section:
    base = baseline_of(runs)
    bars = [
        Bar(
            label=run.name,
            aside=" · ".join(word for word in _kind(run) if word != run.name),
            parts={"tokens/s": run.tokens_per_s},
            note=f"{count_text(run.tokens_per_s)} tok/s · "
            f"{run.tokens_per_s / base.tokens_per_s:.2f} ×",
            alarm=run.emulated and not run.counts,
        )
        for run in runs
    ]
    return Section(
        id="comparison",
        heading="Throughput",
        intro=f"Tokens per second of the median step, and how many times those of {base.name}.",
        body=bars_html(
            bars,
            [Category(name="tokens/s", color="forward")],
            whole=max(run.tokens_per_s for run in runs),
            text=count_text,
            legend=False,
        ),
    )


def _kind(run: RunFigures) -> list[str]:
    return ["uniform" if run.uniform else "planned", *(["emulated"] if run.emulated else [])]


def _curves(runs: Sequence[RunFigures]) -> Section:
    colors = [_COLORS[i % len(_COLORS)] for i in range(len(runs))]
    pairs = list(zip(runs, colors, strict=True))

    def curve(run: RunFigures, color: str, figure: str) -> Curve:
        points = [(float(s.step), float(getattr(s, figure))) for s in run.steps]
        return Curve(name=run.name, color=color, points=points)

    losses = [curve(run, color, "loss") for run, color in pairs]
    losses += [
        _dashed(f"{run.name}, validation", color, run.validation)
        for run, color in pairs
        if run.validation and not run.learns_rewards
    ]
    speeds = [curve(run, color, "tokens_per_s") for run, color in pairs]
    shares = [curve(run, color, "mfu") for run, color in pairs]
    figures = (
        curves_html("Loss", losses, text=lambda v: f"{v:.4f}"),
        curves_html("Tokens per second", speeds, text=_count, ticks=_count, from_zero=True),
        curves_html("MFU", shares, text=_percent, ticks=_percent, from_zero=True),
        *_answer_curves(pairs),
    )
    return Section(
        id="curves",
        heading="Over the steps",
        body=f'<div class="curves">{"".join(figures)}</div>',
    )


def _dashed(name: str, color: str, points: Iterable[tuple[int, float]]) -> Curve:
    return Curve(name=name, color=color, points=[(float(s), v) for s, v in points], dashed=True)


def _answer_curves(pairs: Sequence[tuple[RunFigures, str]]) -> Iterator[str]:
    """Yield what runs learn from answers: rewards of sampled ones, margins of chosen ones."""
    titles = {"Reward of sampled answers": "reward", "Margin of chosen answers": "margin"}
    for title, figure in titles.items():
        curves = [
            Curve(
                name=run.name,
                color=color,
                points=[
                    (float(s.step), value)
                    for s in run.steps
                    if (value := getattr(s, figure)) is not None
                ],
            )
            for run, color in pairs
        ]
        known = [curve for curve in curves if curve.points]
        if figure == "reward":
            known += [
                _dashed(f"{run.name}, held out", color, ((s, -v) for s, v in run.validation))
                for run, color in pairs
                if run.validation and run.learns_rewards
            ]
        if known:
            yield curves_html(title, known, text=lambda v: f"{v:.3f}")


def _count(value: float) -> str:
    return count_text(value) if value else "0"


def _signed(share: float) -> str:
    return f"{100 * share:+.1f} %".replace("-", "−")


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _predictions(runs: Sequence[RunFigures]) -> Section:
    shared = shared_step(runs)
    columns = (
        Column("run", kind="whole"),
        Column("plan", kind="list"),
        Column("ranks", figures=True),
        Column("steps", figures=True),
        Column("step, measured", figures=True, detail="median, without the first"),
        Column("step, predicted", figures=True),
        Column("error", figures=True, detail="predicted ÷ measured − 1"),
        Column("tokens/s", figures=True),
        Column("MFU", figures=True),
        Column("loss", figures=True, detail="of the last step"),
        *([Column(f"loss, step {shared:,}", figures=True)] if shared is not None else []),
        Column("validation", figures=True, detail="a loss; of runs that learn rewards, the reward"),
        Column("overrun", figures=True, detail="how far the host fell behind emulated chips"),
    )
    rows = []
    for run in runs:
        predicted = run.predicted_s
        rows.append(
            Row(
                cells=(
                    run.name,
                    " · ".join(_kind(run)),
                    f"{run.num_ranks:,}",
                    f"{run.steps[-1].step:,}",
                    seconds_text(run.seconds),
                    "–" if predicted is None else seconds_text(predicted),
                    "–" if predicted is None else _signed(predicted / run.seconds - 1),
                    count_text(run.tokens_per_s),
                    f"{100 * run.mfu:.1f} %",
                    _four(run.steps[-1].loss),
                    *([f"{run.loss_at(shared):.4f}"] if shared is not None else []),
                    _held_out(run),
                    f"{100 * run.overrun:.1f} %" if run.emulated else "–",
                )
            )
        )
    return Section(id="predicted", heading="Predicted and measured", body=table_html(columns, rows))


def _parts(runs: Sequence[RunFigures]) -> Section:
    bars = [
        Bar(
            label=pool.pool if len(runs) == 1 else f"{run.name} · {pool.pool}",
            aside=many(pool.ranks, "rank")
            + (f" · peak {bytes_text(pool.peak_bytes)} per chip" if pool.peak_bytes else ""),
            parts=pool.parts,
            note=seconds_text(sum(pool.parts.values())),
        )
        for run in runs
        for pool in run.pools
    ]
    whole = max((sum(bar.parts.values()) for bar in bars), default=math.nan)
    return Section(
        id="pools",
        heading="Where the step goes",
        intro="The mean rank of each pool in a mean step (the table above has the median one): "
        "computing, and waiting for the network itself (of each wait at most what was predicted "
        "for the transfer), for other ranks (bubble: the rest of such waits), for copies and data.",
        body=bars_html(bars, PART_CATEGORIES, whole=whole, text=seconds_text),
    )
