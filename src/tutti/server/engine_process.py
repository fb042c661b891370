"""One engine in a process of its own: requests in, tokens out, nothing but token ids.

    python -m tutti.server.engine_process FOLDER GENERATION

Between two steps it takes what clients have sent. A thread touches a file every second, so that a
supervisor knows a process that computes from one that is stopped.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from tutti.errors import TuttiError
from tutti.plug_ins import reason
from tutti.server import messages
from tutti.server.grammar import Grammars
from tutti.server.hooks import Hooks
from tutti.server.messages import (
    Cancel,
    Done,
    DropAdapter,
    EngineState,
    FromEngine,
    Gone,
    Likely,
    Load,
    LoadAdapter,
    Refused,
    ServerConfig,
    ServerFolder,
    Submit,
    Update,
    Wishes,
)
from tutti.server.sockets import ServerSockets, SocketName

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tutti.batching import Scheduler
    from tutti.serve import Completion, Engine, Piece, SamplingParameters, TokenLogprob
    from tutti.serve.outputs import Counters

log = logging.getLogger(__name__)
IDLE_MS = 100
LOAD_S = 0.5  # between two reports of how busy it is


@dataclass(frozen=True, slots=True)
class Asker:
    """Whose request it is, and what it is called there."""

    client: bytes
    id: int
    pooling: str | None


class EngineLoop:
    """Feeds an engine from a socket, and answers."""

    def __init__(
        self,
        engine: Engine,
        socket: zmq.Socket[bytes],
        grammars: Grammars,
        adapters: ServedAdapters | None = None,
        *,
        warms: bool = False,
    ) -> None:
        self._engine, self._socket, self._grammars = engine, socket, grammars
        self._adapters = adapters
        self._warms = warms
        self._askers: dict[int, Asker] = {}
        self._numbers: dict[tuple[bytes, int], int] = {}
        self._clients: set[bytes] = set()
        self._said = 0.0
        self.stopping = False

    def run(self) -> None:
        """Serve until told to stop."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        while not self.stopping:
            idle = self._engine.is_idle
            more = idle and self._warms and self._engine.worker.warm_steps.next()
            if poller.poll(IDLE_MS if idle and not more else 0):
                self._take()
            if not self._engine.is_idle:
                self._step()
            if time.monotonic() - self._said > LOAD_S:
                self._say_load()

    def _take(self) -> None:
        while True:
            try:
                client, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._clients.add(client)
            try:
                message = messages.for_engine(data)
            except msgspec.DecodeError as error:
                log.warning("a message that is none: %s", error)
                continue
            self._handle(client, message)

    def _handle(self, client: bytes, message: messages.ToEngine) -> None:
        match message:
            case Submit():
                self._submit(client, message)
            case Cancel(id=number):
                self._cancel(self._numbers.get((client, number)))
            case Gone(client=gone):
                for (owner, _), number in list(self._numbers.items()):
                    if owner == gone:
                        self._cancel(number)
                self._clients.discard(gone)
            case LoadAdapter(id=number, name=name, folder=folder):
                self._change(client, number, lambda own: own.add(name, folder))
            case DropAdapter(id=number, name=name):
                self._change(client, number, lambda own: own.drop(name))

    def _submit(self, client: bytes, message: Submit) -> None:
        try:
            wishes = parameters_of(message.wishes, self._grammars)
            number = self._engine.add(message.tokens, wishes, pooling=message.pooling)
        except Exception as error:
            self._send(client, [refusal(message.id, error)])
            return
        self._askers[number] = Asker(client, message.id, message.pooling)
        self._numbers[client, message.id] = number

    def _change(self, client: bytes, number: int, change: Callable[[ServedAdapters], None]) -> None:
        assert self._adapters is not None
        try:
            change(self._adapters)
        except Exception as error:
            self._send(client, [refusal(number, error)])
        else:
            self._send(client, [Done(number)])

    def _cancel(self, number: int | None) -> None:
        if number is not None:
            self._forget(number)
            self._engine.cancel(number)
            self._engine.take(number)

    def _forget(self, number: int) -> Asker | None:
        asker = self._askers.pop(number, None)
        if asker is not None:
            self._numbers.pop((asker.client, asker.id), None)
        return asker

    def _step(self) -> None:
        answers: dict[bytes, list[FromEngine]] = {}
        for piece in self._engine.step():
            asker = self._askers.get(piece.request)
            if asker is None:
                continue
            done = self._engine.take(piece.request)
            if done is not None:
                self._forget(piece.request)
            answers.setdefault(asker.client, []).append(update_of(asker.id, piece, done))
        for client, said in answers.items():
            self._send(client, said)

    def _say_load(self) -> None:
        self._said = time.monotonic()
        said = self._load()
        for client in self._clients:
            self._send(client, [said])

    def _load(self) -> Load:
        return load_of_lanes([self._engine.scheduler], self._engine.counters)

    def _send(self, client: bytes, said: list[FromEngine]) -> None:
        self._socket.send_multipart([client, messages.encode(said)])


def refusal(number: int, error: Exception) -> Refused:
    """Return what is said of a request that could not be taken: an engine does not end by it."""
    if isinstance(error, TuttiError):
        return Refused(number, str(error))
    log.error("a request could not be taken", exc_info=error)
    return Refused(number, f"the engine failed: {type(error).__name__}: {reason(error)}", True)


def load_of_lanes(lanes: Sequence[Scheduler], counters: Counters) -> Load:
    """Return how busy an engine is, all its lanes together."""
    return Load(
        running=sum(lane.slots.settled for lane in lanes),
        waiting=sum(len(lane.waiting) for lane in lanes),
        pages_used=sum(lane.pool.size - lane.pool.available for lane in lanes),
        pages=sum(lane.pool.size for lane in lanes),
        steps=counters.steps,
        computed_tokens=counters.computed_tokens,
        cached_tokens=counters.cached_tokens,
        preemptions=counters.preemptions,
        stowed_pages=counters.stowed_pages,
        fetched_pages=counters.fetched_pages,
        guessed_tokens=counters.guessed_tokens,
        foreseen_tokens=counters.foreseen_tokens,
    )


def parameters_of(wishes: Wishes, grammars: Grammars) -> SamplingParameters:
    """Return wishes as the engine takes them."""
    from tutti.serve import SamplingParameters

    given = {name: getattr(wishes, name) for name in wishes.__struct_fields__}
    grammar, named = given.pop("grammar"), given.pop("hooks")
    if grammar:
        given["masks"] = grammars.masks(grammar)
    if named:
        given["changes"] = Hooks().changes(named)
    return SamplingParameters(**given)


def update_of(number: int, piece: Piece, done: Completion | None) -> Update:
    """Return a piece as a message."""
    embedding = None
    if done is not None and done.embedding is not None:
        embedding = done.embedding.tolist()
    prompt = [] if done is None else [one for one in done.prompt_logprobs or () if one is not None]
    return Update(
        id=number,
        tokens=list(piece.tokens),
        finish=None if piece.finish is None else str(piece.finish),
        reason=piece.reason,
        logprobs=[_likely(one) for one in piece.logprobs or ()],
        prompt_logprobs=[_likely(one) for one in prompt],
        cached=0 if done is None else done.cached_tokens,
        embedding=embedding,
    )


def _likely(one: TokenLogprob) -> Likely:
    return Likely(one.token, one.logprob, list(one.top))


def beat(path: Path, parent: int) -> None:
    """Say that the process lives; end it when the supervisor is gone."""
    while os.getppid() == parent:
        path.touch()
        time.sleep(0.5)
    os._exit(1)


class ServedAdapters:
    """The adapters that requests may name: as a file, for API processes and the next engine."""

    def __init__(self, engine: Engine, folder: ServerFolder, config: ServerConfig) -> None:
        self._engine, self._folder = engine, folder
        self._named = dict(config.engine.get("adapters") or {})
        kept = folder.adapters()
        if kept is None:
            self._tell()
            return
        for name in [name for name in self._named if name not in kept]:
            self.drop(name)
        for name, path in kept.items():
            if self._named.get(name) == path:
                continue
            try:
                if name in self._named:
                    self.drop(name)
                self.add(name, path)
            except TuttiError as error:  # what was there is gone: requests that name it are told
                log.warning("adapter '%s' does not come back: %s", name, error)
        self._tell()

    def add(self, name: str, path: str) -> None:
        """Let an adapter come."""
        self._engine.add_adapter(name, path)
        self._named[name] = path
        self._tell()

    def drop(self, name: str) -> None:
        """Let an adapter go."""
        self._engine.drop_adapter(name)
        del self._named[name]
        self._tell()

    def _tell(self) -> None:
        self._folder.write("adapters.json", self._named)


def open_engine(config: ServerConfig) -> Engine:
    """Return the engine that a server is asked to have."""
    from tutti.serve import Engine

    engine = Engine.from_pretrained(config.folder, **config.engine)
    engine.tokenizer = None  # texts are the API's
    if config.warm_up:
        engine.worker.warm_steps.usual()  # the others while nobody waits
    return engine


def listening(sockets: ServerSockets, name: SocketName) -> tuple[zmq.Socket[bytes], str]:
    """Return the socket at which clients find an engine, and where it is."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    return socket, sockets.bind(socket, name)


def main(folder: Path, generation: int) -> int:
    """Serve until SIGTERM."""
    own = ServerFolder(folder)
    threading.Thread(
        target=beat, args=(own.heartbeat(0, generation), os.getppid()), daemon=True
    ).start()
    config = own.config()
    try:
        engine = open_engine(config)
    except TuttiError as error:
        own.write(own.failed(0, generation).name, str(error))
        return 2
    socket, address = listening(ServerSockets(own), SocketName("engine", 0, generation))
    vocab = engine.worker.model.spec.vocab
    named = config.engine.get("tokenizer") or config.folder
    grammars = Grammars(Path(named), vocab, engine.worker.sampler.end)
    adapters = ServedAdapters(engine, own, config)
    loop = EngineLoop(engine, socket, grammars, adapters, warms=config.warm_up)

    def stop(*_args: object) -> None:
        loop.stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor says when
    settings = engine.scheduler.settings
    ready = EngineState(
        generation=generation,
        address=address,
        ready=True,
        context=settings.max_length,
        vocab=vocab,
        slots=settings.slots,
        page_size=settings.page_size,
    )
    own.write(own.ready(0, generation).name, ready)
    loop.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
