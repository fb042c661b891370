"""The state of a rank between two generations, and how an engine is filled from what all hold.

A rank that left a generation keeps its masters and moments, on the device where they fit beside the
next engine, else on the host; copies lie in the host's memory. Filling an engine moves only what a
rank lacks, over `comm`, a bounded number of bytes at a time. What nobody holds is named; nothing is
ever made up.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tutti.accelerator import Accelerator
from tutti.comm import Communicator
from tutti.errors import InputError
from tutti.ownership.rectangles import Rectangle, intersection
from tutti.train.checkpoint.contents import Piece, StateKind, kept_pieces
from tutti.train.checkpoint.manifest import Progress
from tutti.train.checkpoint.staging import Staging
from tutti.train.elastic.state_moves import RectangleMove, find_moves, from_words, to_words

if TYPE_CHECKING:
    from tutti.train.engine.engine import Engine

ROUND_BYTES = 64 << 20  # in flight at once, over all ranks
_MOST_OF_DEVICE = 0.9  # that is taken while an old state lies beside a new engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What of a state is not tensors: the same on every rank."""

    progress: Progress
    updates: int
    loss_scale: Mapping[str, float]

    @classmethod
    def of(cls, engine: Engine, progress: Progress) -> Facts:
        """Return an engine's."""
        return cls(
            progress=progress,
            updates=engine.step_number,
            loss_scale=dict(engine.scaling.state_dict()),
        )

    def to_words(self) -> dict[str, Any]:
        """Return it as JSON can say it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_words(cls, words: Mapping[str, Any]) -> Facts:
        """Return what `to_words` said."""
        return cls(
            progress=Progress(**words["progress"]),
            updates=int(words["updates"]),
            loss_scale=dict(words["loss_scale"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldState:
    """Pieces of one step on the host, with what belongs to them."""

    facts: Facts
    pieces: tuple[Piece, ...]

    @property
    def step(self) -> int:
        """The last step that is in it."""
        return self.facts.progress.step

    @classmethod
    def taken(cls, engine: Engine, progress: Progress, *, same_plan: bool = False) -> HeldState:
        """Take an engine's state; the engine may go then.

        It is copied to the host, unless it can stay on the device beside an engine like this one:
        then what pieces are views of is all that is left of the engine.
        """
        pieces = [piece for piece in kept_pieces(engine) if not piece.copy]
        if not (same_plan and _fits_twice(engine, pieces)):
            pieces = Staging().copies(engine.accelerator, pieces)
        return cls(facts=Facts.of(engine, progress), pieces=tuple(pieces))


def _fits_twice(engine: Engine, pieces: Sequence[Piece]) -> bool:
    """Tell whether a device has room for an engine's state beside all that it ever took."""
    if engine.accelerator.device.type == "cpu":
        return False
    own = sum(p.memory.numel() * p.memory.element_size() for p in pieces if not p.memory.is_cpu)
    memory = engine.accelerator.memory()
    return max(memory.peak, memory.allocated) + own < _MOST_OF_DEVICE * memory.total


def let_go(accelerator: Accelerator) -> None:
    """Give back the memory of an engine that nobody names any more, before the next one is made."""
    if accelerator.device.type != "cpu":
        gc.collect()  # engines are in circles
        accelerator.empty_cache()


@torch.no_grad()
def fill(engine: Engine, control: Communicator, held: Sequence[HeldState], step: int) -> Facts:
    """Fill an engine with the state of a step from what the ranks hold; all ranks call it."""
    wanted = kept_pieces(engine)
    for piece in wanted:
        if piece.copy and piece.kind is not StateKind.WEIGHT:
            piece.memory.zero_()  # the owner's end has them
    needed = [p for p in wanted if not p.copy or p.kind is StateKind.WEIGHT]
    facts = _exchange(control, held, needed, step)
    engine.follow_masters()
    engine.step_number = facts.updates
    engine.scaling.load_state_dict(dict(facts.loss_scale))
    return facts


@torch.no_grad()
def offer(control: Communicator, held: Sequence[HeldState], step: int) -> None:
    """Take part in filling others' engines without having one."""
    _exchange(control, held, (), step)


def _exchange(
    control: Communicator, held: Sequence[HeldState], needed: Sequence[Piece], step: int
) -> Facts:
    """Move what each rank needs to it; return the facts of the step."""
    mine = [state for state in held if state.step == step]
    offered = [piece for state in mine for piece in state.pieces]
    words = {
        "offers": to_words(_by_key(offered)),
        "wants": to_words(_by_key(needed)),
        "dtypes": {p.key: str(p.memory.dtype).removeprefix("torch.") for p in offered},
        "facts": mine[0].facts.to_words() if mine else None,
    }
    told: list[Any] | None = control.gather_values(words) if control.size > 1 else [words]
    assert told is not None
    moves, missing = find_moves(
        [from_words(w["offers"]) for w in told], [from_words(w["wants"]) for w in told]
    )
    facts = next((w["facts"] for w in told if w["facts"] is not None), None)
    if missing or facts is None:
        what = missing[0].key if missing else "the state"
        raise InputError(
            f"step {step}: no process, copy or checkpoint holds {what}"
            + (f" {list(missing[0].rectangle.offsets)}" if missing else "")
            + "; go on from a checkpoint with --resume"
        )
    dtypes = [{key: getattr(torch, name) for key, name in w["dtypes"].items()} for w in told]
    _carry_out(moves, _Pieces(offered), _Pieces(needed), control, dtypes)
    return Facts.from_words(facts)


def _by_key(pieces: Iterable[Piece]) -> dict[str, list[Rectangle]]:
    rectangles: dict[str, list[Rectangle]] = {}
    for piece in pieces:
        rectangles.setdefault(piece.key, []).append(piece.rectangle)
    return rectangles


class _Pieces:
    """Memory by key and rectangle."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces: dict[str, list[Piece]] = {}
        for piece in pieces:
            self._pieces.setdefault(piece.key, []).append(piece)

    def view(self, key: str, rectangle: Rectangle) -> Tensor:
        """Return the memory of a rectangle that lies inside one piece."""
        for piece in self._pieces[key]:
            inner = rectangle.within(piece.rectangle)
            ends = zip(inner.offsets, inner.sizes, piece.rectangle.sizes, strict=True)
            if all(low >= 0 and low + size <= extent for low, size, extent in ends):
                return piece.memory[inner.slices]
        raise AssertionError(f"no piece holds {key} {rectangle}")

    def put(self, key: str, rectangle: Rectangle, numbers: Tensor) -> None:
        """Write a rectangle's numbers to wherever it is kept: a tied tensor may be there twice."""
        for piece in self._pieces[key]:
            common = intersection(rectangle, piece.rectangle)
            if common is not None:
                target = piece.memory[common.within(piece.rectangle).slices]
                target.copy_(numbers[common.within(rectangle).slices])


def _carry_out(
    moves: Sequence[RectangleMove],
    offered: _Pieces,
    wanted: _Pieces,
    control: Communicator,
    dtypes: Sequence[Mapping[str, torch.dtype]],
) -> None:
    """Move everything; what crosses ranks goes in rounds that all ranks share.

    Numbers cross as who gives them has them: a master may become a weight to compute with.
    """
    rank = control.rank
    crossing = list[RectangleMove]()
    for move in moves:
        if move.source != move.target:
            crossing.append(move)
        elif move.target == rank:
            wanted.put(move.key, move.rectangle, offered.view(move.key, move.rectangle))
    for batch in _rounds(crossing):
        sends, receives, after = [], [], list[tuple[RectangleMove, Tensor]]()
        for move in batch:
            if move.source == rank:
                tensor = offered.view(move.key, move.rectangle).cpu().contiguous()
                sends.append((tensor, move.target))
            elif move.target == rank:
                dtype = dtypes[move.source][move.key]
                tensor = torch.empty(move.rectangle.sizes, dtype=dtype)
                receives.append((tensor, move.source))
                after.append((move, tensor))
        if sends or receives:
            control.exchange(sends, receives, channel="state").wait()
        for move, tensor in after:
            wanted.put(move.key, move.rectangle, tensor)


def _rounds(moves: Sequence[RectangleMove]) -> Iterable[list[RectangleMove]]:
    batch, size = list[RectangleMove](), 0
    for move in moves:
        num_bytes = move.rectangle.count * 4
        if batch and size + num_bytes > ROUND_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(move)
        size += num_bytes
    if batch:
        yield batch
