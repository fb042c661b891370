"""A step's numbers on the device, at addresses that stay: one copy per step.

Everything that a step tells the device lies in one row of 32-bit integers, written on the host in
pinned memory. Tables of pages come last, for their width changes with the longest sequence.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tutti.accelerator import Accelerator, PagedSegments
from tutti.batching.settings import Settings
from tutti.batching.step import Step


class StepInputs:
    """Host and device memory for the largest step that a scheduler makes."""

    def __init__(self, accelerator: Accelerator, settings: Settings) -> None:
        self._accelerator, self._page_size = accelerator, settings.page_size
        rows, tokens = settings.slots, settings.most_tokens
        sizes = {
            "query_starts": rows + 1,
            "key_lengths": rows,
            "bases": rows,
            "slots": rows,
            "sample_rows": rows + tokens,
            "sample_offsets": rows + tokens,
            "tokens": tokens,
            "tables": rows * settings.table_width,
        }
        ends = np.cumsum(list(sizes.values())).tolist()
        self._places = dict(zip(sizes, zip([0, *ends[:-1]], ends, strict=True), strict=True))
        self._host = accelerator.pinned((ends[-1],), torch.int32)
        self._numbers = self._host.numpy()
        self._device = accelerator.to_device(self._host)  # the same memory where that is the host's

    def take(self, step: Step) -> tuple[PagedSegments, dict[str, Tensor]]:
        """Write a step; return its segments, and the rest by name."""
        rows, width = step.tables.shape
        keys = step.starts + step.queries
        ends = np.cumsum(step.queries)
        self._write("query_starts", np.concatenate(([0], ends)))
        self._write("key_lengths", keys)
        self._write("bases", step.bases)
        self._write("slots", step.slots)
        self._write("sample_rows", step.sample_rows)
        self._write("sample_offsets", step.sample_offsets)
        self._write("tokens", step.tokens)
        self._write("tables", step.tables.reshape(-1))
        last = self._places["tables"][0] + rows * width
        if self._device is not self._host:
            self._device[:last].copy_(self._host[:last], non_blocking=True)
        segments = PagedSegments(
            query_starts=self._seen("query_starts", rows + 1),
            key_lengths=self._seen("key_lengths", rows),
            tables=self._seen("tables", rows * width).view(rows, width),
            page_size=self._page_size,
            num_queries=step.num_tokens,
            most_queries=int(step.queries.max()),
            most_keys=int(keys.max()),
        )
        others = {
            "bases": self._seen("bases", rows),
            "slots": self._seen("slots", rows),
            "sample_rows": self._seen("sample_rows", len(step.sample_rows)),
            "sample_offsets": self._seen("sample_offsets", len(step.sample_offsets)),
            "tokens": self._seen("tokens", step.num_tokens),
        }
        return segments, others

    def _write(self, name: str, numbers: np.ndarray) -> None:
        first = self._places[name][0]
        self._numbers[first : first + len(numbers)] = numbers

    def _seen(self, name: str, count: int) -> Tensor:
        first = self._places[name][0]
        return self._device[first : first + count]
