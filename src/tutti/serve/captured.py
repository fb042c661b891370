"""Steps as graphs: by their size, each made when it is first wanted.

Kernel by kernel a step of a large model is a matter of the host; as one graph it takes what its
kernels take. A step is filled up to the next size. What a graph cannot hold (logits that are looked
at, sampling that asks the host, a model whose operators do) runs kernel by kernel, as do steps
that are so large that the host is faster than the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor

from tutti.accelerator import Accelerator
from tutti.batching.settings import Settings
from tutti.serve.inputs import Given, Shape, StepInputs

LARGEST = 2048  # tokens of a captured step
MIXED = (64, 128, 256, 512, 768, 1024, 1536, LARGEST)  # tokens of captured steps with prompts
_FEWEST_KEYS, _MORE_KEYS = 1024, 4


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
        """Return the size that a step is filled up to; None: no graph is made for it."""
        settings = self._settings
        if self._pool is None or shape.tokens > min(LARGEST, settings.most_tokens):
            return None
        most_keys = _FEWEST_KEYS
        while most_keys < shape.most_keys:
            most_keys *= _MORE_KEYS
        most_keys = min(most_keys, settings.table_width * settings.page_size)
        if shape.most_queries == 1:
            rows = min(_next_size(shape.rows), settings.slots)
            return Shape(rows, rows, rows, 1, most_keys)
        rows = min(max(16, _power_of_four(shape.rows)), settings.slots)
        fitting = (size for size in MIXED if size >= max(shape.tokens, rows))
        tokens = min(next(fitting, LARGEST), settings.most_tokens)
        if tokens < rows:
            return None
        samples = rows if shape.samples <= rows else tokens  # after guesses: more than one a row
        return Shape(tokens, rows, samples, tokens, most_keys)

    def decode_shapes(self) -> list[Shape]:
        """Return the sizes of steps of single tokens, of contexts that are not long."""
        slots = self._settings.slots
        return self._distinct(Shape(rows, rows, rows, 1, 1) for rows in range(1, slots + 1))

    def mixed_shapes(self) -> list[Shape]:
        """Return the sizes of steps with chunks of prompts, of contexts that are not long."""
        slots = self._settings.slots
        return self._distinct(
            Shape(tokens, rows, 1, tokens, 1)
            for rows in (1, 17, 65, 257, 1025)
            for tokens in MIXED
            if rows <= min(slots, tokens)
        )

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


def _power_of_four(count: int) -> int:
    size = 1
    while size < count:
        size *= 4
    return size
