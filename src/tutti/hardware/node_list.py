"""Nodes of a cluster as a person writes them: "a800/0-3,7 p800/2"."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

from tutti.errors import InputError
from tutti.hardware.pool import Pool

_PART = re.compile(r"([^/\s]+)/(\d{1,7}(?:-\d{1,7})?(?:,\d{1,7}(?:-\d{1,7})?)*)")


def parse_nodes(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Read "pool/0-3,7" once or several times, blanks or semicolons between."""
    nodes: dict[str, list[int]] = {}
    for word in itertools.chain.from_iterable(re.split(r"[\s;]+", text) for text in texts):
        if not word:
            continue
        match = _PART.fullmatch(word)
        if match is None:
            raise InputError(f"'{word}' names no nodes; write them as 'pool/0-3,7'")
        for part in match[2].split(","):
            first, _, last = part.partition("-")
            low, high = int(first), int(last or first)
            if high < low:
                raise InputError(f"'{word}': {part} runs backwards; write {high}-{low}")
            nodes.setdefault(match[1], []).extend(range(low, high + 1))
    if not nodes:
        raise InputError("no nodes are named; write them as 'pool/0-3,7'")
    return {pool: tuple(numbers) for pool, numbers in nodes.items()}


def nodes_text(nodes: Mapping[str, Sequence[int]]) -> str:
    """Return the same in short, in the order of the nodes."""
    words = []
    for pool, numbers in nodes.items():
        runs: list[list[int]] = []
        for number in numbers:
            if runs and number == runs[-1][1] + 1:
                runs[-1][1] = number
            else:
                runs.append([number, number])
        spans = (str(low) if low == high else f"{low}-{high}" for low, high in runs)
        words.append(f"{pool}/{','.join(spans)}")
    return " ".join(words)


def check_chosen(pool: Pool, nodes: Sequence[int]) -> None:
    """Refuse nodes that a pool does not have, and a node named twice."""
    seen: set[int] = set()
    for node in nodes:
        if not 0 <= node < pool.nodes:
            raise InputError(
                f"no node {node} in pool '{pool.name}'; it has nodes 0-{pool.nodes - 1}"
            )
        if node in seen:
            raise InputError(f"node {pool.name}/{node} is named twice")
        seen.add(node)
