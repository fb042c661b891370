"""`tutti bench fabric`: networks against what is said of them, one verb per question."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from tutti.cli.bench.fabric_failover import failover
from tutti.cli.bench.fabric_flows import flows
from tutti.cli.bench.fabric_jobs import jobs
from tutti.cli.bench.fabric_model import grains, published, scale
from tutti.cli.bench.fabric_probes import faults, healthy
from tutti.cli.bench.fabric_queues import queues
from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.errors import InputError, hint

_ROWS = 20  # in the table; --json has all
app = typer.Typer(
    help="Prices, flows, probes and detectors against a replay, a bed or a model.",
    no_args_is_help=True,
)


@app.callback()
def _group() -> None:
    """Prices, flows, probes and detectors against a replay, a bed (Linux, root) or a model."""


@app.command()
def prices(
    clusters: Annotated[
        list[str] | None, typer.Argument(help="Example clusters or cluster files; none: all.")
    ] = None,
    op: Annotated[
        list[str] | None, typer.Option(help="all_reduce, reduce_scatter, all_gather or all_to_all.")
    ] = None,
    json: Json = False,
) -> None:
    """Replay collective programs flow by flow: were prices right, and choices the best ones."""
    from tutti.bench.fabric.fabric_prices import ALLOWED, OPERATIONS, price_rows, price_table
    from tutti.hardware.cluster import Cluster
    from tutti.hardware.library import shipped_cluster_names

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


app.command()(failover)
app.command()(faults)
app.command()(flows)
app.command()(grains)
app.command()(healthy)
app.command()(jobs)
app.command()(published)
app.command()(queues)
app.command()(scale)
