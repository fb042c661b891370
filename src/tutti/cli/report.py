"""`tutti report`: what training runs came to, as a page and a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.shared.output import Json, print_json, print_rich

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from tutti.report.training import RunFigures


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Output folders of `tutti train`; NAME=FOLDER names one.")
    ],
    html: Annotated[
        Path | None, typer.Option(help="Write a self-contained page with curves and bars.")
    ] = None,
    series: Annotated[
        Path | None,
        typer.Option(help="Write the figures by the second of the (one) run as Parquet."),
    ] = None,
    json: Json = False,
) -> None:
    """Show losses, speed and where the time went of one run, or of several beside each other."""
    from tutti.errors import InputError
    from tutti.report.training import write_training_page

    read_runs = [_read(str(run)) for run in runs]
    names = [run.name for run in read_runs]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"two runs are called '{name}'; name them: planned=FOLDER")
    if html is not None:
        write_training_page(html, read_runs)
    if series is not None:
        _export(runs, series)
    if json:
        print_json({"runs": [_document(run, read_runs) for run in read_runs]})
        return
    print_rich(_table(read_runs))
    for path in filter(None, (html, series)):
        typer.echo(f"written to {path}")


def _read(text: str) -> RunFigures:
    from tutti.observe.history import read_run

    name, equals, folder = text.partition("=")
    if equals and not Path(text).exists():
        return read_run(Path(folder), name)
    return read_run(Path(text))


def _export(runs: list[Path], path: Path) -> None:
    from tutti.errors import InputError
    from tutti.observe.parquet import export_series

    if len(runs) > 1:
        raise InputError("--series: is of one run; name one")
    _, equals, folder = str(runs[0]).partition("=")
    export_series(Path(folder if equals and not runs[0].exists() else runs[0]), path)


def _document(run: RunFigures, runs: Sequence[RunFigures]) -> dict[str, Any]:
    from dataclasses import asdict

    from tutti.report.training import baseline_of

    return {
        **asdict(run),
        "seconds": run.seconds,
        "tokens_per_s": run.tokens_per_s,
        "mfu": run.mfu,
        "counts": run.counts,
        "ratio": run.tokens_per_s / baseline_of(runs).tokens_per_s,
    }


def _table(runs: Sequence[RunFigures]) -> Table:
    from rich import box
    from rich.table import Table

    from tutti.report.training import baseline_of, shared_step
    from tutti.units import count_text, seconds_text

    base = baseline_of(runs)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("run", style="bold")
    shared = shared_step(runs)  # losses after different numbers of steps do not compare
    compared = [] if shared is None else [f"loss, step {shared:,}"]
    speeds = ("step", "predicted", "error", "tokens/s", "ratio", "MFU")
    for name in ("steps", "loss", *compared, *speeds):
        table.add_column(name, justify="right")
    table.add_column("")
    for run in runs:
        predicted = run.predicted_s
        said = f"emulated, overrun {run.overrun:.1%}" if run.emulated else ""
        table.add_row(
            run.name,
            f"{run.steps[-1].step:,}",
            f"{run.steps[-1].loss:.4f}",
            *([] if shared is None else [f"{run.loss_at(shared):.4f}"]),
            seconds_text(run.seconds),
            "–" if predicted is None else seconds_text(predicted),
            "–" if predicted is None else f"{predicted / run.seconds - 1:+.1%}",
            count_text(run.tokens_per_s),
            f"{run.tokens_per_s / base.tokens_per_s:.2f}",
            f"{run.mfu:.1%}",
            f"{said}{'' if run.counts else ': does not count'}",
        )
    return table
