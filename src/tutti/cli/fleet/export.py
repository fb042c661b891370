"""`tutti fleet export`: a cluster's topology as files of Slurm, Kueue and Volcano."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tutti.cli.shared.output import Json, print_json
from tutti.errors import InputError, hint


def export(
    cluster: Annotated[str, typer.Argument(help="A cluster file, or the name of an example.")],
    to: Annotated[
        str,
        typer.Option(help="slurm-tree, slurm-block, slurm-yaml, kueue, volcano or hosts (CSV)."),
    ],
    hosts: Annotated[
        Path | None,
        typer.Option(help="Launch facts or a CSV that name the hosts; else pool-0000 and so on."),
    ] = None,
    api: Annotated[str, typer.Option(help="Kueue's API: v1beta2 or v1beta1.")] = "v1beta2",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write it to a file; else print it.")
    ] = None,
    json: Json = False,
) -> None:
    """Write what tells another scheduler which nodes are neighbours."""
    from tutti.files import write_text
    from tutti.fleet.exports import EXPORTS
    from tutti.fleet.host_names import named_hosts
    from tutti.hardware.cluster import Cluster

    if to not in EXPORTS:
        raise InputError(f"--to: '{to}'; {hint(to, EXPORTS)}")
    loaded = Cluster.load(cluster)
    text = EXPORTS[to](loaded, named_hosts(loaded, hosts), api)
    if output is not None:
        write_text(output, text)
    if json:
        print_json({"to": to, "text": text, "file": None if output is None else str(output)})
    elif output is None:
        typer.echo(text, nl=False)
    else:
        typer.echo(f"written to {output}")
