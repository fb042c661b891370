"""`tutti job`: what became of an elastic run, from its log."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.units import many

if TYPE_CHECKING:
    from tutti.elastic.journal import Entry

app = typer.Typer(help="Elastic runs: their generations and decisions.", no_args_is_help=True)

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The output folder of a run.")]


@app.callback()
def job() -> None:
    """Elastic runs: their generations and decisions."""


@app.command()
def status(run: Run, json: Json = False) -> None:
    """Say which generations a run has had, why each ended, and how long going on took."""
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
    found = recoveries(entries)
    if found:
        middle = sorted(found)[len(found) // 2]
        print_rich(
            f"{many(len(found), 'loss', 'losses')}; training again after {middle:.2f} s "
            f"(median; {min(found):.2f} to {max(found):.2f})"
        )


def recoveries(entries: list[Entry]) -> list[float]:
    """Return the seconds from each loss until the next generation ran."""
    found, since = list[float](), None
    for entry in entries:
        if entry.phase == "leaving" and since is None:
            since = entry.at
        elif entry.phase == "running" and since is not None:
            found.append(entry.at - since)
            since = None
    return found
