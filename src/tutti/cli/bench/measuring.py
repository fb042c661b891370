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
    from tutti.bench.watching.measuring_cost import MeasuringQuestion, measuring_cost

    asked = MeasuringQuestion(
        model=model, device=device, layers=layers, micro_batches=micro_batches,
        sequence_length=sequence_length, steps=steps,
    )  # fmt: skip
    with ProgressLine("measuring", wanted=not json) as line:
        cost = measuring_cost(asked, line.say)
    if json:
        print_json(cost)
    else:
        print_rich(*_lines(cost))


def _lines(cost: dict[str, Any]) -> list[Any]:
    from rich import box
    from rich.table import Table

    from tutti.units import seconds_text

    table = Table(title=f"cost of measuring, {cost['title']}", box=box.SIMPLE_HEAD)
    table.add_column("what")
    table.add_column("", justify="right")
    for name, value in (
        ("instructions of a step", f"{cost['instructions']:,}"),
        ("per instruction", seconds_text(cost["per_instruction_s"])),
        ("closing a step", seconds_text(cost["closing_s"])),
        ("per step", seconds_text(cost["per_step_s"])),
        ("step, measured", seconds_text(cost["step_s"])),
        ("step, not measured", seconds_text(cost["silent_step_s"])),
        ("share of the step", f"{cost['share']:.3%}"),
        ("spread of steps, for comparison", f"{cost['spread']:.1%}"),
    ):
        table.add_row(name, value)
    said = "below" if cost["share"] < cost["limit"] else "ABOVE"
    return [table, f"{said} the limit of {cost['limit']:.0%}"]
