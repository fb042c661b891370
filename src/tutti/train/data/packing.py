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
    split: int = 0
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
        sizes = np.diff(np.clip(offsets[first : last + 1], start, stop))
        lengths = [int(n) for n in sizes if n]
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
        numbers = first + np.flatnonzero(sizes)
        return padded(tokens, targets, lengths, self.length, self._pad, weights_of(store, numbers))


class FitRows:
    """Rows of whole examples: as many as fit, or (`apart`) one in each."""

    def __init__(
        self,
        store: TokenStore,
        length: int,
        *,
        pad: int,
        vocabulary: int,
        long: Literal["truncate", "drop", "split", "error"],
        apart: bool = False,
    ) -> None:
        self.name, self.length = store.name, length
        self._store, self._pad, self._vocabulary = store, pad, vocabulary
        sizes = np.diff(store.offsets)
        too_long = np.flatnonzero(sizes > length)
        require_short(store.name, sizes, length, "examples", long)
        examples, starts, stops = self._kept(sizes, long)
        if not len(examples):
            raise InputError(
                f"{store.name}: none of {len(sizes)} examples fits a row of {length} tokens "
                f"with a loss in it; use a longer sequence_length"
            )
        sole = [[example] for example in range(len(examples))]
        groups = sole if apart else best_fit(stops - starts, length)
        self._first = np.cumsum([0, *map(len, groups)])
        order = np.concatenate(groups)
        self._members, self._starts, self._stops = examples[order], starts[order], stops[order]
        used, kept = int((stops - starts).sum()), len(np.unique(examples))
        lost = len(set(too_long.tolist()) - set(examples.tolist()))
        self.report = PackingReport(
            documents=len(sizes),
            tokens=used,
            rows=len(groups),
            padding=len(groups) * length - used,
            truncated=0 if long == "split" else len(too_long) - lost,
            split=len(too_long) - lost if long == "split" else 0,
            dropped=len(sizes) - kept,
            noun="example",
        )

    def _kept(
        self, sizes: NDArray[np.int64], long: str
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return which parts of which examples are put into rows, as places in the store.

        Of a long example its beginning is, or with "split" all of it in parts; parts in which
        nothing has a loss are left out.
        """
        rows: list[tuple[int, int, int]] = []
        offsets, length = self._store.offsets, self.length
        for example in np.flatnonzero(sizes).tolist():
            start, stop = int(offsets[example]), int(offsets[example + 1])
            if stop - start <= length:
                rows.append((example, start, stop))
                continue
            ends = {"drop": start, "split": stop}.get(long, start + length)
            for low in range(start, ends, length):
                high = min(low + length, stop)
                if self._store.supervised(low + 1, high).any():
                    rows.append((example, low, high))
        examples, starts, stops = np.asarray(rows, np.int64).reshape(-1, 3).T
        return examples, starts, stops

    @property
    def num_rows(self) -> int:
        """Rows."""
        return len(self._first) - 1

    def row(self, index: int) -> Row:
        """Return one row."""
        here = slice(self._first[index], self._first[index + 1])
        spans = list(zip(self._starts[here].tolist(), self._stops[here].tolist(), strict=True))
        return whole_documents(
            self._store, self._members[here], spans, self.length, self._pad, self._vocabulary
        )


def require_short(name: str, sizes: NDArray[np.int64], length: int, noun: str, long: str) -> None:
    """Refuse examples that do not fit, where that is wanted."""
    count, worst = int((sizes > length).sum()), int(sizes.max(initial=0))
    if count and long == "error":
        raise InputError(
            f"{name}: {count} of {len(sizes)} {noun} are longer than a row of {length} tokens (the "
            f"longest has {worst}); use a longer sequence_length, or packing: {{long: truncate}}"
        )


def whole_documents(
    store: TokenStore,
    members: NDArray[np.int64],
    spans: list[tuple[int, int]],
    length: int,
    pad: int,
    vocabulary: int,
) -> Row:
    """Return a row of documents, each up to where it is cut."""
    parts, masks = [], []
    for example, (start, stop) in zip(members.tolist(), spans, strict=True):
        tokens = np.asarray(store.tokens[start:stop]).astype(np.int64)
        check_vocabulary(tokens, vocabulary, f"{store.name}: example {example}")
        parts.append(tokens)
        masks.append(store.supervised(start, stop))
    lengths = [stop - start for start, stop in spans]
    tokens = np.concatenate(parts)
    supervised = np.append(np.concatenate(masks), False)
    targets = targets_of(tokens, NO_TARGET, lengths, supervised)
    return padded(tokens, targets, lengths, length, pad, weights_of(store, members))


def weights_of(store: TokenStore, documents: NDArray[np.int64]) -> tuple[float, ...]:
    """Return the weights of documents; none where all weigh one."""
    return () if store.weights is None else tuple(store.weights[documents].tolist())


def padded(
    tokens: NDArray[np.int64],
    targets: NDArray[np.int64],
    lengths: list[int],
    length: int,
    pad: int,
    weights: tuple[float, ...],
) -> Row:
    """Return a row that is filled up with a document without targets."""
    missing = length - len(tokens)
    if not missing:
        return Row(tokens, targets, tuple(lengths), weights)
    blank = blank_row(missing, pad)
    return Row(
        np.concatenate([tokens, blank.tokens]),
        np.concatenate([targets, blank.targets]),
        (*lengths, missing),
        (*weights, 0.0) if weights else (),
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
