"""`tutti comm explain`: which collective program would run on a cluster, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.units import many

if TYPE_CHECKING:
    from tutti.cost.network.group_links import GroupLinks
    from tutti.cost.network.programs import Choice

app = typer.Typer(help="Collectives across unlike chips.", no_args_is_help=True)


@app.callback()
def comm() -> None:
    """Collectives across unlike chips."""


@app.command()
def explain(
    cluster: Annotated[str, typer.Argument(help="A cluster file, or the name of an example.")],
    op: Annotated[str, typer.Option(help="The operation.")] = "all_reduce",
    size: Annotated[str, typer.Option("--bytes", help="Of the whole buffer: 64M, 1G.")] = "64M",
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Only the first nodes of each pool.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="A Profile with measured programs (bench comm --tune).")
    ] = None,
    json: Json = False,
) -> None:
    """Say which program the cost model chooses for a collective, and the predicted time of all."""
    from tutti.cli.bench.comm import parse_sizes
    from tutti.collective import Operation
    from tutti.cost.network.group_links import group_links
    from tutti.cost.network.programs import Efficiency, choose_program
    from tutti.cost.network.tuned_programs import Tuned
    from tutti.errors import InputError, hint
    from tutti.hardware.cluster import Cluster
    from tutti.hardware.profile import Profile
    from tutti.hardware.topology import Position

    if op not in {o.value for o in Operation}:
        raise InputError(f"--op: '{op}'; {hint(op, [o.value for o in Operation])}")
    (num_bytes,) = parse_sizes(size, "--bytes")[:1]
    known = Cluster.load(cluster)
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
