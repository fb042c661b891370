"""How rows of tokens are cut for context parallelism, and into which pieces of documents.

A row is what ranks share out: rank r of n has chunks r and 2n − 1 − r of its 2n chunks, so that
all have about as many query-key pairs. A row holds one document (a whole sequence) or several that
do not see each other (packed training data); a chunk then falls into pieces, one per document.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from tutti.errors import InputError


class RowPiece(NamedTuple):
    """Neighbouring tokens of one document on one rank, by their place in the whole batch."""

    document: int
    start: int  # of the document
    first: int
    last: int  # half-open

    @property
    def size(self) -> int:
        """How many tokens."""
        return self.last - self.first


def rows_of(lengths: Sequence[int], row_length: int | None) -> tuple[int, ...]:
    """Return the lengths of the rows that documents fill; without a length each is its own."""
    if row_length is None:
        return tuple(lengths)
    total = sum(lengths)
    edges = set(itertools.accumulate(lengths))
    for edge in range(row_length, total + 1, row_length):
        if edge not in edges:
            raise InputError(
                f"batch: a document runs over the end of a row of {row_length} tokens (token "
                f"{edge}); cut it there"
            )
    if total % row_length:
        raise InputError(
            f"batch: {total} tokens do not fill rows of {row_length}; pad the last row with tokens "
            "that have no target"
        )
    return (row_length,) * (total // row_length)


def pieces_of(
    lengths: Sequence[int], rows: Sequence[int], ways: int, rank: int
) -> tuple[RowPiece, ...]:
    """Return a context-parallel rank's pieces, in the order of its tokens; none is empty."""
    chunks = []
    start = 0
    for length in rows:
        bounds = [start + length * i // (2 * ways) for i in range(2 * ways + 1)]
        chunks += [(bounds[c], bounds[c + 1]) for c in (rank, 2 * ways - 1 - rank)]
        start += length
    starts = list(itertools.accumulate(lengths, initial=0))
    pieces: list[RowPiece] = []
    for low, high in chunks:
        document = bisect.bisect_right(starts, low) - 1
        while low < high:
            last = min(high, starts[document + 1])
            if low < last:
                pieces.append(RowPiece(document, starts[document], low, last))
            low, document = last, document + 1
    return tuple(pieces)
