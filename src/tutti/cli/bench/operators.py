"""`tutti bench operators`: the device's operators beside their plain torch compositions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.units import many

if TYPE_CHECKING:
    from tutti.accelerator.operator_bench import OperatorRow


def operators(
    device: Annotated[
        str | None, typer.Option(help="Which device, such as cpu; the best here if left out.")
    ] = None,
    model: Annotated[list[str] | None, typer.Option(help="Whose shapes; may be repeated.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens in a batch.")] = 8192,
    sequence_length: Annotated[int, typer.Option(min=1)] = 4096,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved repeats.")] = 20,
    json: Json = False,
) -> None:
    """Time operators, forward and backward, beside their plain torch compositions."""
    import torch

    from tutti.accelerator import open_accelerator
    from tutti.accelerator.operator_bench import measure
    from tutti.errors import InputError, hint
    from tutti.models.load import load_model

    kinds = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if dtype not in kinds:
        raise InputError(f"--dtype: '{dtype}'; {hint(dtype, kinds)}")
    if tokens % sequence_length:
        raise InputError(
            f"--tokens: {tokens} are not whole sequences of {sequence_length}; give a multiple"
        )
    accelerator = open_accelerator(device)
    rows = [
        row
        for name in model or ["llama-3.2-1b", "llama-3.1-8b"]
        for row in measure(
            accelerator,
            load_model(name),
            tokens=tokens,
            length=sequence_length,
            dtype=kinds[dtype],
            rounds=rounds,
        )
    ]
    if json:
        print_json({"chip": accelerator.chip, "dtype": dtype, "rows": [_plain(r) for r in rows]})
        return
    _print(
        rows,
        f"{accelerator.chip}, {dtype}, forward and backward, medians of {many(rounds, 'round')}",
    )


def _plain(row: OperatorRow) -> dict[str, object]:
    return {
        "model": row.model,
        "operator": row.operator,
        "shape": row.shape,
        "implementation": row.implementation,
        "plain_ms": row.plain.seconds * 1e3,
        "ours_ms": row.ours.seconds * 1e3,
        "speedup": row.speedup,
        "plain_peak_bytes": row.plain.peak_bytes,
        "ours_peak_bytes": row.ours.peak_bytes,
        "others_ms": {name: seconds * 1e3 for name, seconds in row.others.items()},
    }


def _print(rows: list[OperatorRow], title: str) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, title=title)
    for name in ("model", "operator", "shape", "runs"):
        table.add_column(name)
    for name in ("plain ms", "ours ms", "faster", "memory", "others ms"):
        table.add_column(name, justify="right")
    for row in rows:
        share = row.memory_share
        table.add_row(
            row.model,
            row.operator,
            row.shape,
            row.implementation,
            f"{row.plain.seconds * 1e3:.3f}",
            f"{row.ours.seconds * 1e3:.3f}",
            f"{row.speedup:.2f}×",
            "–" if share is None else f"{share:.0%}",
            ", ".join(f"{name} {seconds * 1e3:.3f}" for name, seconds in row.others.items()),
        )
    print_rich(table)
