"""What `tutti align A B` is beside its two commands: the short form, its help, its errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typer.core import TyperGroup

from tutti.errors import InputError


class CompareByDefault(TyperGroup):
    """Reads `tutti align A B` as `tutti align compare A B`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the command before what is not one."""
        plain = [argument for argument in args if not argument.startswith("-")]
        if plain and plain[0] not in self.commands:
            args = ["compare", *args]
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Explain `tutti align A B` whole, for that is what is asked; then the other command."""
        short = self.get_command(ctx, "compare")
        assert short is not None
        formatter.write_usage(ctx.command_path, "[OPTIONS] A B")
        self.format_help_text(ctx, formatter)
        inner = short.make_context("compare", [], parent=ctx, resilient_parsing=True)
        short.format_options(inner, formatter)
        others = [(n, c.get_short_help_str(60)) for n, c in self.commands.items() if c is not short]
        with formatter.section("Also (tutti align COMMAND -h)"):
            formatter.write_dl([*others, ("compare", "The same as `tutti align A B`.")])


@contextmanager
def called_as(scratch: str, a: str, b: str) -> Iterator[None]:
    """Let errors call a side by what was typed, not by the folder that its dump passes through."""
    try:
        yield
    except InputError as error:
        text = str(error)
        for name, folder in (("a", a), ("b", b)):
            text = text.replace(str(Path(scratch) / name), folder)
        raise InputError(text) from error


def refuse_hub_ids(*sides: str) -> None:
    """Answer names of the hub, which are no folders."""
    from tutti.models.load import hub_error, is_hub_id

    for text in sides:
        if is_hub_id(text):
            raise hub_error(text)
