"""Run: one operation under way, as a state machine that events push forward.

Counts tell what may begin: a step when the steps it waits for are done, a round when the last one
of its team is. Nothing here blocks; a finished message, a native call or a copy calls back, and the
run goes on. Reductions take effect in the program's order whatever order messages arrive in.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from tutti.accelerator.accelerator import Event
from tutti.comm.compression import Codec
from tutti.comm.frames import Tag
from tutti.comm.inbox import Receive
from tutti.comm.move import Buffers, Combine, Mover
from tutti.comm.script import Move, NativeCall, RoundScript, Script, StepScript, TeamScript
from tutti.comm.spans import Spans
from tutti.comm.transport.link import OutLink
from tutti.comm.work import Work


class Links(Protocol):
    """What a run needs of the executor."""

    buffers: Buffers

    def out(self, peer: int) -> OutLink:
        """Return the link to a rank."""

    def post(self, peer: int, tag: Tag, receive: Receive) -> None:
        """Ask for a message of a rank."""

    def mover(self, spans: Spans) -> Mover:
        """Return who moves bytes of these tensors."""

    def call_native(self, run: Run, call: NativeCall, done: Callable[[], None]) -> None:
        """Run a native call in its turn."""


class Run:
    """An operation of this rank."""

    def __init__(
        self,
        *,
        links: Links,
        script: Script,
        buffers: tuple[Tensor | None, ...],
        work: Work,
        group: int,
        sequence: int,
        combine: Combine,
        reduction: str = "sum",
        codec: Codec | None = None,
        connections: int = 1,
        finish: Callable[[], None] = lambda: None,
        timeout_s: float = 300.0,
        pair_sequences: dict[tuple[int, bool], list[int]] | None = None,
    ) -> None:
        self._links = links
        self.script = script
        self._buffers = buffers
        self.work = work
        self.rank = work.rank
        self.group, self.sequence = group, sequence
        self.on_host: bool | None = None  # where the tensors lie; None: as their device says
        self.begins: Event | None = None  # the point of the caller's device work to wait for
        self._combine = combine
        self.reduction = reduction
        self._codec = codec
        self._connections = connections
        self._finish = finish
        self.timeout_s = timeout_s
        self._pairs = pair_sequences
        self._waits = [len(step.after) for step in script.steps]
        self._dependents: list[list[int]] = [[] for _ in script.steps]
        for number, step in enumerate(script.steps):
            for earlier in step.after:
                self._dependents[earlier].append(number)
        self._open_teams = [len(step.teams) for step in script.steps]
        self._unfinished = len(script.steps)
        self._sending = 0
        self._chunk = 0  # of the steps begun so far
        self._starting = False
        self.outstanding: dict[tuple[int, bool, Tag], str] = {}  # (peer, receives, tag) → step
        self.progress_at = time.monotonic()
        self.over = False
        self.then: Callable[[Run], None] | None = None

    # --- steps -----------------------------------------------------------------------------

    def start(self) -> None:
        """Begin."""
        self.moved()
        if not self.script.steps:
            self._end()
        self._next_chunks()

    def _next_chunks(self) -> None:
        """Begin further chunks while nothing of the earlier ones waits to be sent.

        So the wire never idles while there is work, and yet an early chunk does not share it with
        later ones: it gets through first, and its answers overlap with what the later ones send.
        """
        if self._starting:
            return
        self._starting = True
        while not self._sending and not self.over and self._chunk <= self.script.last_chunk:
            self._chunk += 1
            for number in self.script.first_steps[self._chunk - 1]:
                self._begin(number)
        self._starting = False

    def moved(self) -> None:
        """Note progress."""
        self.progress_at = time.monotonic()

    def _begin(self, number: int) -> None:
        step = self.script.steps[number]
        if not step.teams:
            self._step_done(number)
        for team in step.teams:
            if self.over:
                return
            if team.native is not None:
                self._links.call_native(self, team.native, lambda: self._team_done(number))
            else:
                self._enter(number, step, team, 0)

    def _team_done(self, number: int) -> None:
        self._open_teams[number] -= 1
        if not self._open_teams[number]:
            self._step_done(number)

    def _step_done(self, number: int) -> None:
        self.moved()
        self._unfinished -= 1
        if self.over:
            return
        if not self._unfinished:
            self._end()
            return
        for dependent in self._dependents[number]:
            self._waits[dependent] -= 1
            if not self._waits[dependent]:
                self._begin(dependent)

    def _end(self) -> None:
        self.over = True
        self._finish()
        if self.then is not None:
            self.then(self)
        self.work.settle()

    def fail(self, error: BaseException) -> None:
        """End without a result."""
        if not self.over:
            self.over = True
            self.work.settle(error)

    # --- rounds ----------------------------------------------------------------------------

    def _enter(self, number: int, step: StepScript, team: TeamScript, at: int) -> None:
        if at == len(team.rounds):
            self._team_done(number)
            return
        _Round(self, step, team, at, lambda: self._enter(number, step, team, at + 1)).begin()

    def spans(self, move: Move) -> Spans:
        """Return the memory of a message."""
        pieces = []
        for buffer, start, stop in move.ranges:
            tensor = self._buffers[buffer]
            assert tensor is not None
            pieces.append(tensor[start:stop])
        return Spans(pieces, on_host=self.on_host)

    def tensors(self, ranges: tuple[tuple[int, int, int], ...]) -> list[Tensor]:
        """Return the pieces of a native call's part."""
        return [self._buffers[b][start:stop] for b, start, stop in ranges]  # type: ignore[index]

    def any_tensor(self) -> Tensor:
        """Return a buffer, for its dtype and device."""
        return next(tensor for tensor in self._buffers if tensor is not None)

    @property
    def is_point_to_point(self) -> bool:
        """Whether only some ranks of the group take part."""
        return self._pairs is not None

    def tag(self, step: StepScript, team: TeamScript, at: int, move: Move, receives: bool) -> Tag:
        """Return the tag of a message; point-to-point messages are numbered per pair."""
        if self._pairs is not None:
            return Tag(self.group, self._pairs[move.peer, receives][move.index])
        return Tag(self.group, self.sequence, step.chunk, step.step, team.number, at, move.index)

    def send(self, tag: Tag, move: Move, where: str, done: Callable[[], None]) -> None:
        """Send a message."""
        key = (move.peer, False, tag)
        self.outstanding[key] = where
        self._sending += 1

        def sent() -> None:
            del self.outstanding[key]
            self._sending -= 1
            self.moved()
            done()
            self._next_chunks()

        spans = self.spans(move)
        if self._codec is not None and move.crosses:
            with self._links.mover(spans).outward():
                spans = self._codec.encode(move.peer, tag, spans, keep=not move.reduce)
        connections = self._connections if move.crosses else 1
        self._links.out(move.peer).send(tag, spans, sent, connections)

    def receive(
        self, tag: Tag, move: Move, where: str, done: Callable[[], None], held: Any
    ) -> Receive:
        """Ask for a message."""
        key = (move.peer, True, tag)
        self.outstanding[key] = where

        def received() -> None:
            self.outstanding.pop(key, None)
            self.moved()
            done()

        def arrived() -> None:
            self.outstanding.pop(key, None)
            held()

        spans = self.spans(move)
        codec = self._codec if move.crosses else None
        receive = Receive(
            spans=spans,
            mover=self._links.mover(spans),
            buffers=self._links.buffers,
            done=received,
            moved=self.moved,
            combine=self._combine if move.reduce else None,
            decode=None if codec is None else codec.decoder(spans),
            num_bytes=None if codec is None else codec.encoded_bytes(spans),
            held=arrived if move.ordered else None,
        )
        self._links.post(move.peer, tag, receive)
        return receive


class _Round:
    """One round of one team: all its messages at once, then on."""

    def __init__(
        self, run: Run, step: StepScript, team: TeamScript, at: int, done: Callable[[], None]
    ) -> None:
        self._run = run
        self._step, self._team = step, team
        self._done = done
        self._script: RoundScript = team.rounds[at]
        self._at = self._script.number
        self._unsent = len(self._script.sends)
        self._open = self._unsent + len(self._script.receives)
        self._ordered: list[Receive] = []
        self._turn = 0
        self._applying = False

    def begin(self) -> None:
        """Post every receive, then every send."""
        run, script = self._run, self._script
        where = f"step {self._step.step} ({self._step.name}), round {self._at}"
        if self._step.chunk:
            where += f", chunk {self._step.chunk}"
        self._open += 1  # not over before all are posted
        for move in script.receives:
            tag = run.tag(self._step, self._team, self._at, move, True)
            receive = run.receive(tag, move, where, self._closed, self._try_apply)
            if move.ordered:
                self._ordered.append(receive)
        self._try_apply()
        for move in script.sends:
            tag = run.tag(self._step, self._team, self._at, move, False)
            run.send(tag, move, where, self._sent)
        self._closed()

    def _sent(self) -> None:
        self._unsent -= 1
        if not self._unsent:
            self._try_apply()
        self._closed()

    def _try_apply(self) -> None:
        """Let held messages take effect, in order, once nothing of the round is still read."""
        if self._unsent or self._applying:
            return
        self._applying = True
        expected = sum(1 for move in self._script.receives if move.ordered)
        while self._turn < len(self._ordered) == expected and self._ordered[self._turn].complete:
            self._turn += 1
            self._ordered[self._turn - 1].apply()
        self._applying = False

    def _closed(self) -> None:
        self._open -= 1
        if not self._open and not self._run.over:
            self._done()
