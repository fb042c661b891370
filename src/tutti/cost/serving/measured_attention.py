"""Attention to pages by a profile: tables over rows and keys, from which steps are priced."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tutti.cost.arrays import FloatArray
from tutti.cost.measured.chip import MeasuredChip

_ROWS = 2.0 ** np.arange(0.0, 10.01, 0.5)  # of one token
_TOKENS = 2.0 ** np.arange(0.0, 13.01, 0.5)  # of chunks
_KEYS = 2.0 ** np.arange(2.0, 17.01, 0.5)  # that a token looks at


@dataclass(frozen=True, slots=True, eq=False)
class LogTable:
    """Seconds over powers of two of two counts, between them on lines of logarithms."""

    low: tuple[float, float]  # log₂ of the first counts
    step: float  # octaves between two
    logs: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, first: FloatArray, second: FloatArray, seconds: FloatArray) -> LogTable:
        """Return the table of seconds (first, second)."""
        rows = tuple(tuple(map(float, row)) for row in np.log2(np.maximum(seconds, 1e-12)))
        start = (float(np.log2(first[0])), float(np.log2(second[0])))
        return cls(start, float(np.log2(first[1] / first[0])), rows)

    def seconds(self, first: float, second: float) -> float:
        """Return the seconds at two counts; beyond the table, along its last slope."""
        i, u = self._cell(first, 0, len(self.logs))
        j, v = self._cell(second, 1, len(self.logs[0]))
        above, below = self.logs[i], self.logs[i + 1]
        at = (1 - u) * ((1 - v) * above[j] + v * above[j + 1]) + u * (
            (1 - v) * below[j] + v * below[j + 1]
        )
        return float(2.0**at)

    def _cell(self, count: float, axis: int, size: int) -> tuple[int, float]:
        place = max(0.0, (math.log2(max(count, 1e-9)) - self.low[axis]) / self.step)
        cell = min(int(place), size - 2)
        return cell, place - cell


@dataclass(frozen=True, slots=True, eq=False)
class PagedTables:
    """What one layer's attention takes: rows of one token, and chunks of prompts."""

    decodes: LogTable
    chunks: LogTable

    @classmethod
    def of(cls, chip: MeasuredChip, heads: tuple[float, float, float, float]) -> PagedTables:
        """Return the tables of a layer with so many heads, key-value heads, and their widths."""
        rows, keys = np.meshgrid(_ROWS, _KEYS, indexing="ij")
        decodes = chip.seconds("decode_attention", "inference", (rows, keys, *heads))
        tokens, seen = np.meshgrid(_TOKENS, _KEYS, indexing="ij")
        own = (tokens + 1.0) / 2.0  # keys that a token of a whole prompt sees on average
        before = np.maximum(0.0, seen - own)
        chunks = chip.seconds("chunk_attention", "inference", (tokens, before, *heads))
        # several short prompts instead of a long one: fewer pairs
        chunks = chunks * np.minimum(1.0, seen / own)
        return cls(LogTable.of(_ROWS, _KEYS, decodes), LogTable.of(_TOKENS, _KEYS, chunks))

    def seconds(self, rows: int, keys: float, tokens: int, pairs: float) -> float:
        """Return the time of a step's rows that see so many keys, and tokens with so many pairs."""
        total = self.decodes.seconds(rows, keys / rows) if rows else 0.0
        if tokens:
            total += self.chunks.seconds(tokens, pairs / tokens)
        return total
