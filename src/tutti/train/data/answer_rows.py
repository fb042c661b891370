"""Rows of answers: the two of a pair never lie in different rows.

So a pair is never split over micro-batches, replicas or steps, whatever the plan. Of judged answers
a row holds the answers themselves; `other_row` holds the same prompts with other answers, which
KTO's estimate asks about.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tutti.errors import InputError
from tutti.train.data.packing import PackingReport, best_fit, require_short, whole_documents
from tutti.train.data.row import Row
from tutti.train.data.store import TokenStore


class AnswerRows:
    """Rows of whole examples of two documents each."""

    def __init__(
        self,
        store: TokenStore,
        length: int,
        *,
        paired: bool,
        pad: int,
        vocabulary: int,
        long: Literal["truncate", "drop", "split", "error"],
    ) -> None:
        self.name, self.length, self.paired = store.name, length, paired
        self._store, self._pad, self._vocabulary = store, pad, vocabulary
        noun = "pairs" if paired else "judged answers"
        if long == "split":
            raise InputError(f"{store.name}: {noun} are not split; use packing: {{long: truncate}}")
        whole = np.diff(store.offsets).reshape(-1, 2)
        sizes = whole.sum(1) if paired else whole.max(1, initial=0)
        require_short(store.name, sizes, length, noun, long)
        self._sizes = _cut(whole, length, paired=paired)
        fits = sizes <= length if long == "drop" else self._with_loss(sizes > length)
        keep = np.flatnonzero(fits)
        if not len(keep):
            raise InputError(
                f"{store.name}: none of {len(sizes)} {noun} fits a row of {length} tokens with a "
                f"loss on each answer; use a longer sequence_length (the shortest needs "
                f"{int(sizes.min(initial=0))})"
            )
        taken = self._sizes[keep].sum(1) if paired else self._sizes[keep].max(1)
        groups = best_fit(taken, length)
        self._first = np.cumsum([0, *map(len, groups)])
        self._members = keep[np.concatenate(groups)]
        used = int(self._sizes[keep].sum() if paired else self._sizes[keep, 0].sum())
        self.report = PackingReport(
            documents=len(sizes),
            tokens=used,
            rows=len(groups),
            padding=len(groups) * length - used,
            truncated=int((sizes[keep] > length).sum()),
            dropped=len(sizes) - len(keep),
            noun="pair" if paired else "answer",
        )

    def _with_loss(self, cut: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which examples have a loss on every document after they were cut."""
        starts = self._store.offsets[:-1].reshape(-1, 2)
        kept = np.ones(len(cut), np.bool_)
        for example in np.flatnonzero(cut).tolist():
            kept[example] = all(
                self._store.supervised(int(start) + 1, int(start + size)).any()
                for start, size in zip(starts[example], self._sizes[example], strict=True)
            )
        return kept

    @property
    def num_rows(self) -> int:
        """Rows."""
        return len(self._first) - 1

    def row(self, index: int) -> Row:
        """Return one row: pairs, or judged answers."""
        return self._row(index, (0, 1) if self.paired else (0,))

    def other_row(self, index: int) -> Row:
        """Return the prompts of a row of judged answers with answers to others; all weigh one."""
        row = self._row(index, (1,))
        count = int(self._first[index + 1] - self._first[index])
        ones = (1.0,) * count + (0.0,) * (len(row.lengths) - count)
        return replace(row, weights=ones)

    def _row(self, index: int, sides: tuple[int, ...]) -> Row:
        examples = self._members[self._first[index] : self._first[index + 1]]
        documents = (2 * examples[:, None] + np.asarray(sides)).reshape(-1)
        starts = self._store.offsets[documents].tolist()
        sizes = self._sizes[examples][:, list(sides)].reshape(-1).tolist()
        spans = [(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        row = whole_documents(
            self._store, documents, spans, self.length, self._pad, self._vocabulary
        )
        if self._store.margins is None:
            return row
        margins = self._store.margins[documents].tolist()
        margins += [0.0] * (len(row.lengths) - len(margins))
        return replace(row, references=tuple(margins))


def _cut(whole: NDArray[np.int64], length: int, *, paired: bool) -> NDArray[np.int64]:
    """Return how much of each document is kept, from its beginning.

    Two that share a row get half of it each, or what the shorter one leaves.
    """
    if not paired:
        return np.minimum(whole, length)
    half = length // 2
    others = np.minimum(whole[:, ::-1], half)
    return np.where(
        whole.sum(1, keepdims=True) <= length, whole, np.minimum(whole, length - others)
    )
