"""`tutti validate`: predictions against runs that others measured, or against a run of ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.predict import ChipProfiles
from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.cli.shared.progress import progress_bar
from tutti.errors import InputError
from tutti.units import many

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tutti.cost.calibration.extrapolate import Extrapolation, JudgeScore
    from tutti.cost.calibration.rows import Skipped
    from tutti.cost.calibration.score import GroupScore
    from tutti.cost.calibration.validate import Validation

_MOST_REASONS = 12


Runs = Annotated[Path | None, typer.Argument(help="A CSV file of measured runs; or give --run.")]
Run = Annotated[
    Path | None,
    typer.Option("--run", help="Instead: the output folder of a `tutti train --trace N`."),
]
Step = Annotated[
    int | None, typer.Option(help="With --run: which traced step (default: the median).")
]
Pool = Annotated[str | None, typer.Option(help="With --run and -o: whose chip the profile is of.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="With --run: write the chip's profile, scaled by it; "
        "with --extrapolate: the widths of intervals.",
    ),
]
Calibrate = Annotated[
    int | None,
    typer.Option(min=1, help="Fit anew on at most so many rows per stack, score the others."),
]
CalibrateOn = Annotated[
    list[str] | None,
    typer.Option(help="Only rows with this value may calibrate, such as hidden=1024."),
]
ClosedForm = Annotated[
    bool,
    typer.Option(help="By the vectorised formulas alone, without simulating: in seconds."),
]

Extrapolate = Annotated[
    bool,
    typer.Option(
        "--extrapolate",
        help="Judge by what lies outside: regimes, stacks and chips that no fit has seen.",
    ),
]


def validate(
    runs: Runs = None,
    run: Run = None,
    step: Step = None,
    pool: Pool = None,
    chip_profile: ChipProfiles = None,
    output: Output = None,
    calibrate: Calibrate = None,
    group: Annotated[str | None, typer.Option(help="Score this group of runs only.")] = None,
    calibrate_on: CalibrateOn = None,
    closed_form: ClosedForm = False,
    extrapolate: Extrapolate = False,
    json: Json = False,
) -> None:
    """Predict measured runs from their configuration and show how far off that is."""
    if run is not None:
        if runs is not None or calibrate is not None or group is not None or calibrate_on:
            raise InputError("--run: compares one run of ours; drop the options for a CSV file")
        from tutti.cli.validate_run import validate_run

        validate_run(run, step=step, chip_profiles=chip_profile or (), pool=pool,
                     output=output, json=json)  # fmt: skip
        return
    if runs is None:
        raise InputError("name a CSV file of measured runs, or --run FOLDER")
    if step is not None or pool is not None or chip_profile:
        raise InputError("--step, --pool and --chip-profile go with --run")
    if output is not None and not extrapolate:
        raise InputError("-o: goes with --run or --extrapolate")
    if extrapolate:
        if calibrate is not None or group is not None or calibrate_on:
            raise InputError(
                "--extrapolate: chooses its own rows; drop --calibrate, --calibrate-on, --group"
            )
        _extrapolate(runs, output, closed_form=closed_form, json=json)
        return
    from tutti.cost.calibration.validate import Condition, validate
    from tutti.simulate.published_runs import PlanPredictor

    conditions = [Condition.parse(text) for text in calibrate_on or ()]
    with progress_bar("count", wanted=not json) as show:
        validation = validate(
            runs,
            group=group,
            calibrate=calibrate,
            calibrate_on=conditions,
            predictor=None
            if closed_form
            else PlanPredictor(lambda done, whole: show("simulating", done, whole)),
            progress=lambda done, whole: show("fitting", done, whole),
        )
    if json:
        print_json(_document(validation))
    else:
        print_rich(*_tables(validation, shipped=calibrate is None and not conditions))


def _extrapolate(runs: Path, output: Path | None, *, closed_form: bool, json: bool) -> None:
    from tutti.cost.calibration.extrapolate import extrapolate
    from tutti.simulate.published_runs import PlanPredictor

    with progress_bar("count", wanted=not json) as show:
        judged = extrapolate(
            runs,
            predictor=None
            if closed_form
            else PlanPredictor(lambda done, whole: show("simulating", done, whole)),
            progress=lambda done, whole: show("fitting", done, whole),
        )
    if not judged.judged:
        why = judged.skipped[0].why if judged.skipped else "it has no rows"
        raise InputError(f"{runs}: no run can be judged ({why})")
    if output is not None:
        judged.widths.save(output)
    if json:
        print_json(_judged_document(judged))
        return
    print_rich(*_judged_tables(judged))
    if output is not None:
        typer.echo(f"written to {output}")


def _judged_document(judged: Extrapolation) -> dict[str, Any]:
    from dataclasses import asdict

    def plain(score: JudgeScore) -> dict[str, object]:
        values = asdict(score).items()
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in values}

    return {
        "judges": {name: plain(score) for name, score in judged.by_judge.items()},
        "stacks": {name: plain(score) for name, score in judged.by_stack.items()},
        "together": None if judged.together is None else plain(judged.together),
        "rows": [
            {
                "judge": o.judge,
                "stack": o.stack,
                "id": o.id,
                "error_pct": round(o.error_pct, 2),
                "half_width": round(o.half_width, 4),
                "inside": o.is_inside,
            }
            for o in judged.judged
        ],
        "widths": asdict(judged.widths),
        "skipped": [{"id": skipped.id, "why": skipped.why} for skipped in judged.skipped],
    }


def _judged_tables(judged: Extrapolation) -> list[Any]:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from tutti.cost.calibration.extrapolate import MEANINGS

    lines: list[Any] = []
    for title, scores in (("kept aside", judged.by_judge), ("stack", judged.by_stack)):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column(title, style="bold")
        for heading in ("rows", "mean", "median", "worst", "bias", "regret", "inside"):
            table.add_column(heading, justify="right")
        table.add_column("worst row", no_wrap=True)
        together = {"together": judged.together} if judged.together is not None else {}
        for name, score in {**scores, **(together if scores is judged.by_stack else {})}.items():
            table.add_row(
                MEANINGS.get(name, name),
                f"{score.rows:,}",
                *(_percent(v) for v in (score.mean_pct, score.median_pct, score.worst_pct)),
                f"{score.bias_pct:+.2f}",
                _percent(score.regret_pct),
                f"{score.inside_pct:.0f}",
                score.worst_row,
            )
        lines.append(table)
    foot = "Errors of the step time in %, of constants that saw nothing of what is kept aside. "
    foot += "The lower table leaves whole clusters and chips out. regret: of choosing a strategy "
    foot += "by prediction. inside: % of rows in their 10–90 % intervals, whose widths rest on the "
    foot += "other stacks."
    return [*lines, Text(foot, style="dim"), *_left_out(judged.skipped)]


def _document(validation: Validation) -> dict[str, Any]:
    return {
        "groups": _scores(validation.groups),
        "closed_form": _scores(validation.closed_form),
        "skipped": [{"id": skipped.id, "why": skipped.why} for skipped in validation.skipped],
        "extrapolated": validation.extrapolated,
    }


def _scores(groups: dict[str, GroupScore]) -> dict[str, dict[str, object]]:
    from dataclasses import asdict

    def rounded(value: object) -> object:
        return round(value, 4) if isinstance(value, float) else value

    return {
        name: {k: rounded(v) for k, v in asdict(score).items() if k != "worst_row"}
        for name, score in groups.items()
    }


def _tables(validation: Validation, *, shipped: bool) -> list[Any]:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("group", style="bold")
    for heading in ("rows", "scored", "MAPE", "median", "worst"):
        table.add_column(heading, justify="right")
    table.add_column("worst row", no_wrap=True)
    for heading in ("formulas", "constant", "memory", "rank corr.", "regret", "inside"):
        table.add_column(heading, justify="right")
    for name, score in validation.groups.items():
        pct = [score.mape_pct, score.median_pct, score.worst_pct]
        more = [validation.closed_form[name].mape_pct]
        more += [score.constant_mape_pct, score.memory_mape_pct]
        table.add_row(
            name,
            f"{score.rows:,}",
            f"{score.scored:,}",
            *(_percent(value) for value in pct),
            (score.worst_row or "–").rpartition("-")[2],
            *(_percent(value) for value in more),
            "–" if score.spearman is None else f"{score.spearman:.3f}",
            _percent(score.regret_pct),
            "–" if score.inside_pct is None else f"{score.inside_pct:.0f}",
        )
    foot = "Errors of the step time in %, out of sample. formulas: the mean error without "
    foot += "simulating. constant: the best single utilisation, fitted on the very rows. "
    foot += "regret: of choosing a strategy by prediction. "
    foot += "inside: % of rows in their 10–90 % intervals.\n"
    foot += "By the calibrations that ship." if shipped else "Mean over all splits."
    if validation.extrapolated:
        counts = ", ".join(f"{name} {count}" for name, count in validation.extrapolated.items())
        foot += f" Rows outside a calibration's range: {counts}."
    return [table, Text(foot, style="dim"), *_left_out(validation.skipped)]


def _left_out(skipped: Sequence[Skipped]) -> list[Any]:
    """Return how many rows were left out, and why."""
    from collections import Counter

    from rich.text import Text

    if not skipped:
        return []
    lines = [Text(f"\nleft out: {many(len(skipped), 'row')}")]
    reasons = Counter(one.why for one in skipped)
    for why, count in reasons.most_common(_MOST_REASONS):
        lines.append(Text(f"  {count:>4} × {why}", overflow="fold"))
    if len(reasons) > _MOST_REASONS:
        lines.append(Text(f"  … {many(len(reasons) - _MOST_REASONS, 'more reason')} (--json)"))
    return lines


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
