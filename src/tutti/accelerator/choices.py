"""Which implementation was measured fastest: a table per chip, by operator, dtype and size.

`tutti accelerator tune` writes it; shipped tables lie in `measured/`. Sizes are those of the first
tensor, in steps of four; a size between or outside measured ones takes the nearest.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tutti import files
from tutti.accelerator.segments import Segments
from tutti.document import Natural, Place, build, plain
from tutti.errors import hint

MEASURED = Path(__file__).parent / "measured"
OVERRIDE = "TUTTI_CHOICES"  # a table to use instead of the one that ships for the chip


def bucket(elements: int) -> int:
    """Return the size class of a tensor: log₄ of its elements, rounded down."""
    return int(math.log2(max(1, elements))) // 2


@dataclass(frozen=True, slots=True)
class Size:
    """What a choice goes by: the dtype of a call, and the size class of its first tensor."""

    dtype: str
    size_class: int


def size_of(args: Sequence[Any]) -> Size | None:
    """Return the size of a call; None where it has no tensor, or a shape that is not measured.

    Attention is measured on rectangles: what is best there says nothing of packed sequences.
    """
    if any(isinstance(arg, Segments) and not arg.is_batch for arg in args):
        return None
    groups = (arg if isinstance(arg, list | tuple) else (arg,) for arg in args)
    tensors = [item for group in groups for item in group if isinstance(item, torch.Tensor)]
    dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)
    if dtype is None:
        return None
    return Size(str(dtype).removeprefix("torch."), bucket(tensors[0].numel()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The implementation that was fastest for an operator, a dtype and a size."""

    operator: str
    dtype: str
    size_class: Natural
    implementation: str
    speedup: float | None = None  # over the reference in the same run


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicesFile:
    """What a table's file holds."""

    origin: str
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class Choices:
    """(operator, dtype) → size class → implementation."""

    table: Mapping[tuple[str, str], Mapping[int, str]] = field(default_factory=dict)
    origin: str = "nothing was measured"

    def best(self, operator: str, args: Sequence[Any]) -> str | None:
        """Return the implementation measured fastest for a call, if any was."""
        if not self.table:
            return None
        own = size_of(args)
        sizes = self.table.get((operator, own.dtype)) if own is not None else None
        if own is None or not sizes:
            return None
        return sizes[min(sizes, key=lambda size: (abs(size - own.size_class), size))]

    def names(self, operator: str) -> tuple[str, ...]:
        """Return the implementations that were fastest for some size of an operator."""
        rows = (sizes.values() for (own, _), sizes in self.table.items() if own == operator)
        return tuple(dict.fromkeys(name for names in rows for name in names))

    @classmethod
    def of_chip(cls, chip: str) -> Choices:
        """Return the table that the user names, else the one that ships for the chip, if any."""
        given = os.environ.get(OVERRIDE)
        if given:
            return cls.load(Path(given))
        path = MEASURED / f"{file_name(chip)}.json"
        return cls.load(path) if path.is_file() else cls()

    @classmethod
    def load(cls, path: Path) -> Choices:
        """Read a table."""
        from tutti.accelerator.registry import operator_names

        place = Place(path.name)
        content = build(ChoicesFile, files.read_file(path), place)
        for number, choice in enumerate(content.choices):
            if choice.operator not in operator_names():
                where = place.key("choices").item(number, {}).key("operator")
                raise where.value_error(
                    f"is '{choice.operator}'; {hint(choice.operator, operator_names())}"
                )
        return cls.of(content.choices, content.origin)

    @classmethod
    def of(cls, choices: Sequence[Choice], origin: str) -> Choices:
        """Return the table of single choices."""
        table: dict[tuple[str, str], dict[int, str]] = {}
        for choice in choices:
            sizes = table.setdefault((choice.operator, choice.dtype), {})
            sizes[choice.size_class] = choice.implementation
        return cls(table, origin)


def save(choices: Sequence[Choice], origin: str, path: Path) -> None:
    """Write a table."""
    files.write_text(
        path, files.pretty_json(plain(ChoicesFile(origin=origin, choices=tuple(choices)))) + "\n"
    )


def file_name(chip: str) -> str:
    """Return a chip's name as part of a file name."""
    return "-".join(chip.lower().replace("/", " ").split())
