"""`tutti evaluate`: multiple-choice tasks and perplexity of a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tutti.cli.shared.output import Json, print_json, print_rich
from tutti.cli.shared.torch_needed import require_torch


def evaluate(
    folder: Annotated[Path, typer.Argument(help="A Hugging Face or a tutti folder.")],
    tasks: Annotated[list[str], typer.Argument(help="Files: .jsonl of records, or .txt.")],
    most: Annotated[int, typer.Option(help="Records of each task; 0: all.")] = 0,
    delimiter: Annotated[str, typer.Option(help="Between a context and a choice.")] = " ",
    adapter: Annotated[Path | None, typer.Option(help="A LoRA adapter of PEFT.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Another folder's tokenizer, or 'bytes'.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda:1, …; the best here.")] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; the weights'.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Of a context; the model's.")] = None,
    json: Json = False,
) -> None:
    """Hold a model against tasks: which choice it finds likeliest, how well it predicts a text."""
    require_torch("evaluate")
    from tutti.recipes.evaluation import evaluate_folder
    from tutti.train.evaluation.config import EvaluateConfig, TaskConfig

    listed = tuple(TaskConfig(path=path, most=most, delimiter=delimiter) for path in tasks)
    _require_titles(EvaluateConfig, listed)
    figures_by_task = evaluate_folder(
        folder, listed, adapter=adapter, tokenizer=tokenizer, device=device, dtype=dtype,
        max_length=max_length,
    )  # fmt: skip
    if json:
        print_json({"tasks": figures_by_task})
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("task", "figure"):
        table.add_column(title)
    table.add_column("value", justify="right")
    for task, figures in figures_by_task.items():
        for name, value in figures.items():
            table.add_row(task, name, _text(name, value))
    print_rich(table)


def _require_titles(config: type, tasks: tuple[object, ...]) -> None:
    from tutti.errors import InputError

    try:
        config(tasks=tasks)
    except ValueError as error:
        raise InputError(str(error)) from None


def _text(name: str, value: float) -> str:
    if name in ("questions", "tokens"):
        return f"{value:,.0f}"
    return f"{value:.2%}" if name.startswith("accuracy") else f"{value:.4f}"
