"""`tutti validate RUNS.csv`: predictions against runs that others measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.output import Json, print_json, print_rich
from tutti.cli.progress import progress_bar

if TYPE_CHECKING:
    from tutti.cost.calibration.validate import Validation

_MOST_REASONS = 12


def validate(
    runs: Annotated[Path, typer.Argument(help="A CSV file of measured runs.")],
    calibrate: Annotated[
        int | None,
        typer.Option(min=1, help="Fit anew on at most so many rows per stack, score the others."),
    ] = None,
    group: Annotated[str | None, typer.Option(help="Score this group of runs only.")] = None,
    calibrate_on: Annotated[
        list[str] | None,
        typer.Option(help="Only rows with this value may calibrate, such as hidden=1024."),
    ] = None,
    json: Json = False,
) -> None:
    """Predict measured runs from their configuration and show how far off that is."""
    from tutti.cost.calibration.validate import Condition, validate

    conditions = [Condition.parse(text) for text in calibrate_on or ()]
    with progress_bar("count", wanted=not json) as show:
        found = validate(
            runs,
            group=group,
            calibrate=calibrate,
            calibrate_on=conditions,
            progress=lambda done, whole: show("fitting", done, whole),
        )
    if json:
        print_json(_document(found))
    else:
        print_rich(*_tables(found, shipped=calibrate is None and not conditions))


def _document(found: Validation) -> dict[str, Any]:
    from dataclasses import asdict

    def rounded(value: object) -> object:
        return round(value, 4) if isinstance(value, float) else value

    return {
        "groups": {
            name: {k: rounded(v) for k, v in asdict(score).items() if k != "worst_row"}
            for name, score in found.groups.items()
        },
        "skipped": [{"id": skipped.id, "why": skipped.why} for skipped in found.skipped],
        "extrapolated": found.extrapolated,
    }


def _tables(found: Validation, *, shipped: bool) -> list[Any]:
    from collections import Counter

    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("group", style="bold")
    for heading in ("rows", "scored", "MAPE", "median", "worst"):
        table.add_column(heading, justify="right")
    table.add_column("worst row", no_wrap=True)
    for heading in ("constant", "memory", "rank corr.", "regret"):
        table.add_column(heading, justify="right")
    for name, score in found.groups.items():
        pct = [score.mape_pct, score.median_pct, score.worst_pct]
        more = [score.constant_mape_pct, score.memory_mape_pct]
        table.add_row(
            name,
            f"{score.rows:,}",
            f"{score.scored:,}",
            *(_percent(value) for value in pct),
            (score.worst_row or "–").rpartition("-")[2],
            *(_percent(value) for value in more),
            "–" if score.spearman is None else f"{score.spearman:.3f}",
            _percent(score.regret_pct),
        )
    foot = "Errors of the step time in %, out of sample. constant: the best single utilisation, "
    foot += "fitted on the very rows. regret: of choosing a strategy by prediction.\n"
    foot += "By the calibrations that ship." if shipped else "Mean over all splits."
    if found.extrapolated:
        counts = ", ".join(f"{name} {count}" for name, count in found.extrapolated.items())
        foot += f" Rows outside a calibration's range: {counts}."
    lines: list[Any] = [table, Text(foot, style="dim")]
    if found.skipped:
        lines.append(Text(f"\nleft out: {len(found.skipped)} rows"))
        reasons = Counter(skipped.why for skipped in found.skipped)
        for why, count in reasons.most_common(_MOST_REASONS):
            lines.append(Text(f"  {count:>4} × {why}", overflow="fold"))
        if len(reasons) > _MOST_REASONS:
            lines.append(Text(f"  … {len(reasons) - _MOST_REASONS} more reasons (--json)"))
    return lines


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
