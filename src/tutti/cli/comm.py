"""`tutti comm explain`: which collective program would run on a cluster, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.units import many

if TYPE_CHECKING:
    from tutti.cost.network.group_links import GroupLinks
    from tutti.cost.network.program_choice import Choice

app = typer.Typer(help="Collectives across unlike chips.", no_args_is_help=True)


@app.callback()
def comm() -> None:
    """Collectives across unlike chips."""


Where = Annotated[
    str,
    typer.Argument(help="A plan, a cluster file, or the name of an example.", metavar="WHERE"),
]
Op = Annotated[
    str | None, typer.Option(help="The operation; by default all_reduce, of a plan all.")
]
Size = Annotated[
    str | None, typer.Option("--bytes", help="Of the whole buffer: 64M (default), 1G.")
]
Nodes = Annotated[int | None, typer.Option(min=1, help="Only the first nodes of each pool.")]
ProfileOption = Annotated[
    Path | None, typer.Option(help="A Profile with measured programs (bench comm --tune).")
]
Trace = Annotated[Path | None, typer.Option(help="Of a plan: a trace of a run, to see what ran.")]


@app.command()
def explain(
    where: Where,
    op: Op = None,
    size: Size = None,
    nodes: Nodes = None,
    profile: ProfileOption = None,
    trace: Trace = None,
    json: Json = False,
) -> None:
    """Say which collective programs run, and the predicted time of all that could.

    Of a plan: the collectives of its step, as the plan records them. Of a cluster: what the cost
    model chooses for one operation among all its chips.
    """
    from tutti.cli.bench.comm import parse_sizes
    from tutti.cli.comm_plan import explain_plan, is_plan
    from tutti.collective import Operation
    from tutti.cost.network.group_links import group_links
    from tutti.cost.network.program_choice import Efficiency, choose_program
    from tutti.cost.network.tuned_programs import Tuned
    from tutti.errors import InputError, hint
    from tutti.hardware.cluster import Cluster
    from tutti.hardware.profile import Profile
    from tutti.hardware.topology import Position

    if op is not None and op not in {o.value for o in Operation}:
        raise InputError(f"--op: '{op}'; {hint(op, [o.value for o in Operation])}")
    if is_plan(Path(where)):
        if size is not None or nodes is not None or profile is not None:
            raise InputError("--bytes, --nodes, --profile: go with a cluster; a plan has its own")
        explain_plan(Path(where), op, trace, json=json)
        return
    if trace is not None:
        raise InputError("--trace: goes with a plan; name the plan.json beside it")
    op = op or "all_reduce"
    (num_bytes,) = parse_sizes(size or "64M", "--bytes")[:1]
    known = Cluster.load(where)
    most = max(pool.nodes for pool in known.pools)
    if nodes is not None and nodes > most:
        raise InputError(
            f"--nodes: {nodes} is more than {known.name} has; its largest pool has "
            f"{many(most, 'node')}"
        )
    chips = [
        Position(pool.name, node, slot)
        for pool in known.pools
        for node in range(min(pool.nodes, nodes or pool.nodes))
        for slot in range(pool.node.num_chips)
    ]
    links = group_links(known, chips)
    tuned = None if profile is None else Tuned(Profile.load(profile).collectives)
    choice = choose_program(Operation(op), float(num_bytes), links, Efficiency(), tuned=tuned)
    if json:
        print_json(_plain(op, num_bytes, links, choice))
    else:
        _print(op, num_bytes, links, choice)


def _plain(op: str, num_bytes: int, links: GroupLinks, choice: Choice) -> dict[str, Any]:
    return {
        "operation": op,
        "bytes": num_bytes,
        "ranks": links.group.size,
        "islands": [island.size for island in links.group.islands],
        "edges": {
            edge.value: {
                "latency_s": wire.latency_s,
                "bandwidth": wire.bandwidth,
                "host_forwarded": wire.host_forwarded,
            }
            for edge, wire in links.wires
        },
        "chosen": {
            "algorithm": choice.algorithm,
            "chunks": choice.chunks,
            "seconds": choice.seconds,
        },
        "candidates": [
            {"algorithm": name, "chunks": chunks, "seconds": seconds}
            for name, chunks, seconds in choice.alternatives
        ],
    }


def _print(op: str, num_bytes: int, links: GroupLinks, choice: Choice) -> None:
    from rich import box
    from rich.table import Table

    group = links.group
    typer.echo(
        f"{op} of {num_bytes:,} bytes among {many(group.size, 'rank')} in "
        f"{many(len(group.islands), 'island')}: {choice.algorithm} in "
        f"{many(choice.chunks, 'chunk')}, {choice.seconds * 1e3:.3f} ms"
    )
    for edge, wire in links.wires:
        way = ", through host memory" if wire.host_forwarded else ""
        typer.echo(
            f"  {edge.value}: {wire.latency_s * 1e6:.1f} µs, {wire.bandwidth / 1e9:.2f} GB/s "
            f"per rank when all talk{way}"
        )
    table = Table(box=box.SIMPLE)
    table.add_column("program")
    for name in ("chunks", "ms", "× chosen"):
        table.add_column(name, justify="right")
    for name, chunks, seconds in choice.alternatives:
        table.add_row(name, str(chunks), f"{seconds * 1e3:.3f}", f"{seconds / choice.seconds:.2f}")
    print_rich(table)
