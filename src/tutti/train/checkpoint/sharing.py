"""Chunks of a checkpoint for all ranks that want them: each is read once and handed on.

Replicas want the same bytes. When every rank reads for itself, the storage sends them as often as
there are replicas; here one of those who want a chunk reads it and broadcasts it to the others
through `comm`. Who reads what follows from what everybody wants, so that all ranks know it without
being told. A rank that cannot read says so in its turn: nobody waits for it in vain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tutti.comm import Communicator
from tutti.errors import DamagedError, TuttiError
from tutti.train.checkpoint.places import CheckpointFiles

_AHEAD_BYTES = 192 << 20  # that a rank has read, or is reading, before their turn
_READS_AT_ONCE = 3


class ChunkRead(NamedTuple):
    """A range of a file."""

    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Handed:
    """Who reads a chunk, and who gets it."""

    read: ChunkRead
    root: int
    ranks: tuple[int, ...]


def hand_out(wanted: Mapping[int, Sequence[ChunkRead]]) -> list[Handed]:
    """Return who reads which chunk, by what every rank wants; in one order for all. Pure.

    Of those who want a chunk the one reads it that has had the least to read so far.
    """
    by_read: dict[ChunkRead, list[int]] = {}
    for rank in sorted(wanted):
        for read in wanted[rank]:
            by_read.setdefault(read, []).append(rank)
    load = dict.fromkeys(wanted, 0)
    handed = []
    for read in sorted(by_read):
        ranks = tuple(by_read[read])
        root = min(ranks, key=lambda rank: (load[rank], rank))
        load[root] += read.length
        handed.append(Handed(read, root, ranks))
    return handed


class SharedReads:
    """Reads for all ranks of a communicator; without one, for this process alone."""

    def __init__(self, comm: Communicator | None) -> None:
        self._comm = comm
        self._groups: dict[tuple[int, ...], Communicator] = {}
        self.read_bytes = 0  # by this rank, from the storage

    def chunks(
        self, files: CheckpointFiles, reads: Sequence[ChunkRead]
    ) -> Iterator[tuple[ChunkRead, memoryview]]:
        """Yield the bytes of every chunk that this rank wants; all ranks call this together."""
        rank = 0 if self._comm is None else self._comm.rank
        turns = [turn for turn in hand_out(self._everybody(reads)) if rank in turn.ranks]
        mine = [turn.read for turn in turns if turn.root == rank]
        self.read_bytes += sum(read.length for read in mine)
        problem: TuttiError | None = None
        with ThreadPoolExecutor(_READS_AT_ONCE, thread_name_prefix="restore") as pool:
            ahead = _ReadAhead(files, mine, pool)
            for turn in turns:
                if turn.root == rank:
                    memory, failed = ahead.next()
                    problem = problem or failed
                else:
                    memory = torch.empty(turn.read.length + 1, dtype=torch.uint8)
                if len(turn.ranks) > 1:
                    self._group(turn.ranks).broadcast(memory, turn.root).wait()
                if memory[-1] == 0:
                    yield turn.read, memory[:-1].numpy().data
                elif problem is None:
                    problem = DamagedError(
                        f"{files.place}/{turn.read.file}: rank {turn.root} could not read it"
                    )
        if problem is not None:
            raise problem

    def _everybody(self, reads: Sequence[ChunkRead]) -> dict[int, list[ChunkRead]]:
        if self._comm is None or self._comm.size == 1:
            return {0 if self._comm is None else self._comm.rank: list(reads)}
        told: dict[str, list[list[int]]] = {}
        for read in reads:
            told.setdefault(read.file, []).append([read.start, read.length])
        everything = self._comm.gather_values(told)
        assert everything is not None
        return {
            rank: [ChunkRead(file, *place) for file in wanted for place in wanted[file]]
            for rank, wanted in zip(self._comm.ranks, everything, strict=True)
        }

    def _group(self, ranks: tuple[int, ...]) -> Communicator:
        assert self._comm is not None
        if ranks == self._comm.ranks:
            return self._comm
        if ranks not in self._groups:
            name = "restore"
            made = self._comm.subgroup(ranks, name)
            assert made is not None
            self._groups[ranks] = made.control(name)
        return self._groups[ranks]


class _ReadAhead:
    """Reads a rank's chunks in their order, some of them before their turn."""

    def __init__(
        self, files: CheckpointFiles, reads: Sequence[ChunkRead], pool: ThreadPoolExecutor
    ) -> None:
        self._files, self._left, self._pool = files, deque(reads), pool
        self._under_way: deque[tuple[int, Future[tuple[Tensor, TuttiError | None]]]] = deque()
        self._bytes = 0

    def next(self) -> tuple[Tensor, TuttiError | None]:
        """Return the next chunk with a byte behind it, which is 0 if it could be read."""
        self._start()
        length, reading = self._under_way.popleft()
        chunk = reading.result()
        self._bytes -= length
        self._start()
        return chunk

    def _start(self) -> None:
        while self._left and (not self._under_way or self._bytes < _AHEAD_BYTES):
            read = self._left.popleft()
            self._bytes += read.length
            self._under_way.append((read.length, self._pool.submit(self._one, read)))

    def _one(self, read: ChunkRead) -> tuple[Tensor, TuttiError | None]:
        memory = torch.empty(read.length + 1, dtype=torch.uint8)
        try:
            self._files.fill(read.file, read.start, memory[:-1].numpy().data)
            memory[-1] = 0
        except TuttiError as error:
            memory[-1] = 1
            return memory, error
        except Exception as error:  # others wait for this chunk
            memory[-1] = 1
            return memory, TuttiError(f"{self._files.place}/{read.file}: {error}")
        return memory, None
