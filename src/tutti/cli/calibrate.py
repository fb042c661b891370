"""`tutti calibrate`: fit constants from measured runs, or from a profile's operators."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.cli.shared.progress import progress_bar
from tutti.errors import InputError

if TYPE_CHECKING:
    from tutti.cost.calibration.shipped import Calibration


def calibrate(
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write into.")],
    runs: Annotated[
        Path | None, typer.Argument(help="A CSV file of measured runs.", show_default=False)
    ] = None,
    from_profile: Annotated[
        Path | None, typer.Option(help="A profile whose operators to fit, instead of runs.")
    ] = None,
    json: Json = False,
) -> None:
    """Fit calibrations from measured runs (every k-th row by id), or from operators."""
    from rich import box
    from rich.table import Table

    from tutti.cost.calibration.build import LEAST_ROWS, save_calibrations
    from tutti.cost.calibration.operators import calibrate_from_file

    if output.exists() and not output.is_dir():
        raise InputError(f"{output}: is a file; name a folder")
    if from_profile is not None and runs is None:
        calibrations = [calibrate_from_file(from_profile)]
    elif runs is not None and from_profile is None:
        calibrations = _from_runs(runs, wanted=not json)
    else:
        raise InputError("give either RUNS, a CSV file, or --from-profile FILE")
    paths = save_calibrations(calibrations, output)
    few = [c.name for c in calibrations if from_profile is None and c.fit.rows < LEAST_ROWS]
    if json:
        print_json(
            {
                "files": [str(p) for p in paths],
                "rows": {c.name: list(c.rows) for c in calibrations},
                "rule": {c.name: c.rule for c in calibrations},
                "few_rows": few,
            }
        )
        return
    printed = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    printed.add_column("calibration", style="bold")
    printed.add_column("stack")
    for heading in ("rows", "fit MAPE %", "worst %"):
        printed.add_column(heading, justify="right")
    printed.add_column("file")
    for calibration, path in zip(calibrations, paths, strict=True):
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
    if few:
        typer.echo(
            f"On fewer than {LEAST_ROWS} rows: {', '.join(few)}; predictions by them have the wide "
            "interval of a stack that nobody measured."
        )
    if from_profile is not None:
        typer.echo(calibrations[0].rule)


def _from_runs(runs: Path, wanted: bool) -> list[Calibration]:
    from tutti.cost.calibration.build import build_calibrations
    from tutti.cost.calibration.table import load_runs
    from tutti.simulate.published_runs import PlanPredictor

    table, skipped, _ = load_runs(runs)
    with progress_bar("count", wanted=wanted) as show:
        predictor = PlanPredictor(lambda done, whole: show("simulating", done, whole))
        calibrations = build_calibrations(table, f"tutti calibrate {runs.name}", predictor)
    if not calibrations:
        raise InputError(
            f"{runs}: no row belongs to a known stack ({len(table)} usable, {len(skipped)} not); "
            "see cost/calibration/stacks.yaml"
        )
    return calibrations
