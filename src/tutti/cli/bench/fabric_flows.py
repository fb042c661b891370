"""`tutti bench fabric flows`: TCP flows on a bed of leaves and spines against the flow model."""

from __future__ import annotations

from typing import Annotated

import typer

from tutti.cli.shared.output import Json, print_json, print_rich


def flows(
    sets: Annotated[int, typer.Argument(help="How many random sets of flows.", min=1)] = 20,
    json: Json = False,
) -> None:
    """Run sets of TCP flows on a bed of namespaces: does each get what the flow model says (root).

    The bed has 9 hosts, 3 leaves and 4 spines; each set has 1 to 4 connections per pair of hosts on
    different leaves.
    """
    from statistics import fmean

    from rich import box
    from rich.table import Table

    from tutti.bench.beds.bed_flows import random_set, run_set
    from tutti.bench.beds.clos_bed import ClosBed, ClosSpec

    bed = ClosBed(ClosSpec())
    try:
        results = [run_set(bed, random_set(bed, seed)) for seed in range(sets)]
    finally:
        bed.close()
    mean = fmean(one.mean_error for one in results)
    slowest = fmean(one.slowest_error for one in results)
    if json:
        rows = [
            {"set": seed, "connections": len(one.connections), "mean_error": one.mean_error,
             "slowest_error": one.slowest_error, "predicted": one.predicted.tolist(),
             "measured": one.measured.tolist()}
            for seed, one in enumerate(results)
        ]  # fmt: skip
        print_json({"rows": rows, "mean_error": mean, "slowest_error": slowest})
        return
    table = Table(box=box.SIMPLE, title="TCP flows of 9 hosts on 3 leaves and 4 spines")
    for name in ("set", "connections", "error, mean", "of the slowest"):
        table.add_column(name, justify="right")
    for seed, one in enumerate(results):
        table.add_row(str(seed), str(len(one.connections)), f"{100 * one.mean_error:.1f} %",
                      f"{100 * one.slowest_error:.1f} %")  # fmt: skip
    print_rich(table)
    typer.echo(
        f"mean error per connection {100 * mean:.1f} %, of the slowest {100 * slowest:.1f} %"
    )
