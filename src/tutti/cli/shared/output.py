"""How every verb prints: a table for people, JSON for machines, one line for an error."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tutti.cli.shared.terminal import can_show

if TYPE_CHECKING:
    from tutti.models.spec import ModelSpec

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def print_json(value: Any) -> None:
    """Print a plain value as indented JSON on standard output."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    if not can_show(text):  # escaped, not replaced: the values stay what they are
        text = json.dumps(value, indent=2)
    sys.stdout.write(text + "\n")


def print_rich(*renderables: Any) -> None:
    """Print rich renderables to standard output, at a fixed width where it is no terminal."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    for renderable in renderables:
        console.print(renderable)


def say_doubtful_length(spec: ModelSpec, length: int) -> None:
    """Warn on standard error where sequences are longer than a model was made for."""
    from tutti.models.lengths import length_warning

    if words := length_warning(spec, length):
        typer.echo(f"note: {words}", err=True)
