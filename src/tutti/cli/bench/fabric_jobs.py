"""`tutti bench fabric jobs`: periods of jobs that share a spine, predicted and measured."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tutti.cli.shared.output import Json, print_json, print_rich

if TYPE_CHECKING:
    from tutti.bench.beds.two_jobs import JobsRun


def jobs(
    pairs: Annotated[int, typer.Argument(help="How many pairs of jobs.", min=1)] = 6,
    first: Annotated[int, typer.Option(help="The first pair's number.", min=0)] = 0,
    one_queue: Annotated[
        bool, typer.Option("--one-queue", help="NICs have one queue for all, as TCP finds them.")
    ] = False,
    json: Json = False,
) -> None:
    """Run pairs of jobs that share a spine of a bed: are their periods as predicted (root).

    Each pair runs alone, begun at once, and with the proposed offset.
    """
    from tutti.cli.shared.torch_needed import require_torch

    require_torch("bench fabric jobs")
    from tutti.bench.beds.two_jobs import ALLOWED, run_pairs

    runs = run_pairs(pairs, first=first, one_queue=one_queue)
    errors = [error for run in runs for error in run.errors]
    within = sum(error <= ALLOWED for error in errors)
    if json:
        print_json({
            "runs": [asdict(run) | {"errors": run.errors} for run in runs],
            "within_15_pct": within, "periods": len(errors), "gains": gains(runs),
        })  # fmt: skip
        return
    _print(runs)
    typer.echo(f"{within} of {len(errors)} periods within {100 * ALLOWED:.0f} %")
    for case, (predicted, measured) in gains(runs).items():
        share = measured / predicted if predicted > 0 else 0.0
        typer.echo(
            f"pair {case}: the offset saves {100 * measured:.1f} % of a period, "
            f"{100 * predicted:.1f} predicted ({100 * share:.0f} % of it)"
        )


def gains(runs: list[JobsRun]) -> dict[int, tuple[float, float]]:
    """Return, per pair, what the offset saves of the periods: predicted, measured."""
    gained = {}
    for case in sorted({run.case for run in runs}):
        by_way = {run.way: run for run in runs if run.case == case}
        before, after = by_way["together"], by_way["offset"]
        gained[case] = tuple(
            sum(1.0 - a / b for b, a in zip(old, new, strict=True)) / len(old)
            for old, new in (
                (before.predicted, after.predicted), (before.measured, after.measured),
            )
        )  # fmt: skip
    return gained  # type: ignore[return-value]


def _print(runs: list[JobsRun]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, title="Two jobs, two leaves, one spine: seconds per step")
    for name in ("pair", "way", "predicted", "measured", "error"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for run in runs:
        table.add_row(
            str(run.case), run.way, " · ".join(f"{one:.3f}" for one in run.predicted),
            " · ".join(f"{one:.3f}" for one in run.measured),
            " · ".join(f"{100 * one:.1f} %" for one in run.errors),
        )  # fmt: skip
    print_rich(table)
