"""A step's numbers on the device, at addresses that stay: two copies per step.

Everything that a step tells the device lies in two rows: numbers that kernels read (32 bits), and
what tensors are indexed by (64 bits). The host computes all that it knows (where each token is in
its sequence, where its key goes): a device would need dozens of small kernels for it. A graph is
made for steps of a size (`Shape`): smaller ones are filled up with rows that have no tokens, with
tokens of page 0, and with samples of a slot that nobody has.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tutti.accelerator import Accelerator, PagedSegments
from tutti.accelerator.paged_segments import TokenPlaces
from tutti.batching.settings import Settings
from tutti.batching.step import Step
from tutti.serve.staging import Upload

Columns = dict[str, tuple[int, int]]
"""By name: the first place of a column, and how many it has."""
_ALIGNED = 16  # numbers: kernels are compiled for addresses like these
_ZERO = np.zeros(1, np.int64)
_FAR_APART = 7919  # a prime: tokens of steps before there are any


class Shape(NamedTuple):
    """How large a step is on the device."""

    tokens: int
    rows: int
    samples: int
    most_queries: int  # of a row
    most_keys: int  # of a row
    long_rows: int = 0  # rows of several tokens

    @classmethod
    def of(cls, step: Step) -> Shape:
        """Return the size of a step itself."""
        return cls(
            step.num_tokens,
            len(step.queries),
            len(step.sample_rows),
            int(step.queries.max()),
            int((step.starts + step.queries).max()),
            int((step.queries > 1).sum()),
        )


class Given(NamedTuple):
    """What a step is told, on the device."""

    segments: PagedSegments
    tokens_t: Tensor
    bases_b: Tensor
    slots_b: Tensor
    sample_tokens_s: Tensor  # the token that each sample comes after
    sample_slots_s: Tensor
    adapters_t: Tensor  # the slot of each token's adapter; −1: none
    adapter_order_t: Tensor  # the tokens, those of one adapter together


class StepInputs:
    """Host and device memory for the largest step that a scheduler makes."""

    def __init__(self, accelerator: Accelerator, settings: Settings, vocabulary: int) -> None:
        self._page_size, self._nobody = settings.page_size, settings.slots
        self._pages, self._vocabulary = settings.pages, vocabulary
        longest = settings.table_width * settings.page_size
        rows, tokens = settings.slots, settings.most_tokens
        largest = Shape(tokens, rows, rows + tokens, tokens, longest)
        depth = settings.ahead + 1
        most = [_end(columns) for columns in self._columns(largest)]
        self._numbers = Upload(accelerator, (most[0],), torch.int32, depth)
        self._indices = Upload(accelerator, (most[1],), torch.int64, depth)

    def take(self, step: Step, shape: Shape, adapters: np.ndarray | None = None) -> Given:
        """Write a step, filled up to a size; return it on the device.

        `adapters`: the slot of each row's adapter, −1: none; without it nobody looks there.
        """
        numbers, indices = self._columns(shape)
        ends = np.cumsum(step.queries)
        _fill(
            self._numbers,
            numbers,
            query_starts=(np.concatenate((_ZERO, ends)), step.num_tokens),
            key_lengths=(step.starts + step.queries, 0),
            first_long=((step.queries == 1).sum(keepdims=True), 0),
        )
        first, count = numbers["tables"]
        tables = self._numbers.host()[first : first + count].reshape(shape.rows, -1)
        used = min(tables.shape[1], step.tables.shape[1])
        tables[: len(step.tables), :used] = step.tables[:, :used]
        row_t = np.repeat(np.arange(len(ends)), step.queries)
        position_t = np.arange(len(row_t)) + (step.starts + step.queries - ends)[row_t]
        page_t = step.tables[row_t, position_t // self._page_size]
        _fill(
            self._indices,
            indices,
            tokens=(step.tokens, 0),
            rows=(row_t, 0),
            positions=(position_t, -1),
            places=(page_t * self._page_size + position_t % self._page_size, 0),
            bases=(step.bases, 0),
            slots=(step.slots, self._nobody),
            sample_tokens=(ends[step.sample_rows] - 1 - step.sample_offsets, 0),
            sample_slots=(step.sample_slots, self._nobody),
        )
        if adapters is None:
            del indices["adapters"], indices["adapter_order"]  # the last columns
        else:
            slot_t = np.full(shape.tokens, -1)
            slot_t[: len(row_t)] = adapters[row_t]
            order_t = np.argsort(slot_t, kind="stable")
            _fill(self._indices, indices, adapters=(slot_t, -1), adapter_order=(order_t, 0))
        self._numbers.send(_end(numbers))
        self._indices.send(_end(indices))
        return self.seen(shape)

    def blank(self, shape: Shape) -> Given:
        """Return a step of a size in which there is nothing."""
        self._numbers.device.zero_()
        self._indices.device.zero_()
        given = self.seen(shape)
        given.sample_slots_s.fill_(self._nobody)
        given.adapters_t.fill_(-1)
        given.adapter_order_t.copy_(torch.arange(shape.tokens))
        return given

    def rehearsed(self, shape: Shape, wide: Shape, keys: int) -> Given:
        """Return a step of a size, filled up, whose rows end with the last of so many keys.

        Rows lie in pages one after the other, from the first on when there are no more: it is only
        for steps before there are requests. Without keys the step has no tokens either.
        """
        given = self.blank(wide)
        # tokens that are all the same would meet the same experts, and draw less power
        given.tokens_t.copy_(torch.arange(wide.tokens) * _FAR_APART % self._vocabulary)
        if not keys:
            return given
        segments, rows = given.segments, shape.rows
        width = segments.tables.shape[1]
        each = shape.tokens // rows
        used = min(width, -(-keys // self._page_size))
        starts = (torch.arange(1, wide.rows + 1) * each).clamp_max(rows * each)
        segments.query_starts[1:].copy_(starts)
        segments.key_lengths[:rows] = keys
        assert segments.first_long is not None
        segments.first_long.fill_(rows if each == 1 else 0)
        pages = 1 + torch.arange(rows * used).remainder_(max(1, self._pages - 1))
        segments.tables[:rows, :used].copy_(pages.view(rows, used))
        assert segments.tokens is not None
        plain = replace(segments, tokens=None)
        row_t, position_t = plain.rows_and_positions()
        columns = (row_t, position_t, plain.places(row_t, position_t))
        for own, made in zip(segments.tokens, columns, strict=True):
            own.copy_(made)
        return given

    def seen(self, shape: Shape) -> Given:
        """Return where a step of a size lies on the device."""
        numbers, indices = self._columns(shape)
        number = {name: _part(self._numbers, at) for name, at in numbers.items()}
        index = {name: _part(self._indices, at) for name, at in indices.items()}
        segments = PagedSegments(
            query_starts=number["query_starts"],
            key_lengths=number["key_lengths"],
            tables=number["tables"].view(shape.rows, -1),
            page_size=self._page_size,
            num_queries=shape.tokens,
            most_queries=shape.most_queries,
            most_keys=shape.most_keys,
            first_long=number["first_long"],
            most_long=shape.long_rows,
            tokens=TokenPlaces(index["rows"], index["positions"], index["places"]),
        )
        return Given(
            segments,
            index["tokens"],
            index["bases"],
            index["slots"],
            index["sample_tokens"],
            index["sample_slots"],
            index["adapters"],
            index["adapter_order"],
        )

    def _columns(self, shape: Shape) -> tuple[Columns, Columns]:
        """Return where each column of a step lies: of numbers, and of what tensors are indexed by.

        Columns stand close together, so that little is copied: each size has places of its own.
        """
        width = -(-shape.most_keys // self._page_size)
        tokens, rows, samples = shape.tokens, shape.rows, shape.samples
        numbers = _placed(
            query_starts=rows + 1, key_lengths=rows, first_long=1, tables=rows * width
        )
        indices = _placed(
            tokens=tokens, rows=tokens, positions=tokens, places=tokens, bases=rows, slots=rows,
            sample_tokens=samples, sample_slots=samples, adapters=tokens, adapter_order=tokens,
        )  # fmt: skip
        return numbers, indices


def _placed(**sizes: int) -> Columns:
    """Return where columns of these sizes lie, one after the other."""
    spans, first = {}, 0
    for name, size in sizes.items():
        spans[name] = (first, size)
        first += -(-size // _ALIGNED) * _ALIGNED
    return spans


def _end(columns: Columns) -> int:
    """Return the first place behind columns."""
    return max(first + count for first, count in columns.values())


def _fill(upload: Upload, columns: Columns, **given: tuple[np.ndarray, int]) -> None:
    """Write columns on the host; what is left of one is filled with a number of its own."""
    memory = upload.host()
    for name, (values, rest) in given.items():
        first, count = columns[name]
        memory[first : first + len(values)] = values
        memory[first + len(values) : first + count] = rest


def _part(upload: Upload, at: tuple[int, int]) -> Tensor:
    return upload.device[at[0] : at[0] + at[1]]
