"""`tutti bench data`: how fast training data are prepared."""

from __future__ import annotations

from typing import Annotated

import typer

from tutti.cli.shared.output import Json, print_json, print_rich


def data(
    tokenizer: Annotated[
        list[str] | None,
        typer.Option(help="A Hugging Face folder, beside the built-in bytes; may be repeated."),
    ] = None,
    megabytes: Annotated[float, typer.Option(min=0.01, help="Text that is tokenised.")] = 50.0,
    json: Json = False,
) -> None:
    """Time tokenising, packing, looking up rows and feeding a rank."""
    from dataclasses import asdict

    from rich import box
    from rich.table import Table

    from tutti.bench.data_preparation import measure, per_second
    from tutti.huggingface.tokenizer import open_tokenizer

    opened = [open_tokenizer(name) for name in ("bytes", *(tokenizer or ()))]
    rows = list(measure(opened, megabytes))
    if json:
        print_json([{**asdict(row), "tokens_per_cpu_s": per_second(row)} for row in rows])
        return
    table = Table(box=box.SIMPLE, title="Training data; seconds of CPU, all processes together")
    table.add_column("what")
    for name in ("tokens", "CPU s", "clock s", "million tokens per CPU s"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.what, f"{row.tokens:,}", f"{row.cpu_s:.2f}", f"{row.clock_s:.2f}",
            f"{per_second(row) / 1e6:.2f}",
        )  # fmt: skip
    print_rich(table)
