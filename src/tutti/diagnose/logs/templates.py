"""What kinds of lines there are: a tree of templates, grown as lines come. Pure.

A line's words lead down the tree: by how many they are, then by the first few; words with digits,
paths and addresses count as any. At a leaf a line joins the template that shares enough of its
words, whose other words become any. Its size is bounded; beyond that, lines join the nearest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

ANY = "*"
_DEPTH = 3  # first words that lead down
_ALIKE = 0.6  # share of words that a line has in common with its template
_MOST_WORDS = 40
_MOST_AT_LEAF = 64
_VARIABLE = re.compile(r"\d|^0x|/|^['\"<\[{(]")


@dataclass(slots=True)
class Template:
    """One kind of line, who said it and how often."""

    words: list[str]
    count: int = 0
    first: tuple[str, int] = ("", 0)  # file and line
    example: str = ""
    hosts: dict[str, int] = field(default_factory=dict)

    def text(self) -> str:
        """Return the words that its lines have in common."""
        return " ".join(self.words)


class TemplateTree:
    """All kinds of lines of some logs."""

    def __init__(self) -> None:
        self._leaves: dict[tuple[object, ...], list[Template]] = {}

    def add(self, text: str, *, file: str, line: int, host: str) -> Template:
        """Count a line, and return its kind."""
        words = masked(text)[:_MOST_WORDS]
        key = (len(words), *words[:_DEPTH])
        leaf = self._leaves.setdefault(key, [])
        best = max(leaf, key=lambda t: _alike(t.words, words), default=None)
        if best is None or (_alike(best.words, words) < _ALIKE and len(leaf) < _MOST_AT_LEAF):
            best = Template(list(words), first=(file, line), example=text)
            leaf.append(best)
        best.words = [
            mine if mine == other else ANY for mine, other in zip(best.words, words, strict=True)
        ]
        best.count += 1
        best.hosts[host] = best.hosts.get(host, 0) + 1
        return best

    def templates(self) -> list[Template]:
        """Return all kinds, those first seen first."""
        return [template for leaf in self._leaves.values() for template in leaf]

    def said_by_one(self) -> list[Template]:
        """Return the kinds that one host says and no other, where there are at least three."""
        hosts = {host for template in self.templates() for host in template.hosts if host}
        if len(hosts) < 3:
            return []
        alone = [t for t in self.templates() if len(t.hosts) == 1 and next(iter(t.hosts))]
        return sorted(alone, key=lambda t: t.count)


def masked(text: str) -> list[str]:
    """Return a line's words, those that differ from line to line as any."""
    return [ANY if _VARIABLE.search(word) else word for word in text.split()]


def _alike(one: list[str], other: list[str]) -> float:
    if not one:
        return 1.0
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)
