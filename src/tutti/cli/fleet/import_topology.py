"""`tutti fleet import`: a cluster file from another scheduler's topology."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tutti.cli.shared.output import Json, print_json
from tutti.errors import InputError
from tutti.units import many

_PLURALS = {"leaf": "leaves"}


def import_topology(
    source: Annotated[
        Path,
        typer.Argument(help="topology.conf, topology.yaml, node labels (kubectl), a CSV of hosts."),
    ],
    node: Annotated[
        list[str] | None,
        typer.Option(help="Node type of all hosts, or POOL=TYPE; may be repeated.", metavar="TYPE"),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Put the leaves into this cluster instead.")
    ] = None,
    hosts: Annotated[
        Path | None, typer.Option(help="Names of that cluster's hosts (CSV, launch facts).")
    ] = None,
    oversubscription: Annotated[
        list[float] | None, typer.Option(help="Of each tier above the leaves, in turn.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write a cluster file (.yaml or .json).")
    ] = None,
    json: Json = False,
) -> None:
    """Read which hosts hang where, and make a cluster file of it."""
    from tutti.fleet.imports import cluster_from, read_places, with_places

    if output is not None and output.suffix not in (".yaml", ".yml", ".json"):
        raise InputError(f"-o {output}: a cluster file ends in .yaml or .json")
    places = read_places(source)
    if cluster is not None:
        from tutti.fleet.host_names import named_hosts
        from tutti.hardware.cluster import Cluster

        placed = Cluster.load(cluster)
        placed = with_places(placed, named_hosts(placed, hosts), places, source.name)
    else:
        name = output.stem if output is not None else source.stem
        placed = cluster_from(places, name, node or [], oversubscription or [], source.name)
    if output is not None:
        placed.save(output)
    if json:
        print_json(placed.to_document())
        return
    tiers = " under ".join(
        many(len({place.path[t] for place in places}), tier.name, _PLURALS.get(tier.name, ""))
        for t, tier in enumerate(placed.fabric.tiers[:-1])
    )
    typer.echo(
        f"{placed.name}: {many(placed.num_nodes, 'node')} in {many(len(placed.pools), 'pool')}"
        + (f", {tiers}" if tiers else "")
    )
    if output is not None:
        typer.echo(f"written to {output}")
