"""Documents into rows of S tokens.

`CutRows` joins documents and cuts: nothing is lost, a document may go on in the next row, and only
the last row of all is padded. `FitRows` keeps examples whole and puts each where it fits best (the
longest first), so that little of a row is padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tutti.errors import InputError
from tutti.train.data.row import NO_TARGET, Row, blank_row, check_vocabulary, targets_of
from tutti.train.data.store import TokenStore


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingReport:
    """What became of a source's documents."""

    documents: int
    tokens: int  # in rows, without padding
    rows: int
    padding: int  # tokens
    truncated: int = 0
    dropped: int = 0
    noun: str = "document"


class CutRows:
    """Rows of documents that follow each other without a gap."""

    def __init__(self, store: TokenStore, length: int, *, pad: int, vocabulary: int) -> None:
        self.name, self.length = store.name, length
        self._store, self._pad, self._vocabulary = store, pad, vocabulary

    @property
    def num_rows(self) -> int:
        """Rows, the padded last one included."""
        return -(-self._store.num_tokens // self.length)

    @property
    def report(self) -> PackingReport:
        """What became of the documents."""
        tokens = self._store.num_tokens
        return PackingReport(
            documents=self._store.num_documents,
            tokens=tokens,
            rows=self.num_rows,
            padding=self.num_rows * self.length - tokens,
        )

    def row(self, index: int) -> Row:
        """Return one row."""
        store = self._store
        start = index * self.length
        stop = min(start + self.length, store.num_tokens)
        offsets = store.offsets
        first = int(np.searchsorted(offsets, start, "right")) - 1
        last = int(np.searchsorted(offsets, stop, "left"))
        edges = np.clip(offsets[first : last + 1], start, stop)
        lengths = [int(n) for n in np.diff(edges) if n]
        ahead = 1 if int(offsets[last]) > stop else 0  # whether the last document goes on
        tokens = np.asarray(store.tokens[start : stop + ahead]).astype(np.int64)
        check_vocabulary(tokens, self._vocabulary, f"{self.name}: row {index}")
        supervised = None
        if store.is_supervised:
            marked = store.supervised(start, stop + ahead)
            supervised = np.append(marked, np.zeros(1 - ahead, np.bool_))
        next_token = int(tokens[-1]) if ahead else NO_TARGET
        tokens = tokens[: stop - start]
        targets = targets_of(tokens, next_token, lengths, supervised)
        return _padded(tokens, targets, lengths, self.length, self._pad)


class FitRows:
    """Rows of whole examples."""

    def __init__(
        self,
        store: TokenStore,
        length: int,
        *,
        pad: int,
        vocabulary: int,
        long: Literal["truncate", "drop", "error"],
    ) -> None:
        self.name, self.length = store.name, length
        self._store, self._pad, self._vocabulary = store, pad, vocabulary
        sizes = np.diff(store.offsets)
        too_long = np.flatnonzero(sizes > length)
        if len(too_long) and long == "error":
            worst = int(sizes.max())
            raise InputError(
                f"{store.name}: {len(too_long)} of {len(sizes)} examples are longer than a row of "
                f"{length} tokens (the longest has {worst}); use a longer sequence_length, or "
                f"packing: {{long: truncate}}"
            )
        lost = set(too_long.tolist()) if long == "drop" else self._without_loss(too_long)
        keep = np.asarray([i for i in np.flatnonzero(sizes) if i not in lost], np.int64)
        if not len(keep):
            raise InputError(
                f"{store.name}: none of {len(sizes)} examples fits a row of {length} tokens "
                f"with a loss in it; use a longer sequence_length"
            )
        sizes = np.minimum(sizes, length)
        groups = best_fit(sizes[keep], length)
        self._starts = np.cumsum([0, *map(len, groups)])
        self._members = keep[np.concatenate(groups)]
        used = int(sizes[keep].sum())
        self.report = PackingReport(
            documents=len(sizes),
            tokens=used,
            rows=len(groups),
            padding=len(groups) * length - used,
            truncated=len(too_long) - len(lost),
            dropped=len(sizes) - len(keep),
            noun="example",
        )

    def _without_loss(self, examples: NDArray[np.int64]) -> set[int]:
        """Return those of the long examples in which nothing before the cut has a loss."""
        offsets, length = self._store.offsets, self.length
        starts = {int(i): int(offsets[i]) for i in examples}
        return {
            i for i, start in starts.items()
            if not self._store.supervised(start + 1, start + length).any()
        }  # fmt: skip

    @property
    def num_rows(self) -> int:
        """Rows."""
        return len(self._starts) - 1

    def row(self, index: int) -> Row:
        """Return one row."""
        store = self._store
        parts, masks, lengths = [], [], []
        for example in self._members[self._starts[index] : self._starts[index + 1]]:
            start = int(store.offsets[example])
            stop = min(int(store.offsets[example + 1]), start + self.length)
            tokens = np.asarray(store.tokens[start:stop]).astype(np.int64)
            check_vocabulary(tokens, self._vocabulary, f"{self.name}: example {example}")
            parts.append(tokens)
            masks.append(store.supervised(start, stop))
            lengths.append(stop - start)
        tokens = np.concatenate(parts)
        supervised = np.append(np.concatenate(masks), False)
        targets = targets_of(tokens, NO_TARGET, lengths, supervised)
        return _padded(tokens, targets, lengths, self.length, self._pad)


def _padded(
    tokens: NDArray[np.int64],
    targets: NDArray[np.int64],
    lengths: list[int],
    length: int,
    pad: int,
) -> Row:
    missing = length - len(tokens)
    if not missing:
        return Row(tokens, targets, tuple(lengths))
    blank = blank_row(missing, pad)
    return Row(
        np.concatenate([tokens, blank.tokens]),
        np.concatenate([targets, blank.targets]),
        (*lengths, missing),
    )


def best_fit(sizes: NDArray[np.int64], length: int) -> list[list[int]]:
    """Return which examples share a row: the longest first, each where the least room is left.

    The open rows are kept by the room they have; a set of bits tells which rooms there are, so that
    the smallest sufficient one is found without a search.
    """
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms = 0  # bit r: there is a row with r tokens of room
    for example in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[example])
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
        else:
            row, room = len(rows), length
            rows.append([])
        rows[row].append(example)
        left = room - size
        if left:
            by_room.setdefault(left, []).append(row)
            rooms |= 1 << left
    return rows
