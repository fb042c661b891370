"""`Step`: what a chip computes next, as columns of numbers."""

from __future__ import annotations

from dataclasses import dataclass
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

    In this order a worker copies pages, sets up the slots that begin, computes, and samples.
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
    copies: I32  # (n, 2): page to page, before anything else
    begins: tuple[Beginning, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return len(self.tokens)

    def plain(self) -> dict[str, Any]:
        """Return everything as plain values: two steps are the same if these are."""
        columns = (
            "slots", "sequences", "queries", "starts", "bases", "tokens", "tables",
            "sample_rows", "sample_offsets", "sample_slots", "copies",
        )  # fmt: skip
        values: dict[str, Any] = {name: getattr(self, name).tolist() for name in columns}
        begins = [(b.slot, b.sequence.id, b.fork_of) for b in self.begins]
        return {"number": self.number, **values, "begins": begins}
