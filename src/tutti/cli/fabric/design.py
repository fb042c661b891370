"""`tutti fabric design`: leaves, spines and cores for so many chips, with cost and watts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.errors import InputError, hint

if TYPE_CHECKING:
    from tutti.fabric.design import Design
    from tutti.hardware.node import NodeType


def design(
    chips: Annotated[int, typer.Option(help="Chips to join: whole nodes.")],
    node: Annotated[str, typer.Option(help="Node type of the catalog.")] = "HGX-H100",
    nic_rate: Annotated[
        str | None, typer.Option(help="Rate of each NIC, such as '400 Gb/s'; else the node's.")
    ] = None,
    switch: Annotated[str, typer.Option(help="Kind of switch.")] = "51.2T-400G",
    tiers: Annotated[int | None, typer.Option(help="1 to 3; else as few as it takes.")] = None,
    rails: Annotated[
        str, typer.Option(help="optimized, only (rails never meet) or none.")
    ] = "optimized",
    planes: Annotated[int, typer.Option(help="Separate fabrics per NIC; 2 is dual-plane.")] = 1,
    oversubscription: Annotated[
        float, typer.Option(help="Of the leaves, at most; 1 is non-blocking.")
    ] = 1.0,
    routing: Annotated[str, typer.Option(help="What the cluster file says of it.")] = "ecmp",
    connections: Annotated[int, typer.Option(help="Per pair, in the cluster file.")] = 1,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write a cluster file (.yaml or .json)."),
    ] = None,
    json: Json = False,
) -> None:
    """Design a fabric: switches, cables, cost, watts, what failures take away, alternatives."""
    from tutti.fabric.design import RAILS, Wanted, alternatives
    from tutti.fabric.design import design as make
    from tutti.fabric.parts import parts
    from tutti.hardware.fabric import Routing

    if output is not None and output.suffix not in (".yaml", ".yml", ".json"):
        raise InputError(f"-o {output}: a cluster file ends in .yaml or .json")
    kind = next((known for known in RAILS if known == rails), None)
    if kind is None:
        raise InputError(f"--rails '{rails}': {hint(rails, RAILS)}")
    ways = [known.value for known in Routing]
    if routing not in ways:
        raise InputError(f"--routing '{routing}': {hint(routing, ways)}")
    if connections < 1:
        raise InputError(f"--connections: {connections}; must be at least 1")
    wanted = Wanted(
        node=_node(node, nic_rate), chips=chips, switch=parts().switch(switch), tiers=tiers,
        rails=kind, planes=planes, oversubscription=oversubscription,
    )  # fmt: skip
    made, others = make(wanted), alternatives(wanted)
    if output is not None:
        cluster = made.cluster(output.stem, routing=Routing(routing), connections=connections)
        cluster.save(output)
    if json:
        print_json({**_document(made), "alternatives": [_short(one) for one in others]})
        return
    _print(made, others)
    if output is not None:
        typer.echo(f"written to {output}")


_SLOWEST_NIC = 1e6  # bytes per second; less was meant in another unit


def _node(name: str, nic_rate: str | None) -> NodeType:
    from dataclasses import replace

    from tutti import units
    from tutti.hardware.library import shipped

    nodes = shipped().nodes
    if name not in nodes:
        raise InputError(f"no node type '{name}'; {hint(name, nodes)}")
    known = nodes[name]
    if nic_rate is None:
        return known
    try:
        rate = units.parse(nic_rate, "bytes/s")
    except ValueError as error:
        raise InputError(f"--nic-rate: {error}") from None
    if not rate >= _SLOWEST_NIC:
        raise InputError(
            f"--nic-rate: {nic_rate} is {units.rate_text(rate)}; write it with its unit, such as "
            "'400 Gb/s'"
        )
    other = tuple(replace(nic, rate=rate) for nic in known.nics)
    return known if other == known.nics else replace(known, name=f"{name}-nic", nics=other)


def _short(made: Design) -> dict[str, Any]:
    return {
        "kind": made.label, "switches": made.switches,
        "cables": made.host_cables + made.fabric_cables, "hops": made.hops,
        "price": round(made.price), "watts": round(made.watts),
    }  # fmt: skip


def _document(made: Design) -> dict[str, Any]:
    return {
        **_short(made),
        "chips": made.wanted.chips,
        "tiers": [
            {"name": level.name, "switches": level.switches, "ports_down": level.down,
             "ports_up": level.up, "parallel_links": level.parallel, "nodes": level.nodes,
             "latency_s": seconds}
            for level, seconds in zip(made.levels, made.latencies_s, strict=True)
        ],
        "groups": made.groups,
        "chips_per_group": min(
            made.wanted.chips, made.levels[0].nodes * made.wanted.node.num_chips
        ),
        "pods": made.pods,
        "host_cables": made.host_cables,
        "fabric_cables": made.fabric_cables,
        "losses": [
            {"part": one.part, "share": one.share, "of": one.takes, "chips": one.chips}
            for one in made.losses
        ],
    }  # fmt: skip


def _money(amount: float) -> str:
    return f"{amount / 1e6:,.2f} M USD" if amount >= 1e5 else f"{amount:,.0f} USD"


def _print(made: Design, others: list[Design]) -> None:
    from rich import box
    from rich.table import Table

    from tutti.units import seconds_text

    wanted = made.wanted
    per_group = min(wanted.chips, made.levels[0].nodes * wanted.node.num_chips)
    typer.echo(
        f"{wanted.chips:,} chips on {wanted.switch.name} ({wanted.switch.text}): {made.label}\n"
        f"{made.groups:,} groups of {per_group:,} chips in {made.pods:,} pods · "
        f"{made.switches:,} switches · {made.host_cables:,} host and "
        f"{made.fabric_cables:,} fabric cables · {_money(made.price)} · "
        f"{made.watts / 1e3:,.0f} kW"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("tier", "switches", "ports down", "ports up", "cables to each below", "latency"):
        table.add_column(name, justify="left" if name == "tier" else "right")
    for level, seconds in zip(made.levels, made.latencies_s, strict=True):
        table.add_row(
            level.name, f"{level.switches:,}", str(level.down), str(level.up),
            str(level.parallel), seconds_text(seconds),
        )  # fmt: skip
    lost = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("if it fails", "gone", "of", "chips"):
        lost.add_column(name, justify="right" if name in ("gone", "chips") else "left")
    for one in made.losses:
        lost.add_row(one.part, f"{100 * one.share:.3g} %", one.takes, f"{one.chips:,}")
    other = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("other designs", "switches", "hops", "price", "watts"):
        other.add_column(name, justify="left" if name == "other designs" else "right")
    for design in others:
        if design.label != made.label:
            other.add_row(
                design.label, f"{design.switches:,}", str(design.hops), _money(design.price),
                f"{design.watts / 1e3:,.0f} kW",
            )  # fmt: skip
    print_rich(table, lost, other)
    typer.echo("prices and watts: src/tutti/fabric/parts.yaml says whose figures they are")
