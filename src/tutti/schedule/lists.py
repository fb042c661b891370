"""Writes the instruction list of one class of equal ranks from its stage's events.

Order within the list is the order on each lane; `after` adds what a lane's order does not say.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

from tutti.ownership.buckets import Bucket
from tutti.plan.plan import Replica, Stage
from tutti.schedule.emitter import Emitter, make_tuple, waits
from tutti.schedule.events import BoundaryMove, Event
from tutti.schedule.instruction import Instruction, Op, Scope, What
from tutti.schedule.listing import Listing
from tutti.schedule.order import Action, Pass
from tutti.schedule.segments import Groups, Segment, apart_units, make_segments
from tutti.schedule.sync import Synchroniser


@dataclass(frozen=True, slots=True)
class ListInput:
    """All that the list of a class of ranks depends on."""

    stage: Stage
    replica: Replica
    buckets: list[Bucket]
    events: list[Event]
    chunk_bounds: dict[int, tuple[int, int]]  # the stage's chunks → their units
    micro_batches: int
    tied: bool  # takes part in SyncTied


def write_list(given: ListInput, *, replay: bool = True) -> Listing:
    """Return the instructions of one class of ranks; without `replay` every pass is written out."""
    return _Writer(given, replay=replay).write()


class _Block(NamedTuple):
    """A pass that was written, and what it left behind, by distance from its end."""

    number: int
    state: tuple[int, ...]
    source: int  # of what a Send carries
    reduced: tuple[int, ...]
    offloaded: tuple[tuple[int, int], ...]  # first unit → its Offload


class _Writer:
    def __init__(self, given: ListInput, *, replay: bool) -> None:
        self.given = given
        self.replay = replay
        self.to = Emitter()
        self.sync = Synchroniser(
            self.to,
            given.stage,
            given.replica,
            given.buckets,
            micro_batches=given.micro_batches,
            tied=given.tied,
        )
        self.segments = {
            chunk: make_segments(*bounds, given.replica, given.buckets, apart_units(given.stage))
            for chunk, bounds in given.chunk_bounds.items()
        }
        self.away = {
            chunk: tuple(
                atom.start
                for segment in cut.forward
                for atom in segment.atoms
                if atom.offload_activations
            )
            for chunk, cut in self.segments.items()
        }
        # Per chunk, the micro-batch whose weight pass comes last: gradients are whole then.
        self.final = {
            event.chunk: event.micro_batch
            for event in given.events
            if isinstance(event, Action) and event.kind == Pass.BACKWARD_WEIGHT
        }
        self.received: dict[tuple[What, int, int], int] = {}
        self.with_batch: set[int] = set()  # micro-batches whose tokens are on the chip
        self.started: set[int] = set()  # chunks that had their first forward
        # Segments whose weight pass is still to come.
        self.parked: dict[tuple[int, int], tuple[Segment, ...]] = {}
        self.offloaded: dict[tuple[int, int], int] = {}
        self.sources = {What.ACTIVATIONS: -1, What.GRADIENTS: -1}  # what a Send carries
        self.moves: dict[tuple[Op, What, int, int], int] = {}  # blocks
        self.blocks: dict[object, _Block] = {}

    def write(self) -> Listing:
        self.sync.gather_once()
        self.to.close()
        for index, event in enumerate(self.given.events):
            if isinstance(event, BoundaryMove):
                self._move(event)
            else:
                self._pass(event, index)
        self.to.resume()
        self.sync.finish()
        self.to.close()
        return self.to.tape.listing()

    def _pass(self, action: Action, index: int) -> None:
        """Write a pass, or play it again where everything it depends on is as it was."""
        kind, chunk, micro_batch = action
        follows = kind == Pass.BACKWARD_INPUT and self._weights_follow(index)
        key = self._key(action, follows=follows) if self.replay else None
        known = self.blocks.get(key) if key is not None else None
        if known is not None:
            self._again(known, action, follows=follows)
            return
        before = len(self.sync.reduced)
        self.to.resume()
        if kind == Pass.FORWARD:
            self._forward(action)
        elif kind == Pass.BACKWARD_INPUT:
            self._backward_input(action, weights_follow=follows)
        else:
            self._backward_weight(action)
        number = self.to.close(micro_batch)
        if key is None:
            return
        here = self.to.place
        what = What.ACTIVATIONS if kind == Pass.FORWARD else What.GRADIENTS
        stored = self.away[chunk] if kind == Pass.FORWARD else ()
        self.blocks[key] = _Block(
            number,
            self.to.left,
            self.sources[what] - here,
            tuple(at - here for at in self.sync.reduced[before:]),
            tuple((unit, self.offloaded[unit, micro_batch] - here) for unit in stored),
        )

    def _key(self, action: Action, *, follows: bool) -> object:
        """Return all that a pass depends on, by distance; None where it is one of its kind."""
        kind, chunk, micro_batch = action
        bounds, here = self.given.chunk_bounds[chunk], self.to.place
        if kind == Pass.FORWARD:
            if chunk not in self.started:
                return None
            arrived = self.received.get((What.ACTIVATIONS, bounds[0], micro_batch), -1)
            more: object = micro_batch in self.with_batch
        else:
            if self.final[chunk] == micro_batch or not self.sync.is_plain:
                return None
            arrived, more = -1, (chunk, micro_batch) in self.parked
            if kind == Pass.BACKWARD_INPUT:
                arrived = self.received.get((What.GRADIENTS, bounds[1], micro_batch), -1)
                stored = self.away[chunk]
                more = tuple(self.offloaded[unit, micro_batch] - here for unit in stored)
        distance = here - arrived if arrived >= 0 else 0
        return (kind, chunk, follows, distance, more, here - self.to.left_place, self.to.left)

    def _again(self, block: _Block, action: Action, *, follows: bool) -> None:
        kind, chunk, micro_batch = action
        bounds = self.given.chunk_bounds[chunk]
        self.to.play(block.number, micro_batch, block.state)
        here = self.to.place
        if kind == Pass.FORWARD:
            self.received.pop((What.ACTIVATIONS, bounds[0], micro_batch), None)
            self.with_batch.add(micro_batch)
            self.sources[What.ACTIVATIONS] = here + block.source
            for unit, stored in block.offloaded:
                self.offloaded[unit, micro_batch] = here + stored
            return
        if kind == Pass.BACKWARD_INPUT:
            self.received.pop((What.GRADIENTS, bounds[1], micro_batch), None)
            self.sources[What.GRADIENTS] = here + block.source
            for unit in self.away[chunk]:
                del self.offloaded[unit, micro_batch]
            if follows:
                self.parked[chunk, micro_batch] = self.segments[chunk].backward[0]
        else:
            self.parked.pop((chunk, micro_batch), None)
        self.sync.reduced.extend(here + at for at in block.reduced)

    def _weights_follow(self, index: int) -> bool:
        """Tell whether the weight pass of an input pass is what its stage computes next."""
        events = self.given.events
        following = index + 1
        while following < len(events) and type(events[following]) is BoundaryMove:
            following += 1
        if following == len(events):
            return False
        return events[following] == (Pass.BACKWARD_WEIGHT, *events[index][1:])

    def _move(self, move: BoundaryMove) -> None:
        op, what, unit, micro_batch = move
        to, here = self.to, self.to.place
        distance = 0
        if op is Op.RECEIVE:
            self.received[what, unit, micro_batch] = here
        else:
            distance = here - self.sources[what]
        known = self.moves.get((op, what, unit, distance))
        if known is not None:
            to.place = to.tape.play(known, here, micro_batch)
            return
        after = (here - distance,) if distance else ()
        fields = (op, micro_batch, unit, unit, what, Scope.ALL, after)
        entry = make_tuple(Instruction, fields)
        self.moves[op, what, unit, distance] = to.insert(entry, micro_batch)

    def _take(self, what: What, unit: int, micro_batch: int) -> tuple[int, ...]:
        index = self.received.pop((what, unit, micro_batch), None)
        return () if index is None else (index,)

    def _forward(self, action: Action) -> None:
        _, chunk, micro_batch = action
        cut = self.segments[chunk]
        first = chunk not in self.started
        self.started.add(chunk)
        start, stop = self.given.chunk_bounds[chunk]
        waiting = self._take(What.ACTIVATIONS, start, micro_batch)
        if micro_batch not in self.with_batch:
            self.with_batch.add(micro_batch)
            waiting += (self.to.fetch(What.BATCH, micro_batch, start, stop),)
        for segment in cut.first_forward if first else cut.forward:
            if segment.brings_parameters:
                needed = self.sync.bring_parameters(segment, micro_batch, entering_from_below=True)
                waiting = waits(waiting, needed)
            if first:
                waiting = waits(waiting, self.sync.gathered_for(segment))
            if segment.offloads_activations:
                waiting = waits(waiting, self.to.room(What.ACTIVATIONS))
            index = self.to.compute(Op.FORWARD, micro_batch, segment.start, segment.stop, waiting)
            waiting = ()
            if segment.offloads_activations:
                self._store_activations(segment, micro_batch, index)
            self.sources[What.ACTIVATIONS] = index

    def _store_activations(self, segment: Segment, micro_batch: int, source: int) -> None:
        for atom in segment.atoms:
            if atom.offload_activations:
                span = (atom.start, atom.stop)
                stored = self.to.offload(What.ACTIVATIONS, micro_batch, *span, (source,))
                self.offloaded[atom.start, micro_batch] = self.to.leaves(What.ACTIVATIONS, stored)

    def _backward_groups(self, chunk: int, micro_batch: int) -> Groups:
        cut = self.segments[chunk]
        return cut.final_backward if self.final[chunk] == micro_batch else cut.backward

    def _backward_input(self, action: Action, *, weights_follow: bool) -> None:
        """Go down the groups, each followed by its weight passes where they are next anyway.

        The lowest group's weight passes are left for later: the gradient it hands to the previous
        stage is sent first.
        """
        _, chunk, micro_batch = action
        bounds = self.given.chunk_bounds[chunk]
        waiting, sends = self._take(What.GRADIENTS, bounds[1], micro_batch), bounds[0] > 0
        groups = self._backward_groups(chunk, micro_batch)
        downwards = [segment for group in reversed(groups) for segment in reversed(group)]
        needed = self._bring(downwards[0], micro_batch)
        following = itertools.chain(downwards[1:], (None,))
        for group in reversed(groups):
            for segment in reversed(group):
                self._input_gradient(segment, micro_batch, waiting, needed)
                waiting, below = (), next(following)
                # What the next one needs is asked for before reductions queue up ahead of it.
                needed = self._bring(below, micro_batch) if below is not None else ()
            if not weights_follow:
                continue
            if group is groups[0]:
                self.parked[chunk, micro_batch] = group
                continue
            for segment in reversed(group):
                self._weights(segment, chunk, micro_batch, before_send=sends)

    def _bring(self, segment: Segment, micro_batch: int) -> tuple[int, ...]:
        """Bring parameters and activations that a backward pass needs and the chip lacks."""
        needed: tuple[int, ...] = ()
        if segment.brings_parameters:
            needed = tuple(
                self.sync.bring_parameters(segment, micro_batch, entering_from_below=False)
            )
        if segment.offloads_activations:
            needed += self._bring_activations(segment, micro_batch)
        return needed

    def _input_gradient(
        self, segment: Segment, micro_batch: int, waiting: tuple[int, ...], needed: tuple[int, ...]
    ) -> None:
        span = (segment.start, segment.stop)
        if segment.recompute:  # does not need the gradient: may run while waiting
            self.to.compute(Op.RECOMPUTE, micro_batch, *span, needed)
            needed = ()
        after = waits(waiting, needed) if needed else waiting
        self.sources[What.GRADIENTS] = self.to.compute(Op.BACKWARD_INPUT, micro_batch, *span, after)

    def _bring_activations(self, segment: Segment, micro_batch: int) -> tuple[int, ...]:
        return tuple(
            self.to.fetch(
                What.ACTIVATIONS,
                micro_batch,
                atom.start,
                atom.stop,
                after=(self.offloaded.pop((atom.start, micro_batch)),),
            )
            for atom in segment.atoms
            if atom.offload_activations
        )

    def _backward_weight(self, action: Action) -> None:
        _, chunk, micro_batch = action
        left = self.parked.pop((chunk, micro_batch), None)
        groups = self._backward_groups(chunk, micro_batch) if left is None else (left,)
        self.sync.release()
        for group in reversed(groups):
            for segment in reversed(group):
                self._weights(segment, chunk, micro_batch)

    def _weights(
        self, segment: Segment, chunk: int, micro_batch: int, *, before_send: bool = False
    ) -> None:
        span = (segment.start, segment.stop)
        room = self.to.room(What.GRADIENTS) if segment.hands_gradients else ()
        index = self.to.compute(Op.BACKWARD_WEIGHT, micro_batch, *span, room)
        final = self.final[chunk] == micro_batch
        if final or segment.hands_gradients:
            self.sync.hand_gradients(segment, micro_batch, index, final=final, hold=before_send)
