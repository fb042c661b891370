"""Parts of logical tensors in a rank's spans, for optimizers that see tensors whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from tutti.models.parameters import Parameter
from tutti.ownership.ownership import Block
from tutti.ranks.rank_places import Seat, Seats
from tutti.train.state.state import SpanState
from tutti.train.state.unit_ranks import joined_units

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


def tensor_parts(states: Iterable[SpanState]) -> Iterator[TensorPart]:
    """Yield the parts that are updated here."""
    for state in states:
        offset = 0
        for index, block in enumerate(state.span.blocks):
            if not state.span.copied:
                yield TensorPart(state, index, block, offset)
            offset += block.size


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A tensor of a unit that is here, and what of it is: perhaps nothing, of spread experts."""

    unit: int
    parameter: Parameter
    parts: tuple[TensorPart, ...]
    alone: bool  # each rank of the unit has all its gradients, and needs nobody's

    @property
    def name(self) -> Name:
        """What it is called."""
        return self.unit, self.parameter.name


def whole_tensors(seats: Seats, seat: Seat, states: Iterable[SpanState]) -> Iterator[WholeTensor]:
    """Yield the tensors that the job's optimizer sees whole, in the order of all ranks."""
    parts: dict[Name, list[TensorPart]] = {}
    for part in tensor_parts(states):
        parts.setdefault((part.block.unit, part.block.name), []).append(part)
    ownership = seats.ownership
    for unit in sorted(joined_units(seats, seat)):
        spread = any(stage.experts for _, _, stage in seats.plan.holders(unit))
        for parameter in sorted(ownership.tensors(unit), key=lambda p: p.name):
            if not parameter.trainable or ownership.is_copied(unit, parameter):
                continue
            own = tuple(parts.get((unit, parameter.name), ()))
            alone = not (spread and parameter.experts) and all(
                part.state.level == 0 and part.block.size == parameter.size for part in own
            )
            yield WholeTensor(unit, parameter, own, alone)


def speaks(part: TensorPart, pipeline: int) -> bool:
    """Tell whether a rank's own elements count: of shards inside pipelines the first one's do."""
    return part.state.level < 2 or pipeline == 0


def own_experts(parts: Iterable[TensorPart]) -> tuple[int, int]:
    """Return from where to where the first dimension of a tensor is here, of stacked ones."""
    rows = sorted({part.block.intervals[0] for part in parts})
    return (rows[0][0], rows[-1][1]) if rows else (0, 0)
