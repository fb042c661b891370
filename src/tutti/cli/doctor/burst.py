"""`tutti doctor burst`: hosts' figures ten times a second for a while."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tutti.cli.shared.output import print_json, print_rich
from tutti.cli.shared.progress import progress_bar
from tutti.errors import InputError
from tutti.observe.folder import SERIES
from tutti.observe.samplers.bursts import (
    BurstFigure,
    BurstRequest,
    ask_for_burst,
    burst_figures,
    read_burst,
    take_back,
)

if TYPE_CHECKING:
    from rich.table import Table

LATE_S = 2.5  # until every host has found the request, and written its last line


def take_burst(run: Path, seconds: float, most: int, output: Path | None, *, as_json: bool) -> None:
    """Ask, wait, and print what came."""
    folder = run / SERIES
    request = ask_for_burst(folder, seconds)
    try:
        _wait(seconds + LATE_S, wanted=not as_json)
    finally:
        take_back(folder)
    figures = burst_figures(read_burst(folder, request))
    if not figures:
        raise InputError(f"{run}: no host answered; is the run alive?")
    if output is not None:
        _write(folder, request, output)
    if as_json:
        print_json([_plain(one) for one in figures])
        return
    print_rich(_table(figures[:most]))
    if len(figures) > most:
        typer.echo(f"{len(figures) - most} calmer figures are not shown (--most)")
    if output is not None:
        typer.echo(f"every sample is in {output}")


def _wait(seconds: float, *, wanted: bool) -> None:
    began = time.monotonic()
    with progress_bar("seconds", "sampling", wanted=wanted) as update:
        while (done := time.monotonic() - began) < seconds:
            update("", done, seconds)
            time.sleep(0.2)


def _write(folder: Path, request: BurstRequest, output: Path) -> None:
    with output.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("at", "host", "figure", "value"))
        for row in read_burst(folder, request):
            rows.writerows((row.at, row.host, name, value) for name, value in row.values.items())


def _plain(one: BurstFigure) -> dict[str, object]:
    return {
        "host": one.host, "figure": one.figure, "samples": one.samples, "mean": one.mean,
        "least": one.least, "most": one.most,
    }  # fmt: skip


def _table(figures: list[BurstFigure]) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("host", "figure"):
        table.add_column(name)
    for name in ("samples", "mean", "least", "most"):
        table.add_column(name, justify="right")
    for one in figures:
        numbers = (f"{value:.4g}" for value in (one.mean, one.least, one.most))
        table.add_row(escape(one.host), escape(one.figure), str(one.samples), *numbers)
    return table
