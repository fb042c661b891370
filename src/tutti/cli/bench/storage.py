"""`tutti bench storage`: slow servers, restores, this disk, failures, published storages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.errors import InputError, hint

if TYPE_CHECKING:
    from rich.table import Table

Parts = Annotated[
    list[str] | None,
    typer.Argument(
        help="reads, restore, disk, failures, published (default: all).", show_default=False
    ),
]
Folder = Annotated[
    Path, typer.Option(help="Where files are made: the disk that is measured.", metavar="DIR")
]


def storage(
    parts: Parts = None,
    folder: Folder = Path(),
    rate: Annotated[float, typer.Option(help="Of the slow server, in MB/s.", min=1.0)] = 50.0,
    seed: Annotated[int, typer.Option(help="Of the months of failures.", min=0)] = 0,
    json: Json = False,
) -> None:
    """Measure reads and restores from a slow server and a disk; price failures and storages."""
    import tempfile

    from tutti.files import require_folder

    wanted = parts or list(_PARTS)
    for part in wanted:
        if part not in _PARTS:
            raise InputError(f"'{part}' is no part of this benchmark; {hint(part, _PARTS)}")
    require_folder(folder)
    rows_by_part: dict[str, list[dict[str, Any]]] = {}
    for part in wanted:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".tutti-bench-") as scratch:
            rows_by_part[part] = _PARTS[part](Path(scratch), rate * 1e6, seed)
        if not json:
            print_rich(_table(part, rows_by_part[part]))
    if json:
        print_json(rows_by_part)


def _reads(folder: Path, rate: float, seed: int) -> list[dict[str, Any]]:
    del seed
    from tutti.bench.storage.reads import measure_reads

    return [asdict(row) for row in measure_reads(folder, rate, num_bytes=int(2 * rate))]


def _restore(folder: Path, rate: float, seed: int) -> list[dict[str, Any]]:
    del seed
    from tutti.cli.shared.torch_needed import require_torch

    require_torch("bench storage restore")
    from tutti.bench.storage.restores import measure_restores

    rows = measure_restores(folder, rate)
    slow = rows[0].seconds
    return [{**asdict(row), "times_faster": slow / row.seconds} for row in rows]


def _disk(folder: Path, rate: float, seed: int) -> list[dict[str, Any]]:
    del rate, seed
    from tutti.cli.shared.torch_needed import require_torch

    require_torch("bench storage disk")
    from tutti.bench.storage.disk_prediction import measure_disk_prediction

    return [{**asdict(row), "error": row.error} for row in measure_disk_prediction(folder)]


def _failures(folder: Path, rate: float, seed: int) -> list[dict[str, Any]]:
    del folder, rate
    from tutti.bench.storage.months import month_rows

    return [asdict(row) for row in month_rows(seed, months=200)]


def _published(folder: Path, rate: float, seed: int) -> list[dict[str, Any]]:
    del folder, rate, seed
    from tutti.bench.storage.published import published_rows

    return [asdict(row) for row in published_rows()]


_PARTS: dict[str, Callable[[Path, float, int], list[dict[str, Any]]]] = {
    "reads": _reads,
    "restore": _restore,
    "disk": _disk,
    "failures": _failures,
    "published": _published,
}
_TITLES = {
    "reads": "Ranged reads from a server of limited rate",
    "restore": "Four replicas restore from a server of limited rate",
    "disk": "A checkpoint on this disk: predicted from its profile, and measured",
    "failures": "Young's interval beside the best one over all simulated months, and beside each\n"
    "month's own (single); chance: what the best over all months loses there",
    "published": "Llama-3 405B on 16,384 H100, by published storages",
}


def _table(part: str, rows: list[dict[str, Any]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, title=_TITLES[part], title_justify="left", pad_edge=False)
    for number, name in enumerate(rows[0]):
        words = name.removesuffix("_s").replace("_", " ").replace("num bytes", "bytes")
        table.add_column(words, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*(_cell(name, value) for name, value in row.items()))
    return table


def _cell(name: str, value: object) -> str:
    from tutti.units import bytes_text, rate_text, seconds_text

    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (int, float)):
        return str(value)
    if name == "bytes_per_second":
        return rate_text(value)
    if name.endswith("bytes"):
        return bytes_text(value)
    if name in ("share", "error", "excess") or name.startswith(("single_", "chance_")):
        return f"{value:.1%}"
    if name.endswith("_s") or name == "seconds":
        return seconds_text(value)
    return f"{value:.2f}" if isinstance(value, float) else str(value)
