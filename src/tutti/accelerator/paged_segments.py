"""`PagedSegments`: rows of new tokens before keys that lie in pages.

Row i is a run of queries of one sequence; its last query sits on its sequence's last key. The keys
lie in the pages that its row of the table names, in order. Which rows there are, how long they are
and where their pages lie is in tensors on the device, whose addresses may stay the same from step
to step; the host knows bounds only. Rows behind the last one in use have no queries and no keys,
and tokens behind the last run are padding: they belong to page 0, which nobody reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tutti.accelerator.host_to_device import moved
from tutti.accelerator.segments import Segments


class TokenPlaces(NamedTuple):
    """Of every token: its row, its position in its sequence, where its key goes; padding: −1, 0."""

    row_t: Tensor
    position_t: Tensor
    place_t: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PagedSegments:
    """Runs of queries, lengths of keys, and tables of pages."""

    query_starts: Tensor  # int32, rows + 1
    key_lengths: Tensor  # int32, rows
    tables: Tensor  # int32, rows × pages
    page_size: int
    num_queries: int  # tokens of the batch, padding included
    most_queries: int  # of a row, at most
    most_keys: int  # of a row, at most
    # where rows of one query come first: int32, how many they are, and how many longer ones follow
    first_long: Tensor | None = None
    most_long: int | None = None
    tokens: TokenPlaces | None = None  # where the host has said it already

    @classmethod
    def of(
        cls,
        queries: Sequence[int],
        keys: Sequence[int],
        tables: Sequence[Sequence[int]],
        page_size: int,
        device: torch.device | str = "cpu",
    ) -> PagedSegments:
        """Return segments from lengths and page numbers on the host."""
        width = max((len(row) for row in tables), default=0)
        filled = [[*row, *[0] * (width - len(row))] for row in tables]
        starts = [0, *itertools.accumulate(queries)]
        return cls(
            query_starts=moved(torch.tensor(starts, dtype=torch.int32), device),
            key_lengths=moved(torch.tensor(list(keys), dtype=torch.int32), device),
            tables=moved(torch.tensor(filled, dtype=torch.int32).view(len(tables), width), device),
            page_size=page_size,
            num_queries=starts[-1],
            most_queries=max(queries, default=0),
            most_keys=max(keys, default=0),
        )

    def to(self, device: torch.device | str) -> PagedSegments:
        """Return the same on a device."""
        return replace(
            self,
            query_starts=self.query_starts.to(device),
            key_lengths=self.key_lengths.to(device),
            tables=self.tables.to(device),
            first_long=None if self.first_long is None else self.first_long.to(device),
            tokens=None
            if self.tokens is None
            else TokenPlaces(*(x.to(device) for x in self.tokens)),
        )

    @property
    def num_long(self) -> int:
        """Rows of several queries, at most."""
        rows = self.key_lengths.shape[0]
        return rows if self.most_long is None else min(rows, self.most_long)

    def rows_and_positions(self) -> tuple[Tensor, Tensor]:
        """Return the row of each token, and its position in its sequence; padding has 0 and −1."""
        if self.tokens is not None:
            return self.tokens.row_t, self.tokens.position_t
        starts = self.query_starts.long()
        index_t = torch.arange(self.num_queries, device=starts.device)
        row_t = torch.searchsorted(starts[1:].contiguous(), index_t, right=True)
        inside_t = index_t < starts[-1]
        row_t = torch.where(inside_t, row_t, 0)
        position_t = self.key_lengths.long()[row_t] - (starts[1:][row_t] - index_t)
        return row_t, torch.where(inside_t, position_t, -1)

    def places(self, row_t: Tensor, position_t: Tensor) -> Tensor:
        """Return where each token's key goes: its page times the page's size, plus its place."""
        if self.tokens is not None:
            return self.tokens.place_t
        at_t = position_t.clamp_min(0)
        page_t = self.tables[row_t, at_t // self.page_size].long()
        return torch.where(position_t >= 0, page_t * self.page_size + at_t % self.page_size, 0)

    def on_host(self) -> tuple[Segments, Tensor]:
        """Return rows that have queries as `Segments` of keys gathered in order, and their tables.

        For references: the host waits for the device.
        """
        starts, keys = self.query_starts.tolist(), self.key_lengths.tolist()
        used = [row for row in range(len(keys)) if starts[row + 1] > starts[row]]
        queries = [starts[row + 1] - starts[row] for row in used]
        lengths = [keys[row] for row in used]
        begins = itertools.accumulate(lengths[:-1], initial=0) if used else ()
        segments = Segments(tuple(queries), tuple(lengths), tuple(begins))
        own = torch.tensor(used, dtype=torch.long, device=self.tables.device)
        return segments, self.tables[own]
