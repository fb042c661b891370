"""Ranks as threads of one process: the engine's links without a network.

Collectives add up in the order of ranks, so that results are the same each time. A rank that fails
sets the others free with an error. What is under way is nobody's memory.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

TIMEOUT_S = 60.0


class World:
    """What the threads share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Condition()
        self.mail: dict[tuple[int, int, str], deque[Tensor]] = defaultdict(deque)
        # what each left, and who has read it all
        self.meetings: dict[Any, tuple[dict[int, Any], set[int]]] = defaultdict(lambda: ({}, set()))
        self.failed: BaseException | None = None

    def until(self, ready: Callable[[], bool], what: str) -> None:
        if not self.lock.wait_for(lambda: ready() or self.failed is not None, TIMEOUT_S):
            raise TimeoutError(f"nobody came: {what}")
        if self.failed is not None and not ready():
            raise RuntimeError(f"another rank failed: {self.failed}")

    def run(self, work: Callable[[ThreadLinks], Any]) -> list[Any]:
        """Run every rank in a thread of its own; return their results."""
        results: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            try:
                results[rank] = work(ThreadLinks(self, rank))
            except BaseException as error:
                with self.lock:
                    self.failed = self.failed or error
                    self.lock.notify_all()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failed is not None:
            raise self.failed
        return results


class _Waiting:
    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class ThreadLinks:
    """One rank's links."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self._counts: dict[tuple[int, ...], int] = defaultdict(int)

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        channel: str,
    ) -> _Waiting:
        with self.world.lock:
            for peer, tensor in sends:
                self.world.mail[self.rank, peer, channel].append(_posted(tensor))
            self.world.lock.notify_all()

        def finish() -> None:
            for peer, buffer in receives:
                with self.world.lock:
                    box = self.world.mail[peer, self.rank, channel]
                    self.world.until(lambda box=box: bool(box), f"{peer}→{self.rank} {channel}")
                    found = box.popleft()
                assert found.shape == buffer.shape, (channel, found.shape, buffer.shape)
                assert found.dtype == buffer.dtype, channel
                buffer.copy_(found)

        return _Waiting(finish)

    def _meet(self, ranks: Sequence[int], own: Any) -> Callable[[], list[Any]]:
        """Leave something for the others now; return how to get what all left."""
        members = tuple(ranks)
        assert self.rank in members
        number = self._counts[members]
        self._counts[members] += 1
        with self.world.lock:  # also while a new meeting is made: two threads may be the first
            place, readers = self.world.meetings[members, number]
            place[self.rank] = own
            self.world.lock.notify_all()

        def everything() -> list[Any]:
            with self.world.lock:
                self.world.until(lambda: len(place) == len(members), f"{members} number {number}")
                readers.add(self.rank)
                if len(readers) == len(members):
                    del self.world.meetings[members, number]
                return [place[rank] for rank in members]

        return everything

    def all_reduce(self, ranks: Sequence[int], x: Tensor, *, use: str = "gradients") -> _Waiting:
        everything = self._meet(ranks, _posted(x))
        return _Waiting(lambda: _put(x, lambda: _sum(everything())))

    def reduce_scatter(
        self, ranks: Sequence[int], x: Tensor, counts: Sequence[int], out: Tensor
    ) -> _Waiting:
        everything = self._meet(ranks, _posted(x))
        index = list(ranks).index(self.rank)
        first = sum(counts[:index])
        last = first + counts[index]
        return _Waiting(lambda: _put(out, lambda: _sum(everything())[first:last]))

    def all_gather(
        self, ranks: Sequence[int], x: Tensor, counts: Sequence[int], out: Tensor
    ) -> _Waiting:
        assert len(x) == counts[list(ranks).index(self.rank)]
        everything = self._meet(ranks, _posted(x))
        return _Waiting(lambda: _put(out, lambda: torch.cat(everything())))

    def group(self, ranks: Sequence[int], *, use: str = "block") -> ThreadGroup:
        return ThreadGroup(self, tuple(ranks))


class _Result:
    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish = finish

    def wait(self) -> Tensor:
        return self._finish()


class ThreadGroup:
    """The collectives of some ranks; what is started is not done before it is waited for."""

    def __init__(self, links: ThreadLinks, ranks: tuple[int, ...]) -> None:
        self._links, self._ranks = links, ranks
        self.size, self.rank = len(ranks), ranks.index(links.rank)

    def _meet(self, own: Any) -> Callable[[], list[Any]]:
        return self._links._meet(self._ranks, own)

    def all_reduce(self, x: Tensor, *, maximum: bool = False) -> Tensor:
        if maximum:
            everything = self._meet(_posted(x))
            _put(x, lambda: torch.stack(everything()).amax(0))
            return x
        return self.start_all_reduce(x).wait()

    def all_gather(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        return self.start_all_gather(x, rows).wait()

    def reduce_scatter(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        return self.start_reduce_scatter(x, rows).wait()

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        return self.start_all_to_all(x, send, receive).wait()

    def start_all_reduce(self, x: Tensor) -> _Result:
        everything = self._meet(_posted(x))

        def finish() -> Tensor:
            _put(x, lambda: _sum(everything()))
            return x

        return _Result(finish)

    def start_all_gather(self, x: Tensor, rows: Sequence[int]) -> _Result:
        assert x.shape[0] == rows[self.rank]
        everything = self._meet(_posted(x))
        return _filling(x, sum(rows), lambda: torch.cat(everything()))

    def start_reduce_scatter(self, x: Tensor, rows: Sequence[int]) -> _Result:
        assert x.shape[0] == sum(rows)
        everything = self._meet(_posted(x))
        own = rows[self.rank]
        return _filling(x, own, lambda: _sum(everything()).split(list(rows))[self.rank])

    def start_all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> _Result:
        everything = self._meet(_posted(x).split(list(send)))

        def finish() -> Tensor:
            found = [part[self.rank] for part in everything()]
            assert [len(part) for part in found] == list(receive)
            return torch.cat(found)

        return _filling(x, sum(receive), finish)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _posted(x: Tensor) -> Tensor:
    """A copy that is on its way."""
    with _disable_current_modes():
        return x.clone()


def _filling(x: Tensor, rows: int, value: Callable[[], Tensor]) -> _Result:
    """A result in memory of the rank that gets it, which has it from the start."""
    out = x.new_empty((rows, *x.shape[1:]))

    def finish() -> Tensor:
        _put(out, value)
        return out

    return _Result(finish)


def _put(target: Tensor, value: Callable[[], Tensor]) -> None:
    with _disable_current_modes():
        arrived = value()
    target.copy_(arrived)
