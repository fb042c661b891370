"""Keys and values of earlier tokens, for inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tutti.accelerator.segments import Segments
from tutti.errors import InputError


class Cache(Protocol):
    """Where attention puts new keys and values, and finds those it sees."""

    def extend(self, lengths: Sequence[int]) -> Segments:
        """Make room for so many tokens more of each sequence; return what their queries see."""

    def update(self, unit: int, k_tgd: Tensor, v_tge: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens' keys and values of a unit; return all that the segments name."""


class ContiguousCache:
    """Room for `capacity` tokens of each of `slots` sequences, in one run each."""

    def __init__(self, slots: int, capacity: int) -> None:
        self.capacity = capacity
        self.lengths = [0] * slots
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}
        self._rows: Tensor = torch.empty(0, dtype=torch.long)
        self._end = 0  # of the rows that are in use

    def extend(self, lengths: Sequence[int]) -> Segments:
        """Make room for so many tokens more of each sequence."""
        starts = [slot * self.capacity for slot in range(len(self.lengths))]
        if len(lengths) != len(starts):
            raise InputError(f"cache: {len(lengths)} sequences given, it has {len(starts)}")
        rows = []
        for slot, new in enumerate(lengths):
            past = self.lengths[slot]
            if past + new > self.capacity:
                raise InputError(
                    f"cache: sequence {slot} would have {past + new} tokens; it holds "
                    f"{self.capacity}"
                )
            rows.append(torch.arange(starts[slot] + past, starts[slot] + past + new))
            self.lengths[slot] = past + new
        self._rows = torch.cat(rows)
        self._end = starts[-1] + self.lengths[-1]
        return Segments(tuple(lengths), tuple(self.lengths), tuple(starts))

    def update(self, unit: int, k_tgd: Tensor, v_tge: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens' keys and values of a unit; return those of all tokens."""
        if unit not in self._stored:
            rows = len(self.lengths) * self.capacity
            self._stored[unit] = (
                k_tgd.new_zeros(rows, *k_tgd.shape[1:]),
                v_tge.new_zeros(rows, *v_tge.shape[1:]),
            )
        keys, values = self._stored[unit]
        rows_t = self._rows.to(keys.device)
        keys[rows_t], values[rows_t] = k_tgd, v_tge
        return keys[: self._end], values[: self._end]

    @property
    def units(self) -> Mapping[int, tuple[Tensor, Tensor]]:
        """What is stored of each unit."""
        return self._stored
