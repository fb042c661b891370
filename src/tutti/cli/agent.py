"""`tutti agent`: this host's chips for an elastic job that is led from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tutti.cli.shared.output import print_rich


def agent(
    join: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where `tutti train` listens (elastic.listen).")
    ],
    node: Annotated[
        str,
        typer.Option(
            metavar="POOL/N", help="Which node of the cluster file this host is, such as a100/1."
        ),
    ],
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="The run's folder, as this host sees it; its secret is read from there.",
        ),
    ] = None,
    wait: Annotated[
        float, typer.Option(min=0.0, help="Seconds to wait for somebody to answer.")
    ] = 600.0,
) -> None:
    """Bring this host's chips into an elastic job; SIGTERM lets the others go on without them."""
    from tutti.optional_imports import library

    for name in ("zmq", "msgspec"):
        library(name, "elastic", "elastic")
    from tutti.elastic.join import run_agent

    ended = run_agent(join, node, folder=run, say=print_rich, wait_s=wait)
    print_rich(ended)
