"""Which nodes have other numbers in a changed cluster, in words."""

from __future__ import annotations

from collections.abc import Mapping

from tutti.search.question.single_changes import NodePlace


def renumbered(moved: Mapping[NodePlace, NodePlace]) -> dict[str, str]:
    """Return the nodes that have another number now: "a800/4" → "a800/3"."""
    changed = ((old, new) for old, new in moved.items() if old != new)
    return {f"{a[0]}/{a[1]}": f"{b[0]}/{b[1]}" for a, b in changed}


def renumbering_text(moved: Mapping[NodePlace, NodePlace]) -> str:
    """Return the same in a line: "a800/4-7 → a800/3-6"; empty where all have kept theirs."""
    runs: list[tuple[NodePlace, NodePlace, int]] = []  # first old, first new, how many
    for old, new in moved.items():
        if old == new:
            continue
        if runs:
            first, to, count = runs[-1]
            if (old, new) == ((first[0], first[1] + count), (to[0], to[1] + count)):
                runs[-1] = (first, to, count + 1)
                continue
        runs.append((old, new, 1))

    def span(place: NodePlace, count: int) -> str:
        last = f"-{place[1] + count - 1}" if count > 1 else ""
        return f"{place[0]}/{place[1]}{last}"

    return ", ".join(f"{span(old, n)} → {span(new, n)}" for old, new, n in runs)
