"""`tutti bench train`: whole training steps on one chip, beside a plain Hugging Face loop."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.cli.shared.progress import ProgressLine
from tutti.cli.shared.torch_needed import require_torch
from tutti.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from tutti.bench.training.question import SpeedQuestion


class FrozenBase(StrEnum):
    """How frozen weights are held beside adapters."""

    WIDE = "wide"
    INT8 = "int8"
    NF4 = "nf4"


class Capture(StrEnum):
    """Whether our blocks run as graphs, as a training job says it."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


Device = Annotated[str | None, typer.Option(help="cpu, cuda, … (default: the best here).")]
Layers = Annotated[int | None, typer.Option(help="Fewer layers than the model has.", min=1)]
Precision = Annotated[
    str,
    typer.Option(help="pure_bf16 (bf16 Adam states on both sides), bf16, fp32, fp8, pure_fp8."),
]
CaptureOption = Annotated[
    Capture, typer.Option(help="Our blocks as graphs: where it pays, or can be.")
]
Peers = Annotated[
    bool,
    typer.Option(
        "--peers/--no-peers", help="Also transformers, Liger, torchtitan: what is installed."
    ),
]
Breakdown = Annotated[
    bool, typer.Option("--breakdown", help="Where each millisecond of our step goes.")
]
AllTypes = Annotated[bool, typer.Option("--all", help="One model of each type, instead of MODEL.")]
MostParameters = Annotated[
    float, typer.Option(help="With --all: layers are cut down to so many parameters.", min=1)
]
Types = Annotated[
    str, typer.Option(help="With --all: these model types alone, with commas.", metavar="LIST")
]
Lora = Annotated[
    int | None, typer.Option(help="Train adapters of this rank on every linear layer.", min=1)
]
Recomputed = Annotated[
    bool, typer.Option("--recompute", help="Blocks keep their inputs alone, on both sides.")
]
Target = Annotated[
    float, typer.Option(help="With --breakdown: what this MFU would need.", min=0.01, max=1.0)
]


def train(
    model: Annotated[str, typer.Argument(help="A model of the catalog, by name.")] = "llama-3.2-1b",
    device: Device = None,
    micro_batch: Annotated[int, typer.Option(help="Sequences of a step.", min=1)] = 4,
    sequence_length: Annotated[int, typer.Option(help="Tokens of a sequence.", min=1)] = 4096,
    layers: Layers = None,
    precision: Precision = "pure_bf16",
    steps: Annotated[int, typer.Option(help="Timed steps.", min=1)] = 10,
    capture: CaptureOption = Capture.AUTO,
    lora: Lora = None,
    base: Annotated[
        FrozenBase, typer.Option(help="With --lora: frozen weights.")
    ] = FrozenBase.WIDE,
    recompute: Recomputed = False,
    peers: Peers = True,
    breakdown: Breakdown = False,
    all_types: AllTypes = False,
    most_parameters: MostParameters = 4e9,
    types: Types = "",
    target: Target = 0.68,
    json: Json = False,
) -> None:
    """Time whole steps (forward, backward, AdamW) of one chip: seconds, MFU, peak memory."""
    require_torch("bench train")
    if base is not FrozenBase.WIDE and lora is None:
        raise InputError(f"--base {base.value} is for weights beside adapters; give --lora RANK")
    from tutti.bench.training.question import SpeedQuestion
    from tutti.bench.training.speed import speeds

    asked = SpeedQuestion(
        model=model, device=device, micro_batch=micro_batch, sequence_length=sequence_length,
        layers=layers, precision=precision, steps=steps,
        capture=capture.value, lora=lora, base=base.value, recompute=recompute,
    )  # fmt: skip
    with ProgressLine("training", wanted=not json) as line:
        if all_types:
            _every_type(asked, most_parameters, types, line, peers=peers, json=json)
            return
        rows = speeds(asked, line.say, peers=peers, breakdown=breakdown)
    if json:
        print_json({"rows": rows})
        return
    print_rich(_table(rows, asked.title))
    if breakdown:
        print_rich(_where(rows[0]))
        print_rich(_parts(rows[0]))
        if rows[0]["mfu"] is not None:
            from tutti.bench.training.breakdown import Part, needed

            typer.echo(needed([Part(**part) for part in rows[0]["parts"]], rows[0]["mfu"], target))


def _every_type(
    asked: SpeedQuestion, most: float, types: str, line: ProgressLine, *, peers: bool, json: bool
) -> None:
    """Time one model of each type, and show each as soon as it is known."""
    from tutti.bench.training.model_types import one_of_each_type, speeds_apart

    wanted = [name.strip() for name in types.split(",") if name.strip()]
    questions = list(one_of_each_type(asked, most, wanted))
    rows: list[dict[str, Any]] = []
    line.say(f"1 of {len(questions)}: {questions[0].title}")
    for number, (each, measured) in enumerate(speeds_apart(questions, peers=peers), 2):
        rows += [row | {"title": each.title} for row in measured]
        if not json:
            print_rich(_table(measured, each.title))
        if number <= len(questions):
            line.say(f"{number} of {len(questions)}: {questions[number - 1].title}")
    if json:
        print_json({"rows": rows})


def _table(rows: list[dict[str, Any]], title: str) -> Table:
    from rich.table import Table

    from tutti.units import bytes_text, count_text

    table = Table(title=title)
    names = ("who", "step", "predicted", "tutti is", "tokens/s", "MFU", "peak memory", "predicted")
    for name in (*names, "loss"):
        table.add_column(name, justify="left" if name == "who" else "right")
    for row in rows:
        if "failed" in row:
            table.add_row(row["who"], row["failed"])
            continue
        table.add_row(
            row["who"],
            f"{row['step_s'] * 1e3:.1f} ms",
            f"{row['predicted_s'] * 1e3:.1f} ms" if row.get("predicted_s") else "",
            f"{row['slower']:.2f}×" if "slower" in row else "",
            count_text(row["tokens_per_s"]),
            f"{row['mfu']:.3f}" if row["mfu"] is not None else "–",
            bytes_text(row["peak_bytes"]),
            bytes_text(row["predicted_bytes"]) if "predicted_bytes" in row else "",
            f"{row['loss']:.4f}",
        )
    return table


def _where(row: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(title="where our step goes")
    for name in ("what", "ms", "share"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for name, seconds in row["breakdown"].items():
        table.add_row(name, f"{seconds * 1e3:.2f}", f"{seconds / row['step_s']:.1%}")
    return table


def _parts(row: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(title="what the chip does meanwhile")
    for name in ("what", "ms", "share", "least ms"):
        table.add_column(name, justify="left" if name == "what" else "right")
    whole = sum(part["seconds"] for part in row["parts"])
    for part in row["parts"]:
        least = f"{part['least_s'] * 1e3:.2f}" if part["least_s"] else "–"
        table.add_row(
            part["name"], f"{part['seconds'] * 1e3:.2f}", f"{part['seconds'] / whole:.1%}", least
        )
    return table
