"""`tutti job`: what became of an elastic run, and what is asked of it; `tutti agent`: its hosts."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.units import many

app = typer.Typer(help="Elastic runs: their generations and decisions.", no_args_is_help=True)

Place = Annotated[
    str, typer.Argument(metavar="PLACE", help="POOL/NODE, or POOL/NODE/SLOT for one chip.")
]

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The output folder of a run.")]


@app.callback()
def job() -> None:
    """Elastic runs: their generations and decisions."""


@app.command()
def status(run: Run, json: Json = False) -> None:
    """Say which generations a run has had, why each ended, and how long going on took."""
    from tutti.elastic.generations import recoveries
    from tutti.elastic.journal import read_journal
    from tutti.files import require_folder

    require_folder(run)
    entries = read_journal(run)
    if json:
        print_json(
            {
                "generation": entries[-1].generation if entries else 0,
                "phase": entries[-1].phase if entries else "waiting",
                "recoveries_s": recoveries(entries),
                "decisions": [dataclasses.asdict(entry) for entry in entries],
            }
        )
        return
    for entry in entries:
        at = datetime.fromtimestamp(entry.at).strftime("%H:%M:%S.%f")[:-4]
        print_rich(f"{at}  generation {entry.generation}  [bold]{entry.phase}[/]  {entry.why}")
    recovered_s = recoveries(entries)
    if recovered_s:
        middle = sorted(recovered_s)[len(recovered_s) // 2]
        print_rich(
            f"{many(len(recovered_s), 'loss', 'losses')}; training again after {middle:.2f} s "
            f"(median; {min(recovered_s):.2f} to {max(recovered_s):.2f})"
        )


@app.command()
def drain(run: Run, place: Place) -> None:
    """Let a running job leave chips after the step at hand, and go on with the others."""
    _wish(run, "drain", place)
    print_rich(f"asked: {place} is left after a step (tutti job status {run})")


@app.command()
def add(run: Run, place: Place) -> None:
    """Let a running job use chips again that were drained, or failed too often."""
    _wish(run, "add", place)
    print_rich(f"asked: {place} is used again where that pays (tutti job status {run})")


@app.command()
def replan(run: Run) -> None:
    """Let a running job look for a better plan, and take it if it pays in the time left."""
    _wish(run, "replan", "")
    print_rich(f"asked: a plan is looked for (tutti job status {run})")


def _wish(run: Path, kind: Literal["drain", "add", "replan"], place: str) -> None:
    from tutti.elastic.operator_requests import OperatorRequest, wish
    from tutti.files import require_folder

    require_folder(run)
    wish(run, OperatorRequest(kind=kind, place=place))


# --- `tutti agent` -------------------------------------------------------------------------------


def agent(
    join: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where `tutti train` listens (elastic.listen), or the job's store, etcd://…/NAME.",
        ),
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
