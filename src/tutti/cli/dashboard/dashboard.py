"""`tutti dashboard`: runs as they happen, in a browser."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tutti.web.watched import Watched


def dashboard(
    runs: Annotated[
        list[str],
        typer.Argument(
            help="Output folders of runs (NAME=FOLDER names one), or HOST:PORT of a run's "
            "measure.prometheus_port."
        ),
    ],
    port: Annotated[int, typer.Option(help="0: any that is free.", min=0, max=65535)] = 8400,
    host: Annotated[
        str, typer.Option(help="Where to listen; others than this machine need a token.")
    ] = "127.0.0.1",
    token: Annotated[
        str | None,
        typer.Option(help="What others must have; made up if not given. TUTTI_DASHBOARD_TOKEN."),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write all views into one file, and serve nothing.")
    ] = None,
) -> None:
    """Show runs side by side, and one with its chips, links, steps, alerts and logs."""
    watched = _watched(runs)
    if save is not None:
        from tutti.web.saving import save_all

        save_all(watched, save)
        typer.echo(f"written to {save}")
        return
    from tutti.optional_imports import library

    for package in ("starlette", "uvicorn"):
        library(package, "tutti dashboard", "dashboard")
    from tutti.web.app import LOOPBACK, listen, make_app, server_of

    here = host in LOOPBACK
    token = token if token is not None else os.environ.get("TUTTI_DASHBOARD_TOKEN", "")
    if not here and not token:
        token = secrets.token_urlsafe(18)
    listening = listen(host, port)
    for run in watched:
        run.summary()  # what is long is read before somebody waits for it
    shown = f"[{host}]" if ":" in host else host
    end = f"?token={token}" if token else ""
    typer.echo(f"http://{shown}:{listening.getsockname()[1]}/{end}", err=True)
    with listening:
        server_of(make_app(watched, token=token)).run(sockets=[listening])


def _watched(runs: list[str]) -> list[Watched]:
    from tutti.diagnose.runs.wire import address_of
    from tutti.web.run_folder import RunFolder
    from tutti.web.scraped import ScrapedRun

    watched: list[Watched] = []
    for text in runs:
        address = None if Path(text).exists() else address_of(text)
        if address is not None:
            watched.append(ScrapedRun(*address))
            continue
        name, equals, folder = text.partition("=")
        named = bool(equals) and not Path(text).exists()
        watched.append(RunFolder(Path(folder if named else text), name if named else ""))
    return watched
