"""`tutti bench measuring`: what it costs a training step that every instruction is timed."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.cli.shared.progress import ProgressLine
from tutti.cli.shared.torch_needed import require_torch


def measuring(
    model: Annotated[str, typer.Argument(help="A model, by name.")] = "smollm2-135m",
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, … (default: the best here).")
    ] = None,
    layers: Annotated[int, typer.Option(help="Layers of it.", min=1)] = 2,
    micro_batches: Annotated[int, typer.Option(help="Of a step.", min=1)] = 2,
    sequence_length: Annotated[int, typer.Option(help="Tokens of a sequence.", min=1)] = 128,
    steps: Annotated[int, typer.Option(help="Timed steps, with and without each.", min=1)] = 5,
    json: Json = False,
) -> None:
    """Time the recorder by itself, and steps with and without it in turns."""
    require_torch("bench measuring")
    from tutti.bench.measuring_cost import MeasuringQuestion, measuring_cost

    asked = MeasuringQuestion(
        model=model, device=device, layers=layers, micro_batches=micro_batches,
        sequence_length=sequence_length, steps=steps,
    )  # fmt: skip
    with ProgressLine("measuring", wanted=not json) as line:
        found = measuring_cost(asked, line.say)
    if json:
        print_json(found)
    else:
        print_rich(*_lines(found))


def _lines(found: dict[str, Any]) -> list[Any]:
    from rich import box
    from rich.table import Table

    from tutti.units import seconds_text

    table = Table(title=f"cost of measuring, {found['title']}", box=box.SIMPLE_HEAD)
    table.add_column("what")
    table.add_column("", justify="right")
    for name, value in (
        ("instructions of a step", f"{found['instructions']:,}"),
        ("per instruction", seconds_text(found["per_instruction_s"])),
        ("closing a step", seconds_text(found["closing_s"])),
        ("per step", seconds_text(found["per_step_s"])),
        ("step, measured", seconds_text(found["step_s"])),
        ("step, not measured", seconds_text(found["silent_step_s"])),
        ("share of the step", f"{found['share']:.3%}"),
        ("spread of steps, for comparison", f"{found['spread']:.1%}"),
    ):
        table.add_row(name, value)
    said = "below" if found["share"] < found["limit"] else "ABOVE"
    return [table, f"{said} the limit of {found['limit']:.0%}"]
