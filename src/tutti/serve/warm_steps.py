"""Steps that are made, compiled and timed before somebody waits for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from tutti.accelerator import Accelerator
from tutti.batching.prices import TabledPrices
from tutti.batching.settings import Settings
from tutti.serve.captured_steps import CapturedSteps, GraphKey
from tutti.serve.inputs import Given, Shape, StepInputs
from tutti.serve.sampler import Sampler
from tutti.serve.step_prices import measured_prices

# a prompt's chunk, and a decode: of every engine's size, be it ever so small
_SMALL = (Shape(2, 1, 1, 2, 2, 1), Shape(1, 1, 1, 1, 2))


class Plain(Protocol):
    """Computes a step of which nothing but tokens is wanted."""

    def __call__(
        self, given: Given, *, draws: bool, adapted: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return tokens, and how each row goes on."""


class WarmSteps:
    """A worker's steps before there are requests, or between them."""

    def __init__(
        self,
        graphs: CapturedSteps | None,
        inputs: StepInputs,
        sampler: Sampler,
        plain: Plain,
        rooms: Callable[[], int],
    ) -> None:
        self._graphs, self._inputs, self._sampler, self._plain = graphs, inputs, sampler, plain
        self._rooms = rooms  # layers that adapters add to, where there are adapters
        self._cold: list[tuple[Shape, bool]] = []  # sizes of steps, without and with adapters
        if graphs is not None:
            kinds = (False, True) if rooms() else (False,)
            cold = [(shape, adapted) for adapted in kinds for shape in graphs.shapes()]
            self._cold = sorted(cold, key=lambda pair: not graphs.is_usual(pair[0]))

    def all(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture steps of all sizes, and compile the largest."""
        count = len(self._cold)
        while self.next():
            if progress is not None:
                progress(count - len(self._cold), count)

    def usual(self) -> None:
        """Capture those that are likely to come first; compile what steps are made of.

        Kernels of the host are compiled when they first run, for many seconds where no cache has
        them yet: better before a server says that it is ready than while somebody waits.
        """
        if self._graphs is None:
            self._sampler.send()
            for shape in _SMALL:
                self.run(shape, shape.most_keys)
        while self._cold and self._graphs is not None and self._graphs.is_usual(self._cold[0][0]):
            self.next()

    def next(self) -> bool:
        """Capture one more; False if all are there."""
        if not self._cold:
            return False
        self._sampler.send()
        shape, adapted = self._cold.pop(0)
        self.rehearse(shape, 0, adapted=adapted)()
        return True

    def run(self, shape: Shape, keys: int) -> None:
        """Compute a step of a size, of which each row's last token is the last of so many."""
        self.rehearse(shape, keys)()

    @torch.no_grad()
    def rehearse(self, shape: Shape, keys: int, *, adapted: bool = False) -> Callable[[], None]:
        """Write such a step down; return what computes it, until the next one is written.

        `adapted`: the step is one whose rows have adapters; here none does.
        """
        draws = self._sampler.always_draws
        wide = self._graphs.shape_for(shape) if self._graphs is not None else None
        if self._graphs is not None and wide is not None and self._graphs.captures(wide):
            rooms = self._rooms() if adapted else 0
            key = GraphKey(wide, draws, self._sampler.columns_key, rooms)
            replay = self._graphs.get(
                key, lambda blank: self._plain(blank, draws=draws, adapted=adapted)
            )
            self._inputs.rehearsed(shape, wide, keys)  # making a graph leaves nothing
            return _nothing if replay is None else _of_no_result(replay)
        given = self._inputs.rehearsed(shape, wide or shape, keys)

        @torch.no_grad()
        def compute() -> None:
            self._plain(given, draws=draws, adapted=adapted)

        return compute

    def prices(self, settings: Settings, accelerator: Accelerator) -> TabledPrices:
        """Return what steps take here; there are no requests yet."""
        self._sampler.send()
        shapes = [] if self._graphs is None else self._graphs.shapes()
        captured = [s for s in shapes if self._graphs is not None and self._graphs.captures(s)]
        return measured_prices(
            slots=settings.slots,
            most_tokens=settings.most_tokens,
            longest=settings.max_length,
            rehearse=self.rehearse,
            synchronize=accelerator.synchronize,
            decode_sizes=sorted({shape.rows for shape in captured if not shape.long_rows}),
            mixed_sizes=sorted({shape.tokens for shape in captured if shape.long_rows}),
        )


def _nothing() -> None:
    """Compute nothing: the step could not be captured."""


def _of_no_result(replay: Callable[[], object]) -> Callable[[], None]:
    @torch.no_grad()
    def run() -> None:
        replay()

    return run
