"""`tutti calibrate RUNS.csv -o DIR`: fit the constants of every stack by the fixed rule."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tutti.cli.output import Json, print_json, print_rich


def calibrate(
    runs: Annotated[Path, typer.Argument(help="A CSV file of measured runs.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write into.")],
    json: Json = False,
) -> None:
    """Fit calibrations from measured runs: every k-th row by id, few of them."""
    from rich import box
    from rich.table import Table

    from tutti.cost.calibration.build import build_calibrations, save_calibrations
    from tutti.cost.calibration.table import load_runs
    from tutti.errors import InputError

    table, skipped, _ = load_runs(runs)
    if output.exists() and not output.is_dir():
        raise InputError(f"{output}: is a file; name a folder")
    found = build_calibrations(table, f"tutti calibrate {runs.name}")
    if not found:
        raise InputError(
            f"{runs}: no row belongs to a known stack ({len(table)} usable, {len(skipped)} not); "
            "see cost/calibration/stacks.yaml"
        )
    paths = save_calibrations(found, output)
    if json:
        print_json(
            {"files": [str(p) for p in paths], "rows": {c.name: list(c.rows) for c in found}}
        )
        return
    printed = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    printed.add_column("calibration", style="bold")
    printed.add_column("stack")
    for heading in ("rows", "fit MAPE %", "worst %"):
        printed.add_column(heading, justify="right")
    printed.add_column("file")
    for calibration, path in zip(found, paths, strict=True):
        fit = calibration.fit
        printed.add_row(
            calibration.name,
            calibration.stack,
            str(fit.rows),
            f"{fit.mape_pct:.2f}",
            f"{fit.worst_pct:.2f}",
            str(path),
        )
    print_rich(printed)
