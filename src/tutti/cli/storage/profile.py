"""`tutti profile --storage`: measure a disk or a mounted file system into a profile."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tutti.cli.shared.output import print_json, print_rich
from tutti.cli.shared.progress import progress_bar
from tutti.errors import InputError, hint

if TYPE_CHECKING:
    from rich.table import Table

    from tutti.hardware.profile import Profile, StorageFigure
    from tutti.storage.disk import DiskQuestion


def profile_storage(
    folder: Path, output: Path, *, tier: str, processes: int, file_size: str, json: bool
) -> None:
    """Measure a folder's storage and write it into a profile, beside what that holds already."""
    from tutti.hardware.profile import Profile
    from tutti.storage.disk import measure_disk

    question = _question(folder, tier, processes, file_size)
    known = Profile.load(output) if output.exists() else None
    with progress_bar("count", wanted=not json) as bar:
        figures = measure_disk(question, bar)
    extended = (known or _fresh(folder)).with_storage(figures)
    extended.save(output)
    if json:
        print_json({"file": str(output), "storage": [_row(figure) for figure in figures]})
        return
    print_rich(f"[bold]{question.tier.words}[/] of this node, in {folder}", _table(figures))
    if not all(figure.beyond_cache for figure in figures):
        typer.echo("the system kept the files in memory: reads say nothing of the storage")
    typer.echo(f"written to {output}")


def _question(folder: Path, tier: str, processes: int, file_size: str) -> DiskQuestion:
    from tutti.hardware.storage import StorageTier
    from tutti.storage.disk import DiskQuestion
    from tutti.units import parse

    measured = [t.value for t in StorageTier if t is not StorageTier.HOST_MEMORY]
    if tier not in measured:
        raise InputError(f"--tier is '{tier}'; {hint(tier, measured)}")
    try:
        size = int(parse(file_size, "bytes"))
    except ValueError as error:
        raise InputError(f"--file-size {error}") from None
    if size < 1 << 20:
        raise InputError(f"--file-size is '{file_size}'; give at least 1 MiB")
    return DiskQuestion(folder=folder, tier=StorageTier(tier), num_bytes=size, processes=processes)


def _fresh(folder: Path) -> Profile:
    from tutti.hardware.profile import Profile

    return Profile(
        chip="CPU",
        date=datetime.date.today().isoformat(),
        origin=f"tutti profile --storage {folder.resolve().name}",
        launch_floor_s=0.0,
    )


def _row(figure: StorageFigure) -> dict[str, object]:
    return {
        "tier": figure.tier.value,
        "action": figure.action.value,
        "processes": figure.processes,
        "bytes": figure.bytes,
        "seconds": figure.seconds,
        "bandwidth": figure.bandwidth,
        "beyond_cache": figure.beyond_cache,
    }


def _table(figures: tuple[StorageFigure, ...]) -> Table:
    from rich import box
    from rich.table import Table

    from tutti.units import bytes_text, rate_text, seconds_text

    table = Table(box=box.SIMPLE, header_style="bold", pad_edge=False)
    table.add_column("what")
    for name in ("processes", "of", "together", "one operation"):
        table.add_column(name, justify="right")
    for figure in sorted(figures, key=lambda f: (f.action.value, f.processes)):
        table.add_row(
            figure.action.value.replace("_", " "),
            str(figure.processes),
            bytes_text(figure.bytes),
            rate_text(figure.bandwidth),
            seconds_text(figure.seconds),
        )
    return table
