"""`tutti bench steps`: steps of a server beside what a profile predicts of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.cli.shared.progress import ProgressLine
from tutti.cli.shared.torch_needed import require_torch
from tutti.errors import InputError
from tutti.units import many

if TYPE_CHECKING:
    from rich.table import Table

    from tutti.bench.serving_steps import TimedStep

Models = Annotated[
    list[str], typer.Argument(help="Models whose steps to time, with random weights.")
]
ProfileOption = Annotated[
    str,
    typer.Option(help="A profile of this chip, made with tutti profile --serve.", metavar="FILE"),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, … (default: the best here).")]
DtypeOption = Annotated[
    str | None, typer.Option(help="fp32, bf16 or fp16 (default: bf16; fp32 on a cpu).")
]
Threads = Annotated[int | None, typer.Option(help="Of a CPU, as the profile was made with.", min=1)]
HoldOut = Annotated[
    bool,
    typer.Option(
        "--hold-out/--as-measured",
        help="Predict without the profile's measurements on the very shapes of the model.",
    ),
]


def steps(
    models: Models,
    profile: ProfileOption,
    device: Device = None,
    dtype: DtypeOption = None,
    threads: Threads = None,
    layers: Annotated[int | None, typer.Option(help="Fewer than the model has.", min=1)] = None,
    rows: Annotated[int, typer.Option(help="Of one token, at most.", min=1)] = 256,
    longest: Annotated[int, typer.Option(help="Tokens of a sequence, at most.", min=16)] = 4096,
    hold_out: HoldOut = True,
    json: Json = False,
) -> None:
    """Time steps of a server and compare them with the prediction from a profile."""
    require_torch("bench steps")
    import torch

    from tutti.accelerator import open_accelerator
    from tutti.bench.serving_steps import cut, time_steps
    from tutti.cli.profile import chosen_dtype
    from tutti.hardware.profile import Profile
    from tutti.models.load import load_model

    specs = [(name, cut(load_model(name), layers)) for name in models]
    if threads is not None:
        torch.set_num_threads(threads)
    opened = open_accelerator(device)
    known = Profile.find(profile)
    if known.chip != opened.chip:
        raise InputError(
            f"--profile {profile}: is of '{known.chip}', but this is '{opened.chip}'; measure it "
            "with tutti profile --serve"
        )
    if not any(row.operator == "decode_attention.inference" for row in known.operators):
        raise InputError(
            f"--profile {profile}: holds no operators of servers; add them with tutti profile "
            "--serve --resume"
        )
    chosen = chosen_dtype(dtype, opened)
    timed: list[TimedStep] = []
    with ProgressLine("timing steps", wanted=not json) as line:
        for name, spec in specs:
            timed += time_steps(
                name, spec, opened, known, chosen,
                most_rows=rows, longest=longest, hold_out=hold_out, report=line.say,
            )  # fmt: skip
            opened.empty_cache()
    summary = _summary(timed)
    if json:
        print_json({"chip": opened.chip, "dtype": chosen.value, **summary, "steps": _json(timed)})
        return
    print_rich(_table(timed, f"{opened.chip}, {chosen.value}"))
    typer.echo(
        f"prediction error: mean {summary['mean_error']:.1%}, median {summary['median_error']:.1%},"
        f" largest {summary['largest_error']:.1%}, of {many(len(timed), 'step')}"
        + (", none of whose model's shapes were used" if hold_out else "")
    )


def _summary(timed: list[TimedStep]) -> dict[str, float]:
    errors = sorted(abs(step.error) for step in timed)
    return {
        "mean_error": sum(errors) / len(errors),
        "median_error": errors[len(errors) // 2],
        "largest_error": errors[-1],
    }


def _json(timed: list[TimedStep]) -> list[dict[str, Any]]:
    return [
        {
            "model": step.model,
            "rows": step.step.rows,
            "chunk": step.step.chunk,
            "keys": step.step.keys,
            "measured_s": step.measured_s,
            "spread": step.spread,
            "predicted_s": step.predicted_s,
            "pace": step.pace,
            "error": step.error,
        }
        for step in timed
    ]


def _table(timed: list[TimedStep], title: str) -> Table:
    from rich import box
    from rich.table import Table

    from tutti.units import seconds_text

    table = Table(box=box.SIMPLE, header_style="bold", pad_edge=False, title=title)
    table.add_column("model")
    table.add_column("step")
    for name in ("measured", "±", "predicted", "pace", "error"):
        table.add_column(name, justify="right")
    for step in timed:
        table.add_row(
            step.model,
            str(step.step),
            seconds_text(step.measured_s),
            f"{step.spread:.1%}",
            seconds_text(step.predicted_s),
            f"{step.pace:.2f}",
            f"{step.error:+.1%}",
        )
    return table
