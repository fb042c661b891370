"""The loops of a planned engine's ranks: the first one talks to clients, the others follow it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq

from tutti.errors import TuttiError
from tutti.server.engine_process import (
    IDLE_MS,
    LOAD_S,
    Asker,
    EngineLoop,
    load_of_lanes,
    parameters_of,
    refusal,
)
from tutti.server.grammar import Grammars
from tutti.server.messages import Cancel, DropAdapter, Gone, Load, LoadAdapter, Refused, Submit
from tutti.server.rank_broadcast import Add, Forget, RankBroadcast, RankListener, Stop, Word

if TYPE_CHECKING:
    from tutti.serve import SamplingParameters
    from tutti.serve.laned_engine import LanedEngine
    from tutti.server import messages

log = logging.getLogger(__name__)
PATIENCE_S = 2.0  # for keys and values that are not here yet: then they are computed again
UNCLAIMED_S = 60.0  # that keys and values wait for their request
HELD_MS = 2


@dataclass(slots=True)
class _Held:
    """A request whose keys and values are on their way."""

    client: bytes
    submit: Submit
    until: float


class PlannedLoop(EngineLoop):
    """Feeds the first rank of an engine from a socket, and lets the others follow."""

    def __init__(
        self,
        engine: LanedEngine,
        socket: zmq.Socket[bytes],
        grammars: Grammars,
        followers: RankBroadcast,
        arrived: zmq.Socket[bytes],
        takers: frozenset[int],
        report: Callable[[], None] = lambda: None,
    ) -> None:
        """`arrived` says whose keys and values are whole on which rank; `takers` need them.

        `report` is called whenever clients are told how busy the engine is.
        """
        super().__init__(engine, socket, grammars)  # type: ignore[arg-type]
        self._laned, self._followers, self._arrived, self._takers = (
            engine,
            followers,
            arrived,
            takers,
        )
        self._report = report
        self._words: list[Word] = []
        self._held: dict[tuple[bytes, int], _Held] = {}
        self._here: dict[str, tuple[set[int], float]] = {}
        self.recomputed = 0  # prompts whose keys and values did not come

    def run(self) -> None:
        """Serve until told to stop."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._arrived, zmq.POLLIN)
        while not self.stopping:
            idle = self._laned.is_idle
            ready = dict(poller.poll((HELD_MS if self._held else IDLE_MS) if idle else 0))
            if self._socket in ready:
                self._take()
            if self._arrived in ready:
                self._note_arrivals()
            self._release()
            if self._words or not self._laned.is_idle:
                words, self._words = self._words, []
                self._followers.tell(words)
                self._step()
            if time.monotonic() - self._said > LOAD_S:
                self._forget_unclaimed()
                self._say_load()
                self._report()

    # --- clients ---------------------------------------------------------------------------

    def _handle(self, client: bytes, message: messages.ToEngine) -> None:
        match message:
            case Cancel(id=number):
                self._held.pop((client, number), None)
            case Gone(client=gone):
                self._held = {key: own for key, own in self._held.items() if key[0] != gone}
            case LoadAdapter(id=number) | DropAdapter(id=number):
                said = "engines of a plan have no adapters; serve the model without --plan"
                self._send(client, [Refused(number, said)])
                return
        super()._handle(client, message)

    def _submit(self, client: bytes, message: Submit) -> None:
        if message.imported and self._takers:
            until = time.monotonic() + PATIENCE_S
            self._held[client, message.id] = _Held(client, message, until)
            return
        self._add(client, message, "")

    def _add(self, client: bytes, message: Submit, imported: str) -> None:
        add = Add(
            message.tokens, message.wishes, message.pooling, message.handover, imported=imported
        )
        try:
            parameters = parameters_of(add.wishes, self._grammars)
        except Exception as error:  # a grammar may fail in ways of its own; nothing was begun
            self._refuse(client, message, imported, error)
            return
        try:
            number = added(self._laned, add, parameters)
        except TuttiError as error:  # any other may leave this rank ahead of its followers
            self._refuse(client, message, imported, error)
            return
        self._words.append(add)
        self._askers[number] = Asker(client, message.id, message.pooling)
        self._numbers[client, message.id] = number

    def _refuse(self, client: bytes, message: Submit, imported: str, error: Exception) -> None:
        """Answer a request that the engine does not take; followers do not hear of it."""
        if imported:
            self._forget_keys(imported)
        self._send(client, [refusal(message.id, error)])

    def _cancel(self, number: int | None) -> None:
        super()._cancel(number)
        if number is not None:
            self._words.append(Stop(number))

    def _load(self) -> Load:
        return load_of_lanes(self._laned.schedulers, self._laned.counters)

    # --- keys and values -------------------------------------------------------------------

    def _note_arrivals(self) -> None:
        while True:
            try:
                rank, key = self._arrived.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            ranks, _ = self._here.setdefault(key.decode(), (set(), time.monotonic()))
            ranks.add(int(rank))

    def _release(self) -> None:
        """Let requests go on whose keys and values are here, or do not come."""
        for name, held in list(self._held.items()):
            key = held.submit.imported
            ranks, _ = self._here.get(key, (set(), 0.0))
            whole = ranks >= self._takers
            if whole and self._laned.num_waiting:
                continue  # they wait on the host until a slot is free: pages would be taken away
            if whole or time.monotonic() > held.until:
                del self._held[name]
                self._here.pop(key, None)
                if not whole:
                    self.recomputed += 1
                    log.warning("keys and values of a prompt did not come: it is computed again")
                    self._forget_keys(key)
                self._add(held.client, held.submit, key if whole else "")

    def _forget_unclaimed(self) -> None:
        now, wanted = time.monotonic(), {held.submit.imported for held in self._held.values()}
        for key, (_, since) in list(self._here.items()):
            if now - since > UNCLAIMED_S and key not in wanted:
                del self._here[key]
                self._forget_keys(key)

    def _forget_keys(self, key: str) -> None:
        if self._laned.arrivals is not None:
            self._laned.arrivals.drop(key)
        self._words.append(Forget(key))


def added(engine: LanedEngine, add: Add, parameters: SamplingParameters) -> int:
    """Give a rank a request; return its number."""
    return engine.add(
        add.tokens,
        parameters,
        pooling=add.pooling,
        handover=add.handover,
        imported=add.imported,
    )


def follow(engine: LanedEngine, listener: RankListener, grammars: Grammars) -> None:
    """Do what the first rank does, turn by turn, until the process is ended."""
    while True:
        for word in listener.hear():
            match word:
                case Add():
                    added(engine, word, parameters_of(word.wishes, grammars))
                case Stop(number):
                    engine.cancel(number)
                    engine.take(number)
                case Forget(key) if engine.arrivals is not None:
                    engine.arrivals.drop(key)
        for piece in engine.step():
            engine.take(piece.request)
