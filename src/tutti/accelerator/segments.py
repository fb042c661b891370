"""`Segments`: which tokens of a packed batch see which, as every attention kernel takes it.

A packed batch is one row of T tokens. Segment i is a run of queries and the run of keys it looks
at; the *last* query sits on the last key, so that a sequence, the tail of one (context parallel),
and one new token before a cache are the same thing. Runs of queries follow each other and fill the
batch; runs of keys may overlap. Where attention is not causal (`across`), the keys come from
elsewhere: every query sees all of its run's, and there may be fewer keys than queries.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tutti.accelerator.host_to_device import moved
from tutti.errors import InputError


@dataclass(frozen=True, slots=True)
class Segments:
    """Runs of queries, and the runs of keys they see."""

    queries: tuple[int, ...]  # lengths
    keys: tuple[int, ...]
    key_starts: tuple[int, ...]
    across: bool = False  # no query sits on a key: all keys lie before all queries

    def __post_init__(self) -> None:
        if not len(self.queries) == len(self.keys) == len(self.key_starts):
            raise InputError(
                f"segments: {len(self.queries)} runs of queries, {len(self.keys)} of keys and "
                f"{len(self.key_starts)} starts; give as many of each"
            )
        for queries, keys in zip(self.queries, self.keys, strict=True):
            if not 0 < queries <= keys and not (self.across and queries > 0 and keys > 0):
                raise InputError(
                    f"segments: {queries} queries on {keys} keys; each query needs a key of its own"
                )

    @classmethod
    def of_lengths(cls, lengths: Sequence[int]) -> Segments:
        """Return whole sequences, one after the other."""
        starts = itertools.accumulate(lengths[:-1], initial=0)
        return cls(tuple(lengths), tuple(lengths), tuple(starts))

    @classmethod
    def batch(cls, sequences: int, length: int) -> Segments:
        """Return `sequences` whole sequences of one length."""
        return cls.of_lengths((length,) * sequences)

    def __len__(self) -> int:
        return len(self.queries)

    @property
    def num_queries(self) -> int:
        """Tokens in the batch."""
        return sum(self.queries)

    @property
    def is_batch(self) -> bool:
        """Whether all are whole sequences of one length: the batch is a rectangle."""
        return self.queries == self.keys and len(set(self.queries)) == 1 and self.keys_follow

    @property
    def keys_follow(self) -> bool:
        """Whether the runs of keys follow each other without gaps, as those of queries do."""
        return self.key_starts == tuple(itertools.accumulate(self.keys[:-1], initial=0))

    @property
    def query_starts(self) -> tuple[int, ...]:
        """Where each run of queries begins."""
        return tuple(itertools.accumulate(self.queries[:-1], initial=0))

    def positions(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the position of every query in its sequence."""
        runs = [
            torch.arange(keys - queries, keys)
            for queries, keys in zip(self.queries, self.keys, strict=True)
        ]
        return moved(torch.cat(runs), device)

    def boundaries(self, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cumulative lengths of queries and of keys, with a leading zero."""
        return _boundaries(self.queries, device), _boundaries(self.keys, device)


@functools.lru_cache(maxsize=16)  # every layer of a batch asks for the same
def _boundaries(lengths: tuple[int, ...], device: torch.device | str) -> torch.Tensor:
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return moved(ends, device)
