"""`tutti bench fabric faults`, `healthy`: what probes on the Clos bed name, and when."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.errors import InputError, hint

if TYPE_CHECKING:
    from tutti.bench.beds.bed_faults import FaultRun, HealthyRun

_SHARE_S = 20.0


def faults(
    times: Annotated[int, typer.Argument(help="How often each kind of fault.", min=1)] = 20,
    kind: Annotated[
        list[str] | None, typer.Option(help="cut, blackhole, slow or loss; none: all.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the first fault of each kind.", min=0)] = 0,
    json: Json = False,
) -> None:
    """Break links of the bed, one after another: when do its hosts' probes name them (root).

    Links are cut, made a black hole one way, given a quarter of their rate, and made to lose one
    packet in 32.
    """
    from tutti.bench.beds.bed_faults import LIMITS_S

    for name in kind or ():
        if name not in LIMITS_S:
            raise InputError(f"--kind '{name}': {hint(name, LIMITS_S)}")
    drawn = [(name, seed + i) for name in kind or LIMITS_S for i in range(times)]
    _run(drawn, None, as_json=json)


def healthy(
    seconds: Annotated[float, typer.Argument(help="How long.", min=1)] = 600,
    stop: Annotated[int, typer.Option(help="The host that is stopped.", min=0, max=8)] = 4,
    json: Json = False,
) -> None:
    """Probe the bed without a fault, under load, a host stopped for a third: who is accused (root).

    TCP flows fill links meanwhile.
    """
    _run([], (seconds, stop), as_json=json)


def _run(drawn: list[tuple[str, int]], healthy: tuple[float, int] | None, *, as_json: bool) -> None:
    """Break links of the bed one after another, or leave it alone for a while."""
    from tutti.bench.beds.bed_faults import ProbedBed
    from tutti.bench.beds.clos_bed import ClosSpec

    bed = ProbedBed(ClosSpec())
    try:
        runs = [bed.run_fault(kind, seed) for kind, seed in drawn]
        quiet = None if healthy is None else bed.run_healthy(*healthy)
        shares = bed.processor_shares(_SHARE_S)
    finally:
        bed.close()
    if as_json:
        print_json({
            "faults": [asdict(one) | {"found": one.found} for one in runs],
            "healthy": None if quiet is None else asdict(quiet), "agent_cores": shares,
        })  # fmt: skip
        return
    _print(runs, quiet)
    typer.echo(f"agents take {100 * min(shares):.1f} to {100 * max(shares):.1f} % of a core each")


def _print(runs: list[FaultRun], quiet: HealthyRun | None) -> None:
    from rich import box
    from rich.table import Table

    from tutti.bench.beds.bed_faults import LIMITS_S

    table = Table(box=box.SIMPLE, title="Faults of links: 9 hosts, 3 leaves, 4 spines")
    for name in ("fault", "named in time", "within", "median", "slowest"):
        table.add_column(name, justify="left" if name == "fault" else "right")
    for kind, limit in LIMITS_S.items():
        own = [one for one in runs if one.kind == kind]
        took = sorted(one.seconds for one in own if one.seconds is not None)
        if own:
            table.add_row(
                kind, f"{sum(one.found for one in own)} of {len(own)}", f"{limit:g} s",
                f"{took[len(took) // 2]:.1f} s" if took else "–",
                f"{took[-1]:.1f} s" if took else "–",
            )  # fmt: skip
    if runs:
        print_rich(table)
    for one in runs:
        if not one.found:
            said = ", ".join(one.named) or "nobody"
            typer.echo(f"{one.kind} of {' or '.join(one.links)}: {said} was named")
    if quiet is not None:
        accused = ", ".join(quiet.accused) or "nobody"
        stopped = "was told" if quiet.told else "was NOT told"
        typer.echo(
            f"{quiet.seconds:g} s without a fault, under load ({quiet.congested} links with full "
            f"queues): {accused} accused; that {quiet.stopped} stood still {stopped}"
        )
