"""Names of hosts in short, as Slurm writes them: "gpu[00-03,7].example"."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from tutti.errors import InputError

_RANGE = re.compile(r"\[([^\[\]]*)\]")
_NUMBERED = re.compile(r"(.*?)(\d{1,9})")
_MOST_NAMES = 100_000


def expand_names(text: str) -> list[str]:
    """Return the host names that "gpu[00-03,7].example" stands for, as Slurm writes them."""
    match = _RANGE.search(text)
    if match is None:
        if "[" in text or "]" in text:
            raise InputError(f"hosts: '{text}': a bracket is not closed; write 'gpu[0-7]'")
        return [text]
    head, tail = text[: match.start()], text[match.end() :]
    numbers: list[str] = []
    for part in match[1].split(","):
        low, dash, high = part.partition("-")
        high = high if dash else low
        if not (low.isdecimal() and high.isdecimal()) or int(high) < int(low):
            raise InputError(f"hosts: '{text}': write ranges like 'gpu[0-7]' or 'gpu[00-15,20]'")
        if int(high) - int(low) >= _MOST_NAMES:
            raise InputError(f"hosts: '{text}' stands for more than {_MOST_NAMES:,} names")
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return [head + number + rest for rest in expand_names(tail) for number in numbers]


def split_names(text: str) -> list[str]:
    """Return all names of a list such as "a[0-3],b7", in which commas also stand inside ranges."""
    parts = re.split(r",(?![^\[]*\])", text)
    return [name for part in parts if part.strip() for name in expand_names(part.strip())]


def short_names(names: Iterable[str]) -> str:
    """Return names in short: numbers at their ends as ranges."""
    groups: dict[tuple[str, int], list[int]] = defaultdict(list)
    plain: list[str] = []
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match is None:
            plain.append(name)
        else:
            groups[match[1], len(match[2])].append(int(match[2]))
    for (head, width), numbers in groups.items():
        runs: list[list[int]] = []
        for number in sorted(numbers):
            if runs and number == runs[-1][1] + 1:
                runs[-1][1] = number
            else:
                runs.append([number, number])
        words = [
            f"{low:0{width}}" if low == high else f"{low:0{width}}-{high:0{width}}"
            for low, high in runs
        ]
        one = len(words) == 1 and "-" not in words[0]
        plain.append(f"{head}{words[0]}" if one else f"{head}[{','.join(words)}]")
    return ",".join(plain)
