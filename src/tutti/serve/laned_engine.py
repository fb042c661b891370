"""`LanedEngine`: one rank of an engine of several stages, with a step of each lane under way.

A lane has its own scheduler, slots and pages. All ranks are given the same requests in the same
order and take turns alike: a turn ends a lane's step and begins its next one, so that while the
last stage computes one lane's, the first computes another's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from torch import Tensor

from tutti.batching import Scheduler
from tutti.batching.imported import import_prefix
from tutti.batching.router import PROMPT_WEIGHT
from tutti.errors import TuttiError
from tutti.serve.engine import Engine
from tutti.serve.handover.arrivals import Arrivals, write_pages
from tutti.serve.handover.handed import Handover
from tutti.serve.outputs import Completion, Counters, Piece
from tutti.serve.parameters import SamplingParameters


class LanedEngine:
    """Engines of one rank that take turns."""

    def __init__(self, lanes: Sequence[Engine], arrivals: Arrivals | None = None) -> None:
        self.lanes, self.arrivals = list(lanes), arrivals
        self._work: dict[int, float] = {}  # of requests, by number
        self._lane_work = [0.0] * len(self.lanes)
        self._turn = 0

    # --- requests, by numbers that tell their lane -----------------------------------------

    def add(
        self,
        tokens: Sequence[int],
        parameters: SamplingParameters,
        *,
        pooling: str | None = None,
        handover: Handover | None = None,
        imported: str = "",
    ) -> int:
        """Put a request in line on the lane that has least to do; return its number.

        `imported`: the name under which the keys and values of its prompt have arrived.
        """
        lane = self._lane_work.index(min(self._lane_work))
        engine = self.lanes[lane]
        arrived = self._arrived(imported) if imported else None
        own = engine.add(tokens, parameters, pooling=pooling, handover=handover)
        if imported:
            self._import(engine, tokens, parameters, arrived)
        number = own * len(self.lanes) + lane
        work = len(tokens) * PROMPT_WEIGHT + parameters.max_tokens
        self._work[number] = work
        self._lane_work[lane] += work
        return number

    def cancel(self, number: int) -> None:
        """Stop a request."""
        own, lane = divmod(number, len(self.lanes))
        self._forget(number)
        self.lanes[lane].cancel(own)

    def take(self, number: int) -> Completion | None:
        """Return a request's completion once, when it is there."""
        own, lane = divmod(number, len(self.lanes))
        done = self.lanes[lane].take(own)
        if done is not None:
            self._forget(number)
        return done

    def _forget(self, number: int) -> None:
        self._lane_work[number % len(self.lanes)] -= self._work.pop(number, 0.0)

    def _arrived(self, key: str) -> dict[int, list[Tensor]] | None:
        """Return the keys and values that arrived for a request; None: this rank needs none."""
        arrived = None if self.arrivals is None else self.arrivals.pop(key)
        if self.arrivals is None or (arrived is None and self.arrivals.expects):
            raise TuttiError(f"keys and values '{key}' were to be here")
        return arrived

    def _import(
        self,
        engine: Engine,
        tokens: Sequence[int],
        parameters: SamplingParameters,
        arrived: dict[int, list[Tensor]] | None,
    ) -> None:
        """Write what arrived to pages of a lane, where its request will find it."""
        prompt = tokens[: len(tokens) - parameters.answered]
        whole = len(tokens) - 1  # of the last token nothing was computed yet
        new = import_prefix(
            engine.scheduler, tokens[:whole], salt=parameters.salt, base=len(prompt)
        )
        engine.worker.host_pages.stow(new.stows)
        engine.counters.stowed_pages += len(new.stows)
        if arrived:
            write_pages(engine.worker.cache, arrived, new)

    # --- turns -----------------------------------------------------------------------------

    def step(self) -> list[Piece]:
        """Take a turn: end the next lane's step, and begin another; return what it added."""
        count = len(self.lanes)
        if count == 1:
            return self.lanes[0].step()
        lane = self._turn % count
        self._turn += 1
        engine = self.lanes[lane]
        pieces = engine.finish()
        engine.launch()
        return [replace(piece, request=piece.request * count + lane) for piece in pieces]

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for anything."""
        return all(engine.is_idle for engine in self.lanes)

    # --- what is there ---------------------------------------------------------------------

    @property
    def schedulers(self) -> list[Scheduler]:
        """Those of all lanes."""
        return [engine.scheduler for engine in self.lanes]

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot, on the lane that has fewest."""
        return min(len(scheduler.waiting) for scheduler in self.schedulers)

    @property
    def counters(self) -> Counters:
        """What all lanes have done."""
        total = Counters()
        for engine in self.lanes:
            for field in fields(Counters):
                if field.name != "finished":
                    more = getattr(total, field.name) + getattr(engine.counters, field.name)
                    setattr(total, field.name, more)
        return total
