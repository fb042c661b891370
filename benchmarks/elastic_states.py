"""Every reachable state of a small elastic job, visited by many processes at once.

    python -m benchmarks.elastic_states 3 2 1 --workers 16 --minutes 10

Hosts, faults and newcomers as in `tests/unit/elastic/test_membership_states.py`, whose exploration
this is: the same moves, invariants and classes of states (hosts without names). A state belongs to
the worker that its digest names; that worker alone says whether it is new. Prints a JSON line every
few seconds (states visited, states known, a second) and ends when no state is left, with `whole`
true, or when the time is up. Needs the repository and msgspec.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import sys
import time
import traceback
from collections.abc import Iterable
from typing import Any

from tests.support import elastic_world as world
from tests.support.elastic_exploration import Fresh, digest_of_alike
from tests.support.elastic_invariants import check, require_progress
from tests.support.elastic_moves import moves

_LIVENESS_EVERY = 200
_BATCH = 128  # states that are sent together
_TURN = 32  # states that are visited before the mail is read
_MOST_SENT = 1 << 20  # digests of others' states that a worker remembers, not to send them again
_SAY_EVERY_S = 5.0
_VISITED, _KNOWN, _SENT, _TAKEN, _IDLE = range(5)  # what a worker counts
_COUNTS = 5

Found = tuple[bytes, world.World]


class _Worker:
    """One process: the states that are its own."""

    def __init__(self, own: int, mail: list[Any], counts: Any, stop: Any) -> None:
        self.own, self.mail, self.stop = own, mail, stop
        self.counts, self.at = counts, own * _COUNTS
        self.fresh = Fresh()
        self.seen: set[bytes] = set()
        self.sent: set[bytes] = set()
        self.todo: list[world.World] = []
        self.out: list[list[Found]] = [[] for _ in mail]

    def run(self) -> None:
        """Visit until told to stop."""
        while not self.stop.value:
            self._take(wait=not self.todo)
            for _ in range(min(_TURN, len(self.todo))):
                self._visit(self.todo.pop())
            if not self.todo:
                for other in range(len(self.mail)):
                    self._send(other)

    def _count(self, what: int, number: int) -> None:
        self.counts[self.at + what] += number

    def _take(self, *, wait: bool) -> None:
        while True:
            try:
                if wait:
                    self.counts[self.at + _IDLE] = 1
                batch = self.mail[self.own].get(timeout=0.05) if wait else (
                    self.mail[self.own].get_nowait()
                )  # fmt: skip
            except queue.Empty:
                return
            self.counts[self.at + _IDLE] = 0
            self._own(batch)
            self._count(_TAKEN, 1)
            wait = False

    def _own(self, found: Iterable[Found]) -> None:
        for digest, state in found:
            if digest not in self.seen:
                self.seen.add(digest)
                self.todo.append(state)
                self._count(_KNOWN, 1)

    def _visit(self, state: world.World) -> None:
        check(state)
        if self.counts[self.at + _VISITED] % _LIVENESS_EVERY == 0:
            require_progress(state)
        self._count(_VISITED, 1)
        for _, following in moves(state):
            after = self.fresh(following)
            if after is None:
                continue
            digest = digest_of_alike(after)
            owner = digest[0] % len(self.mail)
            if owner == self.own:
                self._own([(digest, after)])
            elif digest not in self.sent:
                if len(self.sent) < _MOST_SENT:
                    self.sent.add(digest)
                self.out[owner].append((digest, after))
                if len(self.out[owner]) >= _BATCH:
                    self._send(owner)

    def _send(self, owner: int) -> None:
        if self.out[owner]:
            self._count(_SENT, 1)  # before it is on its way: else all may seem idle
            self.mail[owner].put(self.out[owner])
            self.out[owner] = []


def _work(own: int, mail: list[Any], counts: Any, stop: Any, broken: Any) -> None:
    try:
        _Worker(own, mail, counts, stop).run()
    except BaseException:
        broken.put(traceback.format_exc())
        stop.value = 1
        raise
    finally:
        for one in mail:
            one.cancel_join_thread()  # what is still on its way is wanted by nobody


def explore_by_many(
    start: world.World, *, workers: int, minutes: float, say: Any = lambda _line: None
) -> dict[str, Any]:
    """Visit the states that can be reached; return how many, and whether they are all."""
    context = multiprocessing.get_context("fork")
    counts = context.Array("q", _COUNTS * workers, lock=False)  # each worker writes its own
    stop = context.Value("b", 0, lock=False)
    mail, broken = [context.Queue() for _ in range(workers)], context.Queue()
    first = Fresh().settled(start)
    digest = digest_of_alike(first)
    counts[(digest[0] % workers) * _COUNTS + _TAKEN] = -1  # sent by nobody
    mail[digest[0] % workers].put([(digest, first)])
    processes = [
        context.Process(target=_work, args=(own, mail, counts, stop, broken))
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
    args = parser.parse_args()
    named = {"hosts": args.hosts, "faults": args.faults, "newcomers": args.newcomers,
             "late": args.late}  # fmt: skip
    start = world.begin(args.hosts, args.faults, args.newcomers, late=args.late)

    def say(row: dict[str, Any]) -> None:
        print(json.dumps(named | row), flush=True)

    row = explore_by_many(start, workers=args.workers, minutes=args.minutes, say=say)
    say(row)
    sys.exit(0 if row["whole"] else 2)


if __name__ == "__main__":
    main()
