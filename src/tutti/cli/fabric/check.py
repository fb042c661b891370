"""`tutti fabric check`: cyclic buffer dependencies in routes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tutti.cli.shared.output import Json, print_json
from tutti.errors import InputError


def check(
    cluster: Annotated[
        str | None, typer.Argument(help="A cluster file, or the name of an example.")
    ] = None,
    tables: Annotated[
        Path | None, typer.Option(help="Routing tables (hosts, routes) instead.")
    ] = None,
    bounce: Annotated[
        list[int] | None, typer.Option(help="A leaf that sends undeliverable traffic back up.")
    ] = None,
    json: Json = False,
) -> None:
    """Look for links that can stop each other in a circle. Exit codes: 0 none, 1 found."""
    from tutti import files
    from tutti.fabric.deadlock import Tables, check_tables, check_wiring
    from tutti.fabric.wiring import wire
    from tutti.hardware.cluster import Cluster

    if (cluster is None) == (tables is None):
        raise InputError("fabric check: give a cluster file or an example's name, or else --tables")
    if tables is not None:
        if bounce:
            raise InputError("--bounce: is for a cluster; tables say themselves what is sent where")
        name = tables.name
        written = Tables.read(files.read_file(tables), name)
        try:
            checked = check_tables(written)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
    else:
        read = Cluster.load(str(cluster))
        name = read.name
        checked = check_wiring(wire(read), bounce or ())
    if json:
        print_json({"links": checked.links, "dependencies": checked.dependencies,
                    "cycle": list(checked.cycle)})  # fmt: skip
    else:
        said = "a cycle:" if checked.cycle else "no cycle: pauses cannot wait in a circle"
        typer.echo(
            f"{name}: {checked.links:,} links, {checked.dependencies:,} dependencies, {said}"
        )
        for link in checked.cycle:
            typer.echo(f"  {link} waits for")
        if checked.cycle:
            typer.echo(f"  {checked.cycle[0]}")
    if checked.cycle:
        raise typer.Exit(1)
