"""`tutti bench fabric failover`: what a broken link or NIC costs a running job."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from tutti.cli.shared.output import Json, print_json, print_rich


def failover(
    times: Annotated[int, typer.Argument(help="How often each kind of fault.", min=1)] = 20,
    json: Json = False,
) -> None:
    """Break links and NICs under running jobs on the beds: how long does a job stop (root)."""
    from tutti.cli.shared.torch_needed import require_torch

    require_torch("bench fabric failover")
    from rich import box
    from rich.table import Table

    from tutti.bench.beds.comm_failover import ALLOWED_S, KINDS, run_failovers

    runs = list(run_failovers(times))
    if json:
        print_json({"runs": [asdict(one) | {"passed": one.passed} for one in runs]})
        return
    table = Table(box=box.SIMPLE, title="Broken under a running job")
    for name in ("fault", f"on within {ALLOWED_S:g} s", "same bits", "median", "longest"):
        table.add_column(name, justify="left" if name == "fault" else "right")
    for kind in KINDS:
        own = [one for one in runs if one.kind == kind]
        stalls = sorted(one.stall_s for one in own)
        table.add_row(
            kind,
            f"{sum(one.passed for one in own)} of {len(own)}",
            f"{sum(one.same_bits for one in own)} of {len(own)}",
            f"{stalls[len(stalls) // 2]:.2f} s",
            f"{stalls[-1]:.2f} s",
        )
    print_rich(table)
    for one in runs:
        if not one.passed:
            typer.echo(f"{one.kind} of {one.where}: {one.stall_s:.2f} s")
