"""Every reachable state of a small elastic job, visited by many processes at once.

    python -m benchmarks.elastic_states 3 2 1 --workers 16 --minutes 10

Hosts, faults and newcomers as in `tests/unit/elastic/test_membership_states.py`, whose exploration
this is: the same moves, invariants and classes of states (hosts without names), gone through part
by part (`tests/support/elastic_packed.py`). Which states are known is in memory that all workers
share; each goes on from what it finds, and gives half of what it has left to one that has nothing.
Prints a JSON line every few seconds (states visited, states known, a second) and ends when no state
is left, with `whole` true, or when the time is up. Needs the repository and msgspec.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import multiprocessing
import os
import queue
import sys
import time
import traceback
from typing import Any

from tests.support import elastic_world as world
from tests.support.elastic_fingerprints import Fingerprints
from tests.support.elastic_invariants import require_progress
from tests.support.elastic_packed import Packed
from tests.support.elastic_parts import State

LIVENESS_EVERY = 200  # states, of which one is looked at as to whether it comes to an end
_TURN = 64  # states that are visited before a worker looks whether others have nothing to do
_LEAST_SHARED = 16  # states to go on from
_MOST_SHARED = 256
_MOST_MET = 1 << 20  # states that a worker knows in the very form in which it met them
_MOST_VALUES = 500_000  # of parts of states, that a worker remembers
_SAY_EVERY_S = 5.0
_VISITED, _KNOWN, _SENT, _TAKEN, _IDLE = range(5)  # what a worker counts
_COUNTS = 5
_REGIONS, _LOCKS = 256, 256


class KnownStates:
    """Fingerprints of states, in memory that processes which are forked share."""

    def __init__(self, context: Any, bits: int) -> None:
        self._each = (1 << bits) // _REGIONS
        self._table = memoryview(mmap.mmap(-1, 8 << bits)).cast("Q")
        self._locks = [context.Lock() for _ in range(_LOCKS)]

    def add(self, fingerprint: int) -> bool:
        """Add one that is not 0; return whether it was new."""
        table, region = self._table, fingerprint % _REGIONS
        first, at = region * self._each, (fingerprint >> 20) % self._each
        with self._locks[region % _LOCKS]:
            for _ in range(self._each):
                known = table[first + at]
                if known == fingerprint:
                    return False
                if not known:
                    table[first + at] = fingerprint
                    return True
                at = (at + 1) % self._each
        raise MemoryError("there is no room for more states; give more --bits")


class _Worker:
    """One process: it goes on from states that it finds, or is given."""

    def __init__(
        self, own: int, start: world.World, known: KnownStates, shared: Any, counts: Any,
        every: int, stop: Any,
    ) -> None:  # fmt: skip
        hosts = self.hosts = len(start.agents)
        self.known, self.shared, self.every, self.stop = known, shared, every, stop
        self.counts, self.at = counts, own * _COUNTS
        self.packed = Packed(hosts)
        self.fingerprints = Fingerprints(self.packed)
        self.met: set[State] = set()
        self.todo: list[State] = []

    def run(self) -> None:
        """Visit until told to stop."""
        gc.disable()  # nothing here is in circles
        while not self.stop.value:
            if not self.todo:
                self._take()
            for _ in range(min(_TURN, len(self.todo))):
                self._visit(self.todo.pop())
            self._share()
            self._forget()

    def _count(self, what: int, number: int) -> None:
        self.counts[self.at + what] += number

    def _take(self) -> None:
        self.counts[self.at + _IDLE] = 1
        try:
            batch = self.shared.get(timeout=0.05)
        except queue.Empty:
            return
        self.counts[self.at + _IDLE] = 0
        for found in batch:
            self.todo.append(self.packed.of(found))
        self._count(_TAKEN, 1)

    def _visit(self, state: State) -> None:
        packed, met, fingerprint = self.packed, self.met, self.fingerprints.of
        packed.check(state)
        if self.counts[self.at + _VISITED] % self.every == 0:
            require_progress(packed.world(state))
        self._count(_VISITED, 1)
        for after in packed.following(state):
            if after in met:
                continue
            met.add(after)
            if self.known.add(fingerprint(after)):
                self._count(_KNOWN, 1)
                self.todo.append(after)

    def _share(self) -> None:
        """Give the oldest of what is left to somebody who has nothing: most follows from them."""
        number = min(len(self.todo) // 2, _MOST_SHARED)
        counts = self.counts[:]
        waiting = sum(counts[_SENT::_COUNTS]) - sum(counts[_TAKEN::_COUNTS])
        if number < _LEAST_SHARED // 2 or sum(counts[_IDLE::_COUNTS]) <= waiting:
            return
        given, self.todo = self.todo[:number], self.todo[number:]
        self._count(_SENT, 1)  # before it is on its way: else all may seem idle
        self.shared.put([self.packed.world(state) for state in given])

    def _forget(self) -> None:
        """Begin anew with what is remembered, when it takes too much memory."""
        if len(self.met) > _MOST_MET:
            self.met.clear()
        if self.packed.size > _MOST_VALUES:
            fresh = Packed(self.hosts)
            self.todo = [fresh.of(self.packed.world(state)) for state in self.todo]
            self.packed, self.fingerprints = fresh, Fingerprints(fresh)
            self.met.clear()


def _work(own: int, broken: Any, stop: Any, *given: Any) -> None:
    try:
        _Worker(own, *given, stop).run()
    except BaseException:
        broken.put(traceback.format_exc())
        broken.close()
        broken.join_thread()
        stop.value = 1
    os._exit(0)  # letting go of gigabytes of small things takes long, and nobody waits for them


def explore_by_many(
    start: world.World, *, workers: int, minutes: float, say: Any = lambda _line: None,
    bits: int = 20,
    liveness_every: int = LIVENESS_EVERY,
) -> dict[str, Any]:  # fmt: skip
    """Visit the states that can be reached; return how many, and whether they are all.

    There is room for two to the power of `bits` states.
    """
    context = multiprocessing.get_context("fork")
    counts = context.Array("q", _COUNTS * workers, lock=False)  # each worker writes its own
    stop = context.Value("b", 0, lock=False)
    shared, broken = context.Queue(), context.Queue()
    packed, known = Packed(len(start.agents)), KnownStates(context, bits)
    first = packed.visited(packed.of(start))
    known.add(Fingerprints(packed).of(first))
    counts[_KNOWN], counts[_SENT] = 1, 1
    shared.put([packed.world(first)])
    processes = [
        context.Process(
            target=_work, args=(own, broken, stop, start, known, shared, counts, liveness_every)
        )
        for own in range(workers)
    ]
    for process in processes:
        process.start()
    began = told = time.monotonic()
    before, whole = None, False
    while not stop.value and time.monotonic() < began + 60 * minutes:
        time.sleep(0.2)
        now = [sum(counts[what::_COUNTS]) for what in range(_COUNTS)]
        # twice the same, all idle, everything that was sent taken: nothing can come any more
        if now[_IDLE] == workers and now[_SENT] == now[_TAKEN] and now[_VISITED] == now[_KNOWN]:
            whole = now == before
            if whole:
                break
        before = now
        if time.monotonic() > told + _SAY_EVERY_S:
            told = time.monotonic()
            say(_row(now, told - began, workers, whole=False))
    stop.value = 1
    for process in processes:
        process.join(10)
        if process.is_alive():
            process.kill()
    if not broken.empty():
        raise AssertionError(broken.get())
    now = [sum(counts[what::_COUNTS]) for what in range(_COUNTS)]
    return _row(now, time.monotonic() - began, workers, whole=whole)


def _row(now: list[int], seconds: float, workers: int, *, whole: bool) -> dict[str, Any]:
    return {
        "visited": now[_VISITED], "known": now[_KNOWN], "seconds": round(seconds, 1),
        "states_per_s": round(now[_VISITED] / seconds), "workers": workers, "whole": whole,
    }  # fmt: skip


def main() -> None:
    """Explore, and print rows as it goes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("hosts", type=int)
    parser.add_argument("faults", type=int)
    parser.add_argument("newcomers", type=int)
    parser.add_argument("--late", type=int, default=0, help="messages after newer ones; -1: any")
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--bits", type=int, default=28, help="room for 2 ** BITS states, 8 bytes each"
    )
    args = parser.parse_args()
    named = {"hosts": args.hosts, "faults": args.faults, "newcomers": args.newcomers,
             "late": args.late}  # fmt: skip
    start = world.begin(args.hosts, args.faults, args.newcomers, late=args.late)

    def say(row: dict[str, Any]) -> None:
        print(json.dumps(named | row), flush=True)

    row = explore_by_many(start, workers=args.workers, minutes=args.minutes, say=say,
                          bits=args.bits)  # fmt: skip
    say(row)
    sys.exit(0 if row["whole"] else 2)


if __name__ == "__main__":
    main()
