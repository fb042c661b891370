"""How lists of numbers, fractions and repetitions are written in documents.

"0-7" is 0 to 7, "0-56:8" every eighth, "5,2,9-7:-1" keeps the order it is written in. A list of
member lists that only shift ("0-7", "8-15", …) is written once, with `times` and `shift`. Owns
the text forms only; knows nothing of groups or programs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, TypeVar

from tutti.document import Place, shown

K = TypeVar("K")

_RUN = re.compile(r"(\d+)(?:-(\d+)(?::(-?\d+))?)?")
_MOST_NUMBERS = 1 << 20  # a list longer than this is a slip of the pen, not a cluster


def runs(numbers: Sequence[int]) -> tuple[range, ...]:
    """Return the numbers, in their order, as few arithmetic runs."""
    if isinstance(numbers, range) and numbers:
        return (numbers,)
    ranges: list[range] = []
    at = 0
    while at < len(numbers):
        end = _run_end(numbers, at)
        step = numbers[at + 1] - numbers[at] if end - at > 1 else 1
        if step == 0 or (end - at == 2 and step != 1):
            end, step = at + 1, 1
        first, last = numbers[at], numbers[end - 1]
        ranges.append(range(first, last + (1 if step > 0 else -1), step))
        at = end
    return tuple(ranges)


def _run_end(numbers: Sequence[int], at: int) -> int:
    end = at + 1
    while end < len(numbers) and numbers[end] - numbers[end - 1] == numbers[at + 1] - numbers[at]:
        end += 1
    return end


def write_run(run: range) -> str:
    """Return "3", "0-7" or "0-56:8"."""
    if len(run) == 1:
        return str(run[0])
    text = f"{run[0]}-{run[-1]}"
    return text if run.step == 1 else f"{text}:{run.step}"


def write_numbers(numbers: Sequence[int]) -> str:
    """Return a list of numbers, in its order, as short text."""
    return ",".join(write_run(run) for run in runs(numbers))


def read_run(text: str, place: Place) -> range:
    """Parse what `write_run` writes."""
    match = _RUN.fullmatch(text.strip())
    if match is None or len(text) > 40:
        raise place.value_error(f"is {shown(text)}; expected numbers such as '0-7' or '0-56:8'")
    first = int(match[1])
    last = int(match[2] or first)
    step = int(match[3] or 1)
    run = range(first, last + (1 if step > 0 else -1), step) if step else range(0)
    if not run or run[-1] != last:
        raise place.value_error(f"is {shown(text)}, which does not reach {last} from {first}")
    if last - first > _MOST_NUMBERS * abs(step):
        raise place.value_error(f"is {shown(text)}; at most {_MOST_NUMBERS} numbers can be listed")
    return run


def read_numbers(value: object, place: Place) -> tuple[int, ...]:
    """Parse what `write_numbers` writes; a plain list of numbers is taken too."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return (value,)
    if isinstance(value, list) and all(type(n) is int and n >= 0 for n in value):
        return tuple(value)
    if not isinstance(value, str):
        raise place.value_error(f"is {shown(value)}; expected numbers such as '0-7' or '0-56:8'")
    if not value:
        return ()
    numbers: list[int] = []
    for text in value.split(","):
        numbers.extend(read_run(text, place))
        if len(numbers) > _MOST_NUMBERS:
            raise place.value_error(f"lists more than {_MOST_NUMBERS} numbers")
    return tuple(numbers)


def read_fraction(text: str, place: Place) -> Fraction:
    """Parse "3/8", "0" or "1"."""
    if not re.fullmatch(r"-?\d{1,1000}(/\d{1,1000})?", text) or re.search(r"/0+$", text):
        raise place.value_error(f"is {shown(text)}; expected a fraction such as 3/8")
    return Fraction(text)


# --- lists of lists that only shift ----------------------------------------------------------


def _is_shifted(one: Sequence[int], other: Sequence[int], shift: int) -> bool:
    return len(one) == len(other) and all(b - a == shift for a, b in zip(one, other, strict=True))


def _times(items: Sequence[tuple[Sequence[int], K]], at: int) -> tuple[int, int]:
    """Return how many items from `at` on only shift, and by how much."""
    members, key = items[at]
    if at + 1 == len(items) or not members or not items[at + 1][0]:
        return 1, 0
    shift = items[at + 1][0][0] - members[0]
    end = at + 1
    while end < len(items):
        if not _is_shifted(items[end - 1][0], items[end][0], shift) or items[end][1] != key:
            break
        end += 1
    return end - at, shift


def fold(items: Sequence[tuple[Sequence[int], K]]) -> Iterator[tuple[dict[str, Any], K]]:
    """Yield (how often and by what shift, key) for runs of equal items with shifting numbers.

    The mapping holds "members", and "times" and "shift" where the item repeats.
    """
    at = 0
    while at < len(items):
        members, key = items[at]
        times, shift = _times(items, at)
        written: dict[str, Any] = {"members": write_numbers(members)}
        if times > 1:
            written |= {"times": times, "shift": shift}
        yield written, key
        at += times


def unfold(members: Sequence[int], times: int, shift: int, place: Place) -> list[tuple[int, ...]]:
    """Return the member lists that `fold` wrote as one."""
    if times * max(1, len(members)) > _MOST_NUMBERS:
        raise place.error(f"repeats to more than {_MOST_NUMBERS} numbers")
    return [tuple(member + shift * k for member in members) for k in range(times)]
