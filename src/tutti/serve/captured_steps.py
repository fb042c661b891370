"""Steps as graphs: by their size, each made when it is first wanted.

Kernel by kernel a step of a large model is a matter of the host; as one graph it takes what its
kernels take. A step is filled up to the next size. Steps that are so large that the host is faster
than the device are filled up too, for kernels are compiled by size, but run kernel by kernel; so
do those that a graph cannot hold (logits that are looked at, sampling that asks the host, a model
whose operators do).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor

from tutti.accelerator import Accelerator
from tutti.batching.settings import Settings
from tutti.batching.step_sizes import (
    FEW_LONG,
    FEWEST_ROWS,
    LARGEST,
    MANY_MORE_ROWS,
    MIXED,
    MORE_ROWS,
    decode_rows,
    keys_for,
    mixed_rows,
    mixed_tokens,
)
from tutti.serve.inputs import Given, Shape, StepInputs


class GraphKey(NamedTuple):
    """What a graph was made for."""

    shape: Shape
    draws: bool
    columns: int
    rooms: int = 0  # layers that adapters add to; 0: no row has one


Outputs = tuple[Tensor, Tensor]


class CapturedSteps:
    """Graphs of steps."""

    def __init__(self, accelerator: Accelerator, settings: Settings, inputs: StepInputs) -> None:
        self._accelerator, self._settings, self._inputs = accelerator, settings, inputs
        self._pool = accelerator.graph_pool()
        self._graphs: dict[GraphKey, Callable[[], Outputs]] = {}

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._graphs)

    def shape_for(self, shape: Shape) -> Shape | None:
        """Return the size that a step is filled up to; None where the chip has no graphs."""
        settings = self._settings
        if self._pool is None:
            return None
        most_keys = self._keys_for(shape.most_keys)
        if shape.most_queries == 1:
            rows = min(decode_rows(shape.rows), settings.slots)
            return Shape(rows, rows, rows, 1, most_keys)
        few = shape.long_rows <= FEW_LONG
        rows = min(mixed_rows(shape.rows, few=few), settings.slots)
        tokens = mixed_tokens(max(shape.tokens, rows), settings.most_tokens)
        if tokens < rows:
            return None
        samples = rows if shape.samples <= rows else tokens  # after guesses: more than one a row
        return Shape(tokens, rows, samples, tokens, most_keys, min(rows, FEW_LONG) if few else rows)

    @staticmethod
    def captures(shape: Shape) -> bool:
        """Tell whether a step of a size is a graph."""
        return shape.tokens <= LARGEST

    def _keys_for(self, most_keys: int) -> int:
        settings = self._settings
        return keys_for(most_keys, settings.table_width * settings.page_size)

    def shapes(self) -> list[Shape]:
        """Return the sizes of steps, the usual ones first: short contexts, few prompts."""
        all_keys = self._all_keys()
        return sorted(
            self.decode_shapes() + self.mixed_shapes(),
            key=lambda shape: (
                all_keys.index(shape.most_keys),
                shape.long_rows > FEW_LONG,
                shape.long_rows > 0 and shape.rows > FEWEST_ROWS,
            ),
        )

    def is_usual(self, shape: Shape) -> bool:
        """Tell whether a step of a size is likely among the first."""
        short = shape.most_keys == self._keys_for(1)
        return (
            short
            and shape.long_rows <= FEW_LONG
            and shape.rows <= max(FEWEST_ROWS, self._settings.slots if not shape.long_rows else 0)
        )

    def decode_shapes(self) -> list[Shape]:
        """Return the sizes of steps of single tokens, the usual ones first."""
        rows = range(self._settings.slots, 0, -1)
        return self._distinct(Shape(n, n, n, 1, keys) for keys in self._all_keys() for n in rows)

    def mixed_shapes(self) -> list[Shape]:
        """Return the sizes of steps with chunks of prompts, the usual ones first."""
        most = self._settings.most_tokens
        return self._distinct(
            Shape(tokens, rows, 1, tokens, keys, long_rows)
            for keys in self._all_keys()
            for long_rows, more in ((1, MORE_ROWS), (FEW_LONG + 1, MANY_MORE_ROWS))
            for rows in self._all_rows(more)
            for tokens in (*MIXED, most)
            if max(rows, long_rows) <= tokens <= most and long_rows <= rows
        )

    def _all_keys(self) -> list[int]:
        longest = self._settings.table_width * self._settings.page_size
        key_counts = [self._keys_for(1)]
        while key_counts[-1] < longest:
            key_counts.append(self._keys_for(key_counts[-1] + 1))
        return key_counts

    def _all_rows(self, more: int) -> list[int]:
        slots = self._settings.slots
        row_counts = [min(FEWEST_ROWS, slots)]
        while row_counts[-1] < slots:
            row_counts.append(min(row_counts[-1] * more, slots))
        return row_counts

    def _distinct(self, shapes: Iterable[Shape]) -> list[Shape]:
        filled = (self.shape_for(shape) for shape in shapes)
        return list(dict.fromkeys(shape for shape in filled if shape is not None))

    def _drop_outgrown(self, rooms: int) -> None:
        """Let go of graphs in which some layer has no adapters that has them now."""
        old = [key for key in self._graphs if 0 < key.rooms < rooms]
        if old:
            self._accelerator.synchronize()
        for key in old:
            del self._graphs[key]

    def get(
        self, key: GraphKey, compute: Callable[[Given], Outputs]
    ) -> Callable[[], Outputs] | None:
        """Return a graph's replay; the step is to be written after, for making one leaves none."""
        if key not in self._graphs:
            self._drop_outgrown(key.rooms)
            given = self._inputs.blank(key.shape)
            made = self._accelerator.capture(
                lambda: compute(given), pool=self._pool, warm_ups=2 if not self._graphs else 1
            )
            if made is None:
                return None
            self._graphs[key] = made
        return self._graphs[key]
