"""`Scheduler`: who is computed in the next step.

Decodes go first, each with one token; what is left of the budget goes to prefill, in chunks, in the
order of arrival and priority; then the next in line are admitted, as far as pages reach. A sequence
that lacks a page takes one from those that go last: these give their slot back, and what they had
is computed anew later or kept on the host meanwhile (`on_host`). The first in order always finds
room, so everybody ends.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping

import numpy as np

from tutti.batching.computed_pages import ComputedPages
from tutti.batching.events import (
    FAILS,
    STOPS,
    Arrived,
    Cancelled,
    Event,
    Guessed,
    Received,
    Room,
    Tokens,
)
from tutti.batching.fill_step import Filling
from tutti.batching.pages import PagePool
from tutti.batching.prefix import PrefixTree
from tutti.batching.prices import Prices
from tutti.batching.request import Finish, Request, Sequence
from tutti.batching.request_limits import check_request
from tutti.batching.sequences_on_host import SequencesOnHost
from tutti.batching.settings import Settings
from tutti.batching.slots import ENDED, STAYS, Slots
from tutti.batching.step import I32, LAST, Beginning, Step
from tutti.batching.steps_in_flight import StepInFlight, with_guesses
from tutti.errors import InputError


class Scheduler:
    """Serving's state machine; see the package."""

    def __init__(self, settings: Settings, prices: Prices | None = None) -> None:
        if settings.target_s is not None and prices is None:
            raise InputError("serving: a latency target needs prices of steps")
        self.settings = settings
        self.pool = PagePool(settings.pages)
        self.tree = PrefixTree(self.pool, settings.page_size)
        self.slots = Slots(settings)
        self.waiting: list[Sequence] = []  # a heap
        self.on_host = SequencesOnHost(settings, prices, self.slots)
        self._computed_pages = ComputedPages(settings, self.pool, self.tree, self.slots)
        self._filling = Filling(
            settings, prices, self.pool, self.tree, self.slots, self.on_host, self._free_leaving
        )
        self._flights: deque[StepInFlight] = deque()
        self._requests: dict[int, list[Sequence]] = {}
        self._steps = 0
        self._sequences = 0
        self._finished: list[Sequence] = []
        self._guesses: Mapping[int, tuple[int, ...]] = {}

    # --- events ----------------------------------------------------------------------------

    def handle(self, event: Event) -> Step | Received | None:
        """Take an event; a replayed log of them gives the same steps."""
        match event:
            case Arrived(request):
                self.arrive(request)
            case Cancelled(request=number, sample=sample, finish=finish):
                self.cancel(number, sample=sample, finish=finish)
            case Guessed(guesses):
                self.guess(guesses)
            case Tokens():
                return self.receive(event)
            case Room():
                return self.next_step()
        return None

    def arrive(self, request: Request) -> tuple[Sequence, ...]:
        """Put a request in line; return its samples."""
        self._check(request)
        order = self._steps - request.priority * self.settings.aging
        samples = []
        for sample in range(request.samples):
            tokens = list(request.prompt)
            base = len(tokens) - request.answered
            samples.append(Sequence(self._sequences, request, sample, order, tokens, base))
            self._sequences += 1
        samples[0].siblings = samples[1:]
        self._requests[request.id] = samples
        heapq.heappush(self.waiting, samples[0])
        return tuple(samples)

    def cancel(
        self, request: int, *, sample: int | None = None, finish: Finish = Finish.CANCELLED
    ) -> None:
        """End a request, or one of its samples; one that has ended already is left as it is."""
        for sequence in list(self._requests.get(request, ())):
            if sequence.finish is not None or sample not in (None, sequence.sample):
                continue
            sequence.finish = finish
            slot = self._slot_of(sequence)
            if slot is not None:
                self.slots.leaving[slot] = ENDED
                self._free_leaving()
                continue
            self._end(sequence)  # who comes upon it in line, or as a sibling, sees its finish
            self._release_siblings(sequence)

    def guess(self, guesses: Mapping[int, tuple[int, ...]]) -> None:
        """Let the next step try tokens of sequences, by their ids."""
        self._guesses = dict(guesses)

    def receive(self, event: Tokens) -> Received:
        """Take the tokens of the oldest step under way."""
        flight = self._flights.popleft()
        if event.step != flight.number or len(event.tokens) != len(flight.sample_slots):
            raise ValueError(f"tokens of step {event.step}; step {flight.number} is due")
        slots = self.slots
        flown = slots.span(flight.slots)
        slots.in_flight[flown] -= 1
        slots.stored[flown] = np.maximum(slots.stored[flown], flight.ends)
        counts = slots.leaving[flight.sample_slots] != ENDED
        if flight.guesses:
            self._foreseen(flight, event, counts)
        kept = counts.nonzero()[0]
        own, tokens = flight.sample_slots[kept], event.tokens[kept]
        if flight.guesses:
            for slot, token in zip(own.tolist(), tokens.tolist(), strict=True):
                slots.history[slot, slots.known[slot]] = token
                slots.known[slot] += 1
            self._settle(flight)
        else:
            slots.history[own, slots.known[own]] = tokens
            slots.known[own] += 1
        names = slots.sequence[own]
        self._note_ends(own, event.ends[kept], flight.slots)
        self._computed_pages.file(flight.slots)
        self._free_leaving()
        finished, self._finished = tuple(self._finished), []
        return Received(names, tokens, kept, finished)

    def _foreseen(self, flight: StepInFlight, event: Tokens, counts: np.ndarray) -> None:
        """Mark the samples that count: up to the first that no guess foresaw, or that ends it."""
        for slot, guesses in flight.guesses.items():
            first = int(np.flatnonzero(flight.sample_slots == slot)[0])
            for place, guess in enumerate(guesses, first):
                if event.tokens[place] != guess or event.ends[place]:
                    counts[place + 1 : first + len(guesses) + 1] = False
                    break

    def _settle(self, flight: StepInFlight) -> None:
        """Take back what was computed of guesses that were wrong."""
        columns = self.slots
        own = np.array(list(flight.guesses), np.int32)
        columns.length[own] = columns.known[own]
        columns.computed[own] = columns.stored[own] = columns.known[own] - 1

    def next_step(self) -> Step | None:
        """Return the next step; None if nothing can be computed now."""
        guesses, self._guesses = self._guesses, {}
        while True:
            draft = self._filling.draft(self.waiting, guesses)
            if draft.tokens:
                break
            # nobody got a page and nothing comes back: those that go last make room for the first
            if self._flights or not self._filling.make_way():
                return None
        slots, queries = draft.rows()
        columns = self.slots
        own = columns.span(slots)
        starts = columns.computed[own].copy()
        tokens = self._tokens(slots, queries, starts, draft.guesses)
        tables = columns.table[own, : int(columns.num_pages[own].max())].copy()
        sequences, bases = columns.sequence[own].copy(), columns.base[own].copy()
        columns.computed[own] += queries
        columns.in_flight[own] += 1
        length = columns.length[own]
        rows = ((columns.computed[own] == length) & (length < columns.limit[own])).nonzero()[0]
        columns.length[slots[rows]] += 1
        sample_rows, sample_slots = self._forked(rows.astype(np.int32), slots, draft.begins)
        forks = sample_slots[len(rows) :]  # they come last
        touched = np.concatenate((slots, forks)) if len(forks) else slots
        sample_rows, sample_slots, offsets = with_guesses(
            sample_rows, sample_slots, slots, draft.guesses
        )
        self._flights.append(
            StepInFlight(
                self._steps, touched, columns.computed[touched], sample_slots, draft.guesses
            )
        )
        self._steps += 1
        stows, fetches = self.on_host.take()
        return Step(
            number=self._steps - 1,
            slots=slots,
            queries=queries,
            starts=starts,
            sample_rows=sample_rows,
            sample_offsets=offsets,
            sample_slots=sample_slots,
            stows=stows,
            copies=np.array(draft.copies, np.int32).reshape(-1, 2),
            fetches=fetches,
            begins=tuple(draft.begins),
            tokens=tokens,
            tables=tables,
            sequences=sequences,
            bases=bases,
        )

    # --- what is there ---------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Steps whose tokens have not come."""
        return len(self._flights)

    @property
    def num_running(self) -> int:
        """Sequences that have a slot."""
        return int((self.slots.sequence >= 0).sum())

    def decoding(self) -> list[tuple[int, Sequence, I32]]:
        """Return who is about to get one token: slot, sequence, and all tokens, which are known."""
        columns = self.slots
        ready = (
            (columns.sequence >= 0)
            & (columns.leaving == STAYS)
            & (columns.in_flight == 0)
            & (columns.known == columns.length)
            & (np.minimum(columns.length, columns.goal) - columns.computed == 1)
        )
        ready_slots = []
        for slot in np.flatnonzero(ready).tolist():
            sequence = columns.held[slot]
            assert sequence is not None
            ready_slots.append((slot, sequence, columns.history[slot, : columns.known[slot]]))
        return ready_slots

    def admits_next(self) -> bool:
        """Tell whether the next in line may get a slot, where there are no prefixes or windows.

        Pages that are free, less those that are promised, become no more while others decode.
        """
        if not self.waiting or not self.slots.num_free:
            return False
        sequence = self.waiting[0]
        need = self.settings.most_pages(len(sequence.tokens))
        return sequence.finish is not None or self._filling.has_room(need)

    def skip(self, steps: int) -> None:
        """Count steps that were not made one by one (see `leap`)."""
        self._steps += steps

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits and nobody has a slot."""
        return not self._requests

    def take_finished(self) -> tuple[Sequence, ...]:
        """Return sequences that ended outside of a step (cancelled ones)."""
        finished, self._finished = tuple(self._finished), []
        return finished

    # --- arrivals and ends -----------------------------------------------------------------

    def _check(self, request: Request) -> None:
        if request.id in self._requests:
            raise InputError(f"request {request.id} is here already")
        check_request(request, self.settings)

    def _slot_of(self, sequence: Sequence) -> int | None:
        slots = np.flatnonzero(self.slots.sequence == sequence.id)
        return int(slots[0]) if len(slots) else None

    def _note_ends(self, slots: I32, ends: np.ndarray, flown: I32) -> None:
        """Let those leave whose last token came."""
        columns = self.slots
        over = (ends != 0) | (columns.known[slots] >= columns.limit[slots])
        for row in over.nonzero()[0].tolist():
            slot, end = int(slots[row]), int(ends[row])
            sequence = columns.held[slot]
            assert sequence is not None
            sequence.finish = {STOPS: Finish.STOP, FAILS: Finish.FAILED}.get(end, Finish.LENGTH)
            columns.leaving[slot] = ENDED
        # prompts alone: nothing is sampled
        bare = flown[columns.limit[flown] == columns.prompt[flown]]
        if not len(bare):
            return
        done = (columns.stored[bare] >= columns.goal[bare]) & (columns.leaving[bare] == STAYS)
        for slot in bare[done].tolist():
            sequence = columns.held[slot]
            assert sequence is not None
            sequence.finish = Finish.LENGTH
            columns.leaving[slot] = ENDED

    def _free_leaving(self) -> None:
        """Free the slots that are left and that no step has."""
        columns = self.slots
        if not columns.leaving.any():
            return
        for slot in np.flatnonzero((columns.leaving != STAYS) & (columns.in_flight == 0)).tolist():
            self.on_host.stow(slot)
            self.pool.release(columns.pages(slot))
            sequence = columns.clear(slot)
            if sequence.finish is None:
                sequence.preemptions += 1
                heapq.heappush(self.waiting, sequence)
            else:
                self._end(sequence)
                self._release_siblings(sequence)

    def _end(self, sequence: Sequence) -> None:
        self._finished.append(sequence)
        self.on_host.drop(sequence)
        own = self._requests[sequence.request.id]
        own.remove(sequence)
        if not own:
            del self._requests[sequence.request.id]

    def _release_siblings(self, sequence: Sequence) -> None:
        """Let samples that were to fork off a sequence go their own way."""
        for sibling in sequence.siblings:
            if sibling.finish is None:
                heapq.heappush(self.waiting, sibling)
        sequence.siblings = []

    # --- rows ------------------------------------------------------------------------------

    def _tokens(
        self, slots: I32, queries: I32, starts: I32, guesses: Mapping[int, tuple[int, ...]]
    ) -> I32:
        columns = self.slots
        for slot, tokens in guesses.items():
            known = int(columns.known[slot])
            columns.history[slot, known : known + len(tokens)] = tokens
        ones = int(np.count_nonzero(queries == 1))
        own, at = slots[:ones], starts[:ones]
        first = np.where(columns.known[own] > at, columns.history[own, at], LAST)
        rest = [
            columns.history[slot, start : start + count]
            for slot, start, count in zip(
                slots[ones:].tolist(), starts[ones:].tolist(), queries[ones:].tolist(), strict=True
            )
        ]
        return np.concatenate((first.astype(np.int32), *rest))

    def _forked(self, rows: I32, slots: I32, begins: list[Beginning]) -> tuple[I32, I32]:
        """Return rows to sample from and the slots that get the tokens; samples fork here."""
        columns = self.slots
        more_rows, more_slots = [], []
        for row in rows[columns.forks[slots[rows]]].tolist():
            slot = int(slots[row])
            sequence = columns.held[slot]
            assert sequence is not None
            while sequence.siblings and columns.num_free:
                sibling = sequence.siblings.pop(0)
                if sibling.finish is not None:
                    continue
                own = columns.fork(slot, sibling)
                self.pool.share(columns.pages(own))
                begins.append(Beginning(own, sibling, slot))
                more_rows.append(row)
                more_slots.append(own)
            columns.forks[slot] = False
            self._release_siblings(sequence)
        if not more_rows:
            return rows, slots[rows]
        return (
            np.concatenate((rows, np.array(more_rows, np.int32))),
            np.concatenate((slots[rows], np.array(more_slots, np.int32))),
        )
