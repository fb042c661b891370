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
from tutti.serve.inputs import Given, Shape, StepInputs

LARGEST = 2048  # tokens of a captured step
MIXED = (64, 128, 256, 512, 768, 1024, LARGEST)  # tokens of captured steps with prompts
_LARGE_MULTIPLE = 512  # tokens of steps that are not captured
_FEWEST_KEYS, _MORE_KEYS = 1024, 8
_FEWEST_ROWS = 32  # of steps with prompts
FEW_LONG = 4  # prompts at a time, as they come in one by one
# rows grow by: with few prompts, where latency counts; with many at once
_MORE_ROWS, _MANY_MORE_ROWS = 2, 8


class GraphKey(NamedTuple):
    """What a graph was made for."""

    shape: Shape
    draws: bool
    columns: int


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
            rows = min(_next_size(shape.rows), settings.slots)
            return Shape(rows, rows, rows, 1, most_keys)
        few = shape.long_rows <= FEW_LONG
        more = _MORE_ROWS if few else _MANY_MORE_ROWS
        rows = min(_stepped(shape.rows, _FEWEST_ROWS, more), settings.slots)
        fitting = (size for size in MIXED if size >= max(shape.tokens, rows))
        large = -(-max(shape.tokens, rows) // _LARGE_MULTIPLE) * _LARGE_MULTIPLE
        tokens = min(next(fitting, large), settings.most_tokens)
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
        longest = settings.table_width * settings.page_size
        return min(_stepped(most_keys, _FEWEST_KEYS, _MORE_KEYS), longest)

    def shapes(self) -> list[Shape]:
        """Return the sizes of steps, the usual ones first: short contexts, few prompts."""
        all_keys = self._all_keys()
        return sorted(
            self.decode_shapes() + self.mixed_shapes(),
            key=lambda shape: (
                all_keys.index(shape.most_keys),
                shape.long_rows > FEW_LONG,
                shape.long_rows > 0 and shape.rows > _FEWEST_ROWS,
            ),
        )

    def is_usual(self, shape: Shape) -> bool:
        """Tell whether a step of a size is likely among the first."""
        short = shape.most_keys == self._keys_for(1)
        return (
            short
            and shape.long_rows <= FEW_LONG
            and shape.rows <= max(_FEWEST_ROWS, self._settings.slots if not shape.long_rows else 0)
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
            for long_rows, more in ((1, _MORE_ROWS), (FEW_LONG + 1, _MANY_MORE_ROWS))
            for rows in self._all_rows(more)
            for tokens in (*MIXED, most)
            if max(rows, long_rows) <= tokens <= most and long_rows <= rows
        )

    def _all_keys(self) -> list[int]:
        longest = self._settings.table_width * self._settings.page_size
        found = [self._keys_for(1)]
        while found[-1] < longest:
            found.append(self._keys_for(found[-1] + 1))
        return found

    def _all_rows(self, more: int) -> list[int]:
        slots = self._settings.slots
        found = [min(_FEWEST_ROWS, slots)]
        while found[-1] < slots:
            found.append(min(found[-1] * more, slots))
        return found

    def _distinct(self, shapes: Iterable[Shape]) -> list[Shape]:
        filled = (self.shape_for(shape) for shape in shapes)
        return list(dict.fromkeys(shape for shape in filled if shape is not None))

    def get(
        self, key: GraphKey, compute: Callable[[Given], Outputs]
    ) -> Callable[[], Outputs] | None:
        """Return a graph's replay; the step is to be written after, for making one leaves none."""
        if key not in self._graphs:
            given = self._inputs.blank(key.shape)
            made = self._accelerator.capture(
                lambda: compute(given), pool=self._pool, warm_ups=2 if not self._graphs else 1
            )
            if made is None:
                return None
            self._graphs[key] = made
        return self._graphs[key]


def _next_size(count: int) -> int:
    """Return the next of 1, 2, 4, 8, 12, 16, 24, 32 and so on."""
    if count <= 8:
        return 1 << max(0, count - 1).bit_length()
    size = 1 << (count - 1).bit_length()
    return size * 3 // 4 if count <= size * 3 // 4 else size


def _stepped(count: int, first: int, factor: int) -> int:
    """Return the next of first, first × factor, first × factor² and so on."""
    size = first
    while size < count:
        size *= factor
    return size
