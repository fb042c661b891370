"""What of an engine's state is saved and loaded: parts of logical tensors, as views of memory.

Of every tensor there are up to three kinds: its weight (the master copy if there is one), and the
optimizer's mean and square. A `Piece` is a rectangle of one of them with the memory it lives in, so
saving reads pieces and loading fills them. Which pieces a rank keeps follows from its plan; which
of them it writes, too: of what several ranks keep, each writes a share.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from torch import Tensor

from tutti.models.parameters import Parameter
from tutti.models.spec import ModelSpec
from tutti.models.tuning import is_read_again
from tutti.ownership.ownership import Block, Span
from tutti.ownership.rectangles import Rectangle, rectangles
from tutti.plan.factored_means import mean_shapes
from tutti.plan.job import MOMENTS
from tutti.train.state.factored import Factored, FactoredTensor
from tutti.train.state.span_gradients import local_part
from tutti.train.state.state import SpanState

if TYPE_CHECKING:
    from tutti.train.engine.engine import Engine

MOST_PIECE_BYTES = 64 << 20  # of what is written at once: a reader holds one in memory
_Range = tuple[int, int]  # half-open, of the elements of a block


class StateKind(StrEnum):
    """What is kept of a tensor."""

    WEIGHT = "weight"
    MEAN = "mean"
    SQUARE = "square"
    AVERAGE = "average"  # of the weights of many steps
    ROW = "row"  # means of squares over a matrix' rows, and over its columns
    COLUMN = "column"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A rectangle of one kind of a logical tensor."""

    name: str  # "3.attention.query.weight"; a tied tensor has the name of the one it is tied to
    kind: StateKind
    shape: tuple[int, ...]  # of the whole tensor
    rectangle: Rectangle
    memory: Tensor  # of the rectangle's sizes; a view of the engine's state
    copy: bool = False  # of a tied tensor whose owner is elsewhere: only its weight means anything

    @property
    def key(self) -> str:
        """What a checkpoint calls the whole tensor."""
        return f"{self.kind}/{self.name}"


def stored_name(unit: int, parameter: Parameter) -> str:
    """Return the name under which a tensor is saved: tied ones under one."""
    return parameter.tied_to or f"{unit}.{parameter.name}"


def kept_pieces(
    engine: Engine, *, most_bytes: int | None = None, frozen: bool = False
) -> list[Piece]:
    """Return everything that a rank keeps, as it must be loaded.

    With `frozen` also what a run with adapters does not save: its base.
    """
    kept: list[Piece] = []
    for state in engine.parameters.all_states():
        sources = _sources(state, writable=True)
        for index, own in _kept(state):
            kept += _pieces(engine, state, sources, index, own, most_bytes=most_bytes)
    for tensor in _factored(engine):
        kept += _means(tensor, tensor.first, tensor.last) if tensor.parts else ()
    for span in _fixed(engine, frozen=frozen):
        kept += _fixed_pieces(engine, span.blocks[0], (0, span.size), most_bytes=most_bytes)
    return kept


class KeptPieces:
    """What a rank keeps, asked for again and again: made anew only where its memory is another."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pieces: list[Piece] = []
        self._places: list[int] | None = None

    def now(self) -> list[Piece]:
        """Return the pieces; what they held memory of before stays theirs until then."""
        places = [place for state in self._engine.parameters.all_states() for place in _at(state)]
        places += [m.data_ptr() for t in _factored(self._engine) for m in t.means.values()]
        for span in _fixed(self._engine):
            block = span.blocks[0]
            places.append(self._engine.tensors[block.unit, block.name].view.data_ptr())
        if places != self._places:
            self._pieces, self._places = kept_pieces(self._engine), places
        return self._pieces


def _at(state: SpanState) -> Iterator[int]:
    """Yield where the memory of a span's state is."""
    sources = _sources(state, writable=True)
    for flat in sources.values():
        yield 0 if flat is None else flat.data_ptr()
    if sources[StateKind.WEIGHT] is None:
        yield from (view.data_ptr() for view in state.views)


def written_pieces(engine: Engine, *, most_bytes: int = MOST_PIECE_BYTES) -> list[Piece]:
    """Return what a rank writes: together, all ranks write every number once."""
    written: list[Piece] = []
    for state in engine.parameters.all_states():
        sources = _sources(state, writable=False)
        for index, own in _written(engine, state):
            pieces = _pieces(engine, state, sources, index, own, most_bytes=most_bytes)
            written += [piece for piece in pieces if not piece.copy]
    for tensor in _factored(engine):
        for first, last in tensor.written(engine.seat.place.pipeline):
            written += _means(tensor, first, last)
    for span in _fixed(engine):
        part = span.own(engine.seat.rank)
        own = (part.start, part.stop)
        written += _fixed_pieces(engine, span.blocks[0], own, most_bytes=most_bytes)
    return written


# --- which elements ------------------------------------------------------------------------


def _kept(state: SpanState) -> Iterator[tuple[int, _Range]]:
    """Yield the kept elements of each block, by its index in the span."""
    yield from _of_blocks(state, state.kept.start, state.kept.stop)


def _of_blocks(state: SpanState, start: int, stop: int) -> Iterator[tuple[int, _Range]]:
    offset = 0
    for index, block in enumerate(state.span.blocks):
        low, high = max(start, offset), min(stop, offset + block.size)
        if low < high:
            yield index, (low - offset, high - offset)
        offset += block.size


def _written(engine: Engine, state: SpanState) -> Iterator[tuple[int, _Range]]:
    """Yield the elements of each block that this rank writes of those that it keeps.

    At level 0 all holders keep all of them and share them out equally; at level 1 each has its
    own; at levels 2 and 3 every pipeline keeps all of them and writes an equal part of each block.
    """
    if state.level == 0:
        part = state.span.own(state.rank)
        yield from _of_blocks(state, part.start, part.stop)
        return
    lines = len(engine.plan.pipelines) if state.level >= 2 else 1
    line = engine.seat.place.pipeline if state.level >= 2 else 0
    for index, (low, high) in _kept(state):
        size = state.span.blocks[index].size
        start, stop = max(low, size * line // lines), min(high, size * (line + 1) // lines)
        if start < stop:
            yield index, (start, stop)


# --- which memory --------------------------------------------------------------------------


_Sources = dict[StateKind, Tensor | None]


def _sources(state: SpanState, *, writable: bool) -> _Sources:
    """Return the vectors that a span's state is in; without a master, weights are the modules'."""
    optimizer = state.optimizer
    optimizer.settle()  # what lives on the host may still be on its way
    return {
        StateKind.WEIGHT: optimizer.master,
        StateKind.MEAN: optimizer.numbers("mean", writable=writable),
        StateKind.SQUARE: optimizer.numbers("square", writable=writable),
        StateKind.AVERAGE: optimizer.average,
    }


def _pieces(
    engine: Engine,
    state: SpanState,
    sources: _Sources,
    index: int,
    own: _Range,
    *,
    most_bytes: int | None,
) -> Iterator[Piece]:
    block = state.span.blocks[index]
    parameter = engine.tensors[block.unit, block.name].piece.parameter
    before = sum(earlier.size for earlier in state.span.blocks[:index]) - state.kept.start
    for kind, flat in sources.items():
        if flat is None and kind is not StateKind.WEIGHT:
            continue
        source = state.views[index] if flat is None else flat
        most = None if most_bytes is None else max(1, most_bytes // source.element_size())
        for first, inner in rectangles(block.shape, *own, most=most):
            if flat is None:
                memory = source[inner.slices]
            else:
                start = before + first
                memory = source[start : start + inner.count].view(inner.sizes)
            yield Piece(
                name=stored_name(block.unit, parameter),
                kind=kind,
                shape=parameter.shape,
                rectangle=_of_whole(block, inner),
                memory=memory,
                copy=state.span.copied,
            )


def _factored(engine: Engine) -> list[FactoredTensor]:
    """Return the tensors whose squares are known by rows and columns."""
    directions = engine.directions
    return directions.tensors if isinstance(directions, Factored) else []


def _means(tensor: FactoredTensor, first: int, last: int) -> Iterator[Piece]:
    """Yield the means of a tensor; of stacked ones, of those from `first` to `last`."""
    shape = tensor.parameter.shape
    stacked = len(shape) > 2
    shapes = mean_shapes(shape)
    for name, mean in tensor.means.items():
        memory = mean[first - tensor.first : last - tensor.first] if stacked else mean
        offsets = (first if stacked else 0, *[0] * (mean.dim() - 1))
        yield Piece(
            name=stored_name(tensor.unit, tensor.parameter),
            kind=StateKind(name),
            shape=shapes[name],
            rectangle=Rectangle(offsets, tuple(memory.shape)),
            memory=memory,
        )


def _of_whole(block: Block, inner: Rectangle) -> Rectangle:
    starts = [start for start, _ in block.intervals]
    offsets = tuple(a + b for a, b in zip(starts, inner.offsets, strict=True))
    return Rectangle(offsets, inner.sizes)


# --- what is not trained -------------------------------------------------------------------


def _fixed(engine: Engine, *, frozen: bool = False) -> Iterator[Span]:
    """Yield the parts of tensors that no optimizer moves (a router's correction): a block each."""
    for unit in engine.seat.units:
        for span in engine.seats.ownership.untrained(unit):
            logical = engine.tensors.get((unit, span.blocks[0].name))
            if logical is None or not span.is_held_by(engine.seat.rank) or logical.owner.is_meta:
                continue  # what is held in few bits is read elsewhere
            if frozen or is_saved(engine.spec, logical.piece.parameter):
                yield span


def is_saved(spec: ModelSpec, parameter: Parameter) -> bool:
    """Tell whether checkpoints hold a tensor: beside adapters, frozen ones are the base's."""
    return not is_read_again(spec.tuning, parameter)


def _fixed_pieces(
    engine: Engine, block: Block, own: _Range, *, most_bytes: int | None
) -> Iterator[Piece]:
    logical = engine.tensors[block.unit, block.name]
    parameter, view = logical.piece.parameter, local_part(block, logical, logical.view)
    most = None if most_bytes is None else max(1, most_bytes // view.element_size())
    for _, inner in rectangles(block.shape, *own, most=most):
        yield Piece(
            name=stored_name(block.unit, parameter),
            kind=StateKind.WEIGHT,
            shape=parameter.shape,
            rectangle=_of_whole(block, inner),
            memory=view[inner.slices],
        )


def expected_keys(engine: Engine) -> dict[str, int]:
    """Return every key that a complete checkpoint of this job has, with its number of elements."""
    moments: list[str] = list(MOMENTS[engine.plan.job.optimizer])
    moments += [StateKind.AVERAGE] if engine.plan.job.average else []
    factored = engine.plan.job.optimizer == "adafactor"
    sizes: dict[str, int] = {}
    for unit, parameter in itertools.chain.from_iterable(
        ((unit, parameter) for parameter in engine.spec.parameters(unit))
        for unit in range(engine.spec.num_units)
    ):
        if not is_saved(engine.spec, parameter):
            continue
        name = stored_name(unit, parameter)
        kinds = [StateKind.WEIGHT, *(moments if parameter.trainable else [])]
        sizes |= {f"{kind}/{name}": parameter.size for kind in kinds}
        if factored and parameter.trainable:
            means = mean_shapes(parameter.shape)
            sizes |= {f"{kind}/{name}": math.prod(shape) for kind, shape in means.items()}
    return sizes
