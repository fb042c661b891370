"""`Step`: what a chip computes next, as columns of numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tutti.batching.request import Sequence

I32 = NDArray[np.int32]
LAST = -1  # a token that the host does not know: the slot's last one, on the device


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """A sequence got a slot: from nothing, or as a copy of another one's."""

    slot: int
    sequence: Sequence
    fork_of: int | None = None  # a slot


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Step:
    """Rows of queries: one per sequence, those with one token first.

    A row may end with tokens that are guessed: then a token is sampled after each of them, and
    those count up to the first that a guess did not foresee.

    In this order a worker moves pages to the host, copies pages, moves pages back from the host,
    sets up the slots that begin, computes, and samples.
    """

    number: int
    slots: I32  # of each row
    sequences: NDArray[np.int64]
    queries: I32  # tokens
    starts: I32  # position of the first
    bases: I32  # the length that length-dependent keys are made for
    tokens: I32  # of all rows, one after the other; LAST where the device has it
    tables: I32  # rows × pages
    sample_rows: I32  # rows whose logits are wanted
    sample_offsets: I32  # of which token: so many before the row's last
    sample_slots: I32  # slots that get what is sampled: forks share a row, guesses a slot
    stows: I32  # (n, 2): page of the device to page of the host, before anything else
    copies: I32  # (n, 2): page to page
    fetches: I32  # (n, 2): page of the host to page of the device
    begins: tuple[Beginning, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return len(self.tokens)

    def of_rows(self, rows: np.ndarray) -> Step:
        """Return a step of some rows, without samples; a token that is not known becomes 0."""
        ends = np.cumsum(self.queries)
        at = [np.arange(ends[row] - self.queries[row], ends[row]) for row in rows.tolist()]
        none, pairs = np.empty(0, np.int32), np.empty((0, 2), np.int32)
        return replace(
            self,
            slots=self.slots[rows],
            sequences=self.sequences[rows],
            queries=self.queries[rows],
            starts=self.starts[rows],
            bases=self.bases[rows],
            tokens=np.maximum(self.tokens[np.concatenate(at)], 0),
            tables=self.tables[rows],
            sample_rows=none,
            sample_offsets=none,
            sample_slots=none,
            stows=pairs,
            copies=pairs,
            fetches=pairs,
        )

    def plain(self) -> dict[str, Any]:
        """Return everything as plain values: two steps are the same if these are."""
        columns = (
            "slots", "sequences", "queries", "starts", "bases", "tokens", "tables",
            "sample_rows", "sample_offsets", "sample_slots", "stows",
            "copies", "fetches",
        )  # fmt: skip
        values: dict[str, Any] = {name: getattr(self, name).tolist() for name in columns}
        begins = [(b.slot, b.sequence.id, b.fork_of) for b in self.begins]
        return {"number": self.number, **values, "begins": begins}
