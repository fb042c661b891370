"""`PrefixIndex`: which engines have probably computed the beginning of a prompt.

Beginnings are kept in blocks of tokens by a hash of all up to there, the least recently used go
first. It is a guess from outside: an engine may have given the pages away.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

BLOCK = 32  # tokens
MOST_BLOCKS = 1 << 17


class PrefixIndex:
    """Blocks by the engines that have them."""

    def __init__(self, most: int = MOST_BLOCKS) -> None:
        self._most = most
        self._engines: OrderedDict[int, set[int]] = OrderedDict()

    def names(self, tokens: Sequence[int], root: str = "") -> list[int]:
        """Return the names of a prompt's whole blocks, each standing for all before it."""
        row = np.asarray(tokens, np.int32)
        names, before = [], hash(root)
        for start in range(0, len(row) - BLOCK + 1, BLOCK):
            before = hash((before, row[start : start + BLOCK].tobytes()))
            names.append(before)
        return names

    def known(self, names: Sequence[int], engine: int) -> int:
        """Return how many tokens of a prompt's beginning an engine has."""
        count = 0
        for name in names:
            if engine not in self._engines.get(name, ()):
                break
            count += BLOCK
        return count

    def add(self, names: Sequence[int], engine: int) -> None:
        """Let an engine have a prompt."""
        for name in names:
            self._engines.setdefault(name, set()).add(engine)
            self._engines.move_to_end(name)
        while len(self._engines) > self._most:
            self._engines.popitem(last=False)

    def forget(self, engine: int) -> None:
        """Let an engine have nothing any more."""
        for name in [name for name, held in self._engines.items() if engine in held]:
            self._engines[name].discard(engine)
            if not self._engines[name]:
                del self._engines[name]
