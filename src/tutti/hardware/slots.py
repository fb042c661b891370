"""Sets of chip slots inside a node, written "0-7" or "0-3,8"."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from tutti.document import Place, shown

MOST_SLOTS = 4096


@dataclass(frozen=True, slots=True)
class Slots:
    """Slot numbers in ascending order, without repeats."""

    numbers: tuple[int, ...]

    document_shape: ClassVar[tuple[type, ...]] = (str, int, list)

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def __contains__(self, slot: int) -> bool:
        return slot in self.numbers

    def __str__(self) -> str:
        runs: list[list[int]] = []
        for number in self.numbers:
            if runs and number == runs[-1][1] + 1:
                runs[-1][1] = number
            else:
                runs.append([number, number])
        return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)

    def below(self, limit: int) -> Slots:
        """Return those slots that a node of `limit` chips has."""
        return Slots(tuple(n for n in self.numbers if n < limit))

    def to_document(self) -> str:
        """Return the written form."""
        return str(self)

    @classmethod
    def from_document(cls, value: object, place: Place) -> Slots:
        """Read "0-7", "0-3,8", 5 or [0, 1, 2]."""
        parts = value if isinstance(value, list) else [value]
        numbers: list[int] = []
        for part in parts:
            for first, last in _runs(part, place, shown(value)):
                if last >= MOST_SLOTS:
                    raise place.value_error(f"is {shown(value)}; a node has at most {MOST_SLOTS}")
                numbers.extend(range(first, last + 1))
        if len(set(numbers)) != len(numbers):
            raise place.value_error(f"is {shown(value)}, which names a slot twice")
        return cls(tuple(sorted(numbers)))


def _runs(part: object, place: Place, whole: str) -> list[tuple[int, int]]:
    if isinstance(part, bool) or not isinstance(part, (int, str)):
        raise place.value_error(f"is {whole}; write slots like '0-7' or '0-3,8'")
    runs = []
    for text in str(part).split(","):
        first, dash, last = text.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() if dash else True)) or len(text) > 20:
            raise place.value_error(f"is {whole}; write slots like '0-7' or '0-3,8'")
        run = (int(first), int(last) if dash else int(first))
        if run[1] < run[0]:
            raise place.value_error(f"is {whole}; {run[0]} comes after {run[1]}")
        runs.append(run)
    return runs
