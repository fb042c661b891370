"""`tutti fleet mix`: on which pools, or mixes of them, each job should train."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.fleet.jobs_of_models import MixFile, asked_mixes
from tutti.cli.fleet.place import node_numbers
from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.errors import InputError, hint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tutti.fleet.mix_values import Mix, Worth
    from tutti.fleet.model_jobs import ModelJob

_COUNTS = ("even", "tokens")


def mix(
    jobs: Annotated[Path, typer.Argument(help="Jobs (CSV): job, model, tokens, …")],
    cluster: Annotated[str, typer.Argument(help="A cluster file, or the name of an example.")],
    mixes: MixFile = None,
    gone: Annotated[
        list[str] | None,
        typer.Option("--without", help="Nodes that are taken or down.", metavar="NODES"),
    ] = None,
    count: Annotated[
        str,
        typer.Option(help="What is largest: even (each job's speed over its best), or tokens."),
    ] = "even",
    json: Json = False,
) -> None:
    """Say on which pools, or mixes of two, each of some jobs should train so that most is done.

    The planner is asked how fast each model trains on every mix; beside the answer stands the best
    one with a single pool for each job.
    """
    from tutti.fleet.chips import Grounds
    from tutti.fleet.mix_values import shared_out
    from tutti.fleet.traces.trace import read_trace
    from tutti.hardware.cluster import Cluster

    if count not in _COUNTS:
        raise InputError(f"--count: '{count}'; {hint(count, _COUNTS)}")
    trace = read_trace(jobs)
    training = {row.job: row.training for row in trace.rows if row.training is not None}
    if len(training) < len(trace.rows):
        raise InputError(
            f"{jobs.name}: has no models; write the columns job, model and tokens, so that the "
            "planner can be asked"
        )
    grounds = Grounds.of(Cluster.load(cluster))
    nodes = {pool.name: pool.nodes for pool in grounds.cluster.pools}
    for node in node_numbers(grounds, "--without", gone):
        nodes[grounds.pool_names[grounds.node_pool[node]]] -= 1
    table = asked_mixes(trace, grounds.cluster, mixes, shown=not json)
    worths = {job: table.worths(one) for job, one in training.items()}
    weights = {
        job: 1.0 / own[0].tokens_per_s if count == "even" else 1.0 for job, own in worths.items()
    }
    single = {job: [w for w in own if len(w.mix) == 1] for job, own in worths.items()}
    answers = {
        name: _Answer.of(shared_out(nodes, each, weights), worths, weights)
        for name, each in (("single", single), ("mixed", worths))
    }
    if json:
        print_json({
            "cluster": cluster, "nodes": nodes, "count": count,
            "jobs": [_document(job, one, answers["mixed"]) for job, one in training.items()],
            **{name: answer.totals(count) for name, answer in answers.items()},
        })  # fmt: skip
        return
    _print(training, answers["mixed"])
    _print_totals(answers["mixed"], answers["single"], count, len(training))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """Who trains where, and what that comes to."""

    worths: dict[str, Worth]  # of jobs that run
    total: float  # of what is to be largest

    @classmethod
    def of(
        cls,
        placed: Mapping[str, Mix],
        tables: Mapping[str, Sequence[Worth]],
        weights: Mapping[str, float],
    ) -> _Answer:
        worths = {
            job: next(one for one in tables[job] if one.mix == mix) for job, mix in placed.items()
        }
        total = sum(weights[job] * one.tokens_per_s for job, one in worths.items())
        return cls(worths=worths, total=total)

    @property
    def price_per_hour(self) -> float | None:
        """Of the nodes in use; None where a pool has no price."""
        prices = [one.price_per_hour for one in self.worths.values()]
        known = [price for price in prices if price is not None]
        return sum(known) if len(known) == len(prices) else None

    def totals(self, count: str) -> dict[str, Any]:
        """Return what it comes to."""
        return {
            "jobs_running": len(self.worths), f"total_{count}": self.total,
            "tokens_per_s": sum(one.tokens_per_s for one in self.worths.values()),
            "price_per_hour": self.price_per_hour,
        }  # fmt: skip


def _document(job: str, one: ModelJob, answer: _Answer) -> dict[str, Any]:
    worth = answer.worths.get(job)
    return {
        "job": job, "model": one.model,
        "nodes": None if worth is None else dict(worth.mix),
        "tokens_per_s": None if worth is None else worth.tokens_per_s,
        "seconds": None if worth is None else one.tokens / worth.tokens_per_s,
    }  # fmt: skip


def _print(training: Mapping[str, ModelJob], answer: _Answer) -> None:
    from rich import box
    from rich.table import Table

    from tutti.fleet.model_jobs import mix_text
    from tutti.units import seconds_text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("job", "model", "nodes", "tokens/s", "done in"):
        table.add_column(name, justify="right" if name in ("tokens/s", "done in") else "left")
    for job, one in training.items():
        worth = answer.worths.get(job)
        if worth is None:
            table.add_row(job, one.model, "waits", "–", "–")
            continue
        table.add_row(
            job, one.model, mix_text(worth.mix), f"{worth.tokens_per_s:,.0f}",
            seconds_text(one.tokens / worth.tokens_per_s),
        )  # fmt: skip
    print_rich(table)


def _print_totals(mixed: _Answer, single: _Answer, count: str, jobs: int) -> None:
    form = "{:.2f}" if count == "even" else "{:,.0f} tokens/s"
    gain = f" (mixes {mixed.total / single.total:.3f}×)" if single.total else ""
    price = mixed.price_per_hour
    typer.echo(
        f"{len(mixed.worths)} of {jobs} jobs run, {form.format(mixed.total)} in all; one pool "
        f"each: {len(single.worths)} run, {form.format(single.total)}{gain}"
        + (f"; {price:,.2f} per hour" if price is not None else "")
    )
    if count == "even":
        typer.echo("in all: the sum of each job's speed over its speed on its best mix")
