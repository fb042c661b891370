"""What a step takes, as a scheduler asks it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np


class StepSize(NamedTuple):
    """What a step's time hangs on."""

    decodes: int  # rows of one token
    prefill: int  # tokens of longer rows
    keys: int  # that rows of one token look at
    pairs: int = 0  # of a query and a key that it looks at, in longer rows
    back: int = 0  # longer rows that look at tokens stored before
    stows: int = 0  # pages that move to the host
    fetches: int = 0  # pages that come back

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return self.decodes + self.prefill

    def with_chunk(self, start: int, count: int) -> StepSize:
        """Return the size with another row, of so many tokens behind so many that are stored."""
        pairs = count * start + count * (count + 1) // 2
        back = self.back + (start > 0)
        return self._replace(prefill=self.prefill + count, pairs=self.pairs + pairs, back=back)


class Prices(Protocol):
    """Predicted seconds of a step."""

    def seconds(self, size: StepSize) -> float:
        """Return the time of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearPrices:
    """A step's time as a sum: a fixed part, each token's, each key's, each pair's."""

    step_s: float
    token_s: float
    key_s: float = 0.0
    pair_s: float = 0.0
    stow_s: float = 0.0  # a page to the host
    fetch_s: float = 0.0  # a page back

    def seconds(self, size: StepSize) -> float:
        """Return the time of a step."""
        read = self.key_s * size.keys + self.pair_s * size.pairs
        read += self.stow_s * size.stows + self.fetch_s * size.fetches
        return self.step_s + self.token_s * size.tokens + read


@dataclass(frozen=True, slots=True, kw_only=True)
class TabledPrices:
    """A step's time from measured ones, each without keys: by tokens, between them on a line.

    Where steps are filled up to certain sizes they cost what those cost.
    """

    decode: Sequence[tuple[int, float]]  # rows of one token alone, and seconds
    mixed: Sequence[tuple[int, float]]  # tokens of steps with longer rows, and seconds
    key_s: float
    pair_s: float
    back_s: float = 0.0  # more of a step in which a longer row looks back
    decode_sizes: Sequence[int] = ()  # that rows are filled up to
    mixed_sizes: Sequence[int] = ()  # that tokens are filled up to
    stow_s: float = 0.0  # a page to the host
    fetch_s: float = 0.0  # a page back

    def seconds(self, size: StepSize) -> float:
        """Return the time of a step."""
        table = self.mixed if size.prefill else self.decode
        sizes = self.mixed_sizes if size.prefill else self.decode_sizes
        tokens = next((filled for filled in sizes if filled >= size.tokens), size.tokens)
        read = self.key_s * size.keys + self.pair_s * size.pairs
        read += self.back_s if size.back else 0.0
        read += self.stow_s * size.stows + self.fetch_s * size.fetches
        return _on_line(table, tokens) + read


def _on_line(table: Sequence[tuple[int, float]], tokens: int) -> float:
    """Return seconds between two that were measured; beyond the last, in proportion."""
    sizes, seconds = zip(*table, strict=True)
    if tokens > sizes[-1]:
        return float(seconds[-1] * tokens / sizes[-1])
    return float(np.interp(tokens, sizes, seconds))
