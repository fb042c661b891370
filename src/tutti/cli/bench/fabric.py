"""`tutti bench fabric`: prices and choices of collective programs against flows on the wiring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated

import typer

from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.errors import InputError, hint

_ROWS = 20  # in the table; --json has all


def fabric(
    clusters: Annotated[
        list[str] | None, typer.Argument(help="Example clusters or cluster files; none: all.")
    ] = None,
    op: Annotated[
        list[str] | None, typer.Option(help="all_reduce, reduce_scatter, all_gather or all_to_all.")
    ] = None,
    flows: Annotated[
        int | None,
        typer.Option(
            help="Run so many random sets of TCP flows on a bed of namespaces instead (root).",
            metavar="N",
        ),
    ] = None,
    faults: Annotated[
        int | None,
        typer.Option(
            help="Break so many links on the bed in each way: when do probes name them (root).",
            metavar="N",
        ),
    ] = None,
    healthy: Annotated[
        float | None,
        typer.Option(
            help="Probe the bed so long, under load, a host stopped: is anybody accused (root).",
            metavar="SECONDS",
        ),
    ] = None,
    queues: Annotated[
        int | None,
        typer.Option(
            help="Draw so many cases of each kind in the queue model: are origins named.",
            metavar="N",
        ),
    ] = None,
    failover: Annotated[
        int | None,
        typer.Option(
            help="Break so many links and NICs under a running job: how long it stops (root).",
            metavar="N",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            help="Run so many pairs of jobs that share a spine: are periods as predicted (root).",
            metavar="N",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Replay collective programs flow by flow: were prices right, and choices the best ones."""
    from tutti.bench.fabric_prices import ALLOWED, OPERATIONS, price_rows, price_table
    from tutti.hardware.cluster import Cluster
    from tutti.hardware.library import shipped_cluster_names

    asked = {
        "flows": flows, "faults": faults, "healthy": healthy, "queues": queues,
        "failover": failover, "jobs": jobs,
    }  # fmt: skip
    numbers = {name: number for name, number in asked.items() if number is not None}
    if numbers:
        if clusters or op:
            raise InputError(
                "bench fabric: a bed has a network of its own; name no cluster and no op"
            )
        _run_others(numbers, as_json=json)
        return
    known = (*OPERATIONS, "all_to_all")
    for name in op or ():
        if name not in known:
            raise InputError(f"--op '{name}': {hint(name, known)}")
    rows = [
        row
        for name in clusters or shipped_cluster_names()
        for row in price_rows(Cluster.load(name), op or OPERATIONS)
    ]
    lost = sum(row.choice_loss > ALLOWED for row in rows)
    off = sum(abs(row.price_error) > ALLOWED for row in rows)
    if json:
        print_json({
            "rows": [
                asdict(row) | {"price_error": row.price_error, "choice_loss": row.choice_loss}
                for row in rows
            ],
            "choices_beyond_10_pct": lost, "prices_beyond_10_pct": off,
        })  # fmt: skip
        return
    print_rich(price_table(rows, _ROWS))
    typer.echo(
        f"{len(rows)} collectives: {lost} choices more than 10 % behind the best replayed program, "
        f"{off} prices more than 10 % off their replay"
    )


def _run_others(numbers: Mapping[str, float], *, as_json: bool) -> None:
    """Run what is no comparison of prices, by its option."""
    for name, number in numbers.items():
        if number < 1:
            raise InputError(f"--{name}: {number}; must be at least 1")
    if "flows" in numbers:
        _run_flows(int(numbers["flows"]), as_json=as_json)
    if "faults" in numbers or "healthy" in numbers:
        from tutti.cli.bench.fabric_probes import run_probes

        run_probes(int(numbers.get("faults", 0)), numbers.get("healthy"), as_json=as_json)
    if "queues" in numbers:
        _run_queues(int(numbers["queues"]), as_json=as_json)
    if "failover" in numbers:
        from tutti.cli.bench.fabric_failover import run_failover

        run_failover(int(numbers["failover"]), as_json=as_json)
    if "jobs" in numbers:
        from tutti.cli.bench.fabric_jobs import run_jobs

        run_jobs(int(numbers["jobs"]), as_json=as_json)


def _run_queues(number: int, *, as_json: bool) -> None:
    """Let the detector of pauses judge drawn cases of the queue model."""
    from tutti.bench.beds.queue_cases import KINDS, run_case

    cases = [run_case(kind, seed) for kind in KINDS for seed in range(number)]
    if as_json:
        print_json({"cases": [asdict(one) | {"right": one.right} for one in cases]})
        return
    for kind in KINDS:
        own = [one for one in cases if one.kind == kind]
        typer.echo(f"{kind}: {sum(one.right for one in own)} of {len(own)} right")
    for one in cases:
        if not one.right:
            said = "; ".join(finding.words() for finding in one.found) or "nothing"
            typer.echo(f"{one.kind} {one.seed} at {', '.join(one.origin)}: {said}")


def _run_flows(number: int, *, as_json: bool) -> None:
    """Hold flows on a bed of three leaves and four spines against the flow model."""
    from statistics import fmean

    from rich import box
    from rich.table import Table

    from tutti.bench.beds.bed_flows import random_set, run_set
    from tutti.bench.beds.clos_bed import ClosBed, ClosSpec

    bed = ClosBed(ClosSpec())
    try:
        sets = [run_set(bed, random_set(bed, seed)) for seed in range(number)]
    finally:
        bed.close()
    mean, slowest = fmean(one.mean_error for one in sets), fmean(o.slowest_error for o in sets)
    if as_json:
        rows = [
            {"set": seed, "connections": len(one.connections), "mean_error": one.mean_error,
             "slowest_error": one.slowest_error, "predicted": one.predicted.tolist(),
             "measured": one.measured.tolist()}
            for seed, one in enumerate(sets)
        ]  # fmt: skip
        print_json({"rows": rows, "mean_error": mean, "slowest_error": slowest})
        return
    table = Table(box=box.SIMPLE, title="TCP flows of 9 hosts on 3 leaves and 4 spines")
    for name in ("set", "connections", "error, mean", "of the slowest"):
        table.add_column(name, justify="right")
    for seed, one in enumerate(sets):
        table.add_row(str(seed), str(len(one.connections)), f"{100 * one.mean_error:.1f} %",
                      f"{100 * one.slowest_error:.1f} %")  # fmt: skip
    print_rich(table)
    typer.echo(
        f"mean error per connection {100 * mean:.1f} %, of the slowest {100 * slowest:.1f} %"
    )
