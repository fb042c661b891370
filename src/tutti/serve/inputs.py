"""A step's numbers on the device, at addresses that stay: one copy per step.

Everything that a step tells the device lies in one row of 32-bit integers. Tables of pages come
last, for their width changes with the longest sequence. A graph is made for steps of a size
(`Shape`): smaller ones are filled up with rows that have no tokens, with tokens of page 0, and with
samples of a slot that nobody has.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tutti.accelerator import Accelerator, PagedSegments
from tutti.batching.settings import Settings
from tutti.batching.step import Step
from tutti.serve.staging import Upload

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
    sample_rows_s: Tensor
    sample_offsets_s: Tensor
    sample_slots_s: Tensor


class StepInputs:
    """Host and device memory for the largest step that a scheduler makes."""

    def __init__(self, accelerator: Accelerator, settings: Settings, vocabulary: int) -> None:
        self._page_size, self._nobody = settings.page_size, settings.slots
        self._pages, self._vocabulary = settings.pages, vocabulary
        rows, tokens = settings.slots, settings.most_tokens
        sizes = {
            "query_starts": rows + 1,
            "key_lengths": rows,
            "bases": rows,
            "slots": rows,
            "sample_rows": rows + tokens,
            "sample_offsets": rows + tokens,
            "sample_slots": rows + tokens,
            "tokens": tokens,
            "first_long": 1,
            "tables": rows * settings.table_width,
        }
        ends = np.cumsum(list(sizes.values())).tolist()
        self._first = dict(zip(sizes, [0, *ends[:-1]], strict=True))
        self._upload = Upload(accelerator, (ends[-1],), torch.int32, settings.ahead + 1)

    def take(self, step: Step, shape: Shape) -> Given:
        """Write a step, filled up to a size; return it on the device."""
        numbers = self._upload.host()
        width = self._width(shape)
        total = step.num_tokens
        filled = {
            "query_starts": (np.cumsum(step.queries), shape.rows, total),
            "key_lengths": (step.starts + step.queries, shape.rows, 0),
            "bases": (step.bases, shape.rows, 0),
            "slots": (step.slots, shape.rows, self._nobody),
            "sample_rows": (step.sample_rows, shape.samples, 0),
            "sample_offsets": (step.sample_offsets, shape.samples, 0),
            "sample_slots": (step.sample_slots, shape.samples, self._nobody),
            "tokens": (step.tokens, shape.tokens, 0),
            "first_long": ((step.queries == 1).sum(keepdims=True), 1, 0),
        }
        for name, (column, size, rest) in filled.items():
            first = self._first[name]
            if name == "query_starts":
                numbers[first] = 0
                first += 1
            numbers[first : first + len(column)] = column
            numbers[first + len(column) : first + size] = rest
        first = self._first["tables"]
        last = first + shape.rows * width
        tables = numbers[first:last].reshape(shape.rows, width)
        used = min(width, step.tables.shape[1])
        tables[: len(step.tables), :used] = step.tables[:, :used]
        self._upload.send(last)
        return self.seen(shape)

    def blank(self, shape: Shape) -> Given:
        """Return a step of a size in which there is nothing."""
        self._upload.device.zero_()
        first = self._first["sample_slots"]
        self._upload.device[first : first + shape.samples] = self._nobody
        return self.seen(shape)

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
        rows, width = shape.rows, self._width(wide)
        each = shape.tokens // rows
        used = min(width, -(-keys // self._page_size))
        starts = (torch.arange(1, wide.rows + 1) * each).clamp_max(rows * each)
        given.segments.query_starts[1:].copy_(starts)
        given.segments.key_lengths[:rows] = keys
        self._part("first_long", 1).fill_(rows if each == 1 else 0)
        pages = 1 + torch.arange(rows * used).remainder_(max(1, self._pages - 1))
        given.segments.tables[:rows, :used].copy_(pages.view(rows, used))
        return given

    def seen(self, shape: Shape) -> Given:
        """Return where a step of a size lies on the device."""
        rows, width = shape.rows, self._width(shape)
        segments = PagedSegments(
            query_starts=self._part("query_starts", rows + 1),
            key_lengths=self._part("key_lengths", rows),
            tables=self._part("tables", rows * width).view(rows, width),
            page_size=self._page_size,
            num_queries=shape.tokens,
            most_queries=shape.most_queries,
            most_keys=shape.most_keys,
            first_long=self._part("first_long", 1),
            most_long=shape.long_rows,
        )
        return Given(
            segments,
            self._part("tokens", shape.tokens),
            self._part("bases", rows),
            self._part("slots", rows),
            self._part("sample_rows", shape.samples),
            self._part("sample_offsets", shape.samples),
            self._part("sample_slots", shape.samples),
        )

    def _width(self, shape: Shape) -> int:
        return -(-shape.most_keys // self._page_size)

    def _part(self, name: str, count: int) -> Tensor:
        first = self._first[name]
        return self._upload.device[first : first + count]
