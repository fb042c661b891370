"""Parts of logical tensors in a rank's spans, for optimizers that see tensors whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from tutti.models.parameters import Parameter
from tutti.ownership.ownership import Block
from tutti.train.state.state import SpanState

Name = tuple[int, str]  # unit, name in it


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A block of a tensor in a span of this rank."""

    state: SpanState
    index: int  # of the block in the span
    block: Block
    offset: int  # of its first element in the span

    @property
    def kept(self) -> tuple[int, int]:
        """The elements of the block that are kept here."""
        return self._within(self.state.kept)

    @property
    def own(self) -> tuple[int, int]:
        """Those of them that no other rank speaks for."""
        return self._within(self.state.span.own(self.state.rank))

    def _within(self, elements: slice) -> tuple[int, int]:
        low, high = elements.start - self.offset, elements.stop - self.offset
        return max(0, low), max(max(0, low), min(self.block.size, high))

    def of(self, flat: Tensor, low: int, high: int) -> Tensor:
        """Return some of the block's elements out of what is kept."""
        start = self.offset - self.state.kept.start
        return flat[start + low : start + high]


def tensor_parts(states: Iterable[SpanState]) -> Iterator[tuple[TensorPart, Parameter]]:
    """Yield the parts that are updated here, each with the tensor that it is of."""
    for state in states:
        offset = 0
        pairs = zip(state.span.blocks, state.parameters, strict=True)
        for index, (block, parameter) in enumerate(pairs):
            if not state.span.copied:
                yield TensorPart(state, index, block, offset), parameter
            offset += block.size


def by_tensor(parts: Iterable[TensorPart]) -> dict[Name, list[TensorPart]]:
    """Return the parts of each tensor, in the order in which all ranks come to tensors."""
    grouped: dict[Name, list[TensorPart]] = {}
    for part in parts:
        grouped.setdefault((part.block.unit, part.block.name), []).append(part)
    return dict(sorted(grouped.items()))


def is_whole(part: TensorPart, size: int) -> bool:
    """Tell whether a rank has all gradients of a tensor of some size, and needs nobody's."""
    return part.state.level == 0 and part.block.size == size


def speaks(part: TensorPart, pipeline: int) -> bool:
    """Tell whether a rank's own elements count: of shards inside pipelines the first one's do."""
    return part.state.level < 2 or pipeline == 0


def own_experts(parts: Iterable[TensorPart]) -> tuple[int, int]:
    """Return from where to where the first dimension of a tensor is here, of stacked ones."""
    rows = sorted({part.block.intervals[0] for part in parts})
    return rows[0][0], rows[-1][1]
