"""An API process's side of the engine: submit token ids, await what comes.

When an engine dies and another takes its place, requests go on there from their prompt and the
tokens that came: random numbers hang on seed and position, so that sampled answers stay what they
would have been. Whoever awaits notices nothing but the pause.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import msgspec
import zmq
import zmq.asyncio

from tutti.errors import InputError
from tutti.server import messages
from tutti.server.messages import (
    Cancel,
    Done,
    DropAdapter,
    Load,
    LoadAdapter,
    Refused,
    ServerFolder,
    State,
    Submit,
    Update,
    Wishes,
)

LOOK_S = 0.1  # how often the supervisor's word is read


@dataclass(slots=True, eq=False)
class _Asked:
    """A request whose end has not come."""

    submit: Submit
    updates: asyncio.Queue[Update | Refused | Done] = field(default_factory=asyncio.Queue)
    tokens: list[int] = field(default_factory=list)

    def again(self) -> Submit:
        """Return the request as another engine takes it up."""
        wishes, count = self.submit.wishes, len(self.tokens)
        left = msgspec.structs.replace(
            wishes,
            max_tokens=wishes.max_tokens - count,
            min_tokens=max(0, wishes.min_tokens - count),
            prompt_logprobs=None if count else wishes.prompt_logprobs,
            answered=wishes.answered + count,
        )
        return msgspec.structs.replace(
            self.submit, tokens=[*self.submit.tokens, *self.tokens], wishes=left
        )


class EngineClient:
    """Requests to the server's engine."""

    def __init__(self, folder: ServerFolder, name: bytes) -> None:
        self._folder, self._name = folder, name
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._asked: dict[int, _Asked] = {}
        self._changes: dict[int, messages.ToEngine] = {}
        self._numbers = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.state = State()
        self.adapters: dict[str, str] = {}  # folders by name
        self.load: Load | None = None
        self.on_restart: Callable[[], None] = lambda: None

    async def start(self) -> None:
        """Begin to look for the engine, and to listen to it."""
        self._tasks = [asyncio.create_task(self._watch())]

    async def close(self) -> None:
        """Leave."""
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._socket is not None:
            self._socket.close(0)
        self._context.destroy(0)

    @property
    def num_asked(self) -> int:
        """Requests whose end has not come."""
        return len(self._asked)

    async def stream(
        self, tokens: list[int], wishes: Wishes, pooling: str | None = None
    ) -> AsyncGenerator[Update]:
        """Yield what comes of a request until its end; who leaves early cancels it."""
        number = self._number()
        asked = _Asked(Submit(number, tokens, wishes, pooling))
        self._asked[number] = asked
        try:
            await self._send(asked.submit)
            while True:
                said = await asked.updates.get()
                if isinstance(said, Refused):
                    raise InputError(said.message)
                assert isinstance(said, Update)
                said = _joined(said, asked.updates)
                yield said
                if said.finish is not None:
                    return
        finally:
            if self._asked.pop(number, None) is not None and not _is_over(asked):
                await self._send(Cancel(number))

    async def change_adapter(self, name: str, folder: str | None) -> None:
        """Let an adapter come, or go."""
        number = self._number()
        said = DropAdapter(number, name) if folder is None else LoadAdapter(number, name, folder)
        asked = _Asked(Submit(number, [], Wishes(max_tokens=1)))
        self._asked[number], self._changes[number] = asked, said
        try:
            await self._send(said)
            answer = await asked.updates.get()
            if isinstance(answer, Refused):
                raise InputError(answer.message)
            self.adapters = self._folder.adapters() or {}
        finally:
            self._asked.pop(number, None)
            self._changes.pop(number, None)

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    async def _send(self, message: messages.ToEngine) -> None:
        """Tell the engine; where none is there, the next one is told."""
        if self._socket is not None:
            await self._socket.send(messages.encode(message))

    # --- the engine comes and goes ---------------------------------------------------------

    async def _watch(self) -> None:
        listening: asyncio.Task[None] | None = None
        try:
            while True:
                state = self._folder.state()
                if state.generation != self.state.generation or state.ready != self.state.ready:
                    if listening is not None:
                        listening.cancel()
                        listening = None
                    await self._turn_to(state)
                    if self._socket is not None:
                        listening = asyncio.create_task(self._listen(self._socket))
                self.state = state
                self.adapters = self._folder.adapters() or {}
                await asyncio.sleep(LOOK_S)
        finally:
            if listening is not None:
                listening.cancel()

    async def _turn_to(self, state: State) -> None:
        """Leave an engine that is gone; take up with one that is there."""
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None
            self.load = None
            self.on_restart()
        if not state.ready:
            return
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self._name)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(state.address)
        self._socket = socket
        for number, asked in list(self._asked.items()):
            await self._send(self._changes.get(number) or asked.again())

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            for said in messages.from_engine(await socket.recv()):
                if isinstance(said, Load):
                    self.load = said
                    continue
                asked = self._asked.get(said.id)
                if asked is None:
                    continue
                if isinstance(said, Update):
                    asked.tokens += said.tokens
                asked.updates.put_nowait(said)


def _joined(said: Update, updates: asyncio.Queue[Update | Refused | Done]) -> Update:
    """Return an update with those that came behind it meanwhile.

    Who falls behind says more at a time, and less often; and lets other streams have their turn,
    for the queue is empty then.
    """
    if updates.empty():
        return said
    tokens, logprobs = list(said.tokens), list(said.logprobs)
    prompt, last = said.prompt_logprobs, said
    while not updates.empty():
        more = updates.get_nowait()
        if not isinstance(more, Update):  # another engine does not take it up: its last word
            updates.put_nowait(more)
            break
        tokens += more.tokens
        logprobs += more.logprobs
        prompt, last = prompt or more.prompt_logprobs, more
    return msgspec.structs.replace(
        last, tokens=tokens, logprobs=logprobs, prompt_logprobs=prompt,
        cached=max(said.cached, last.cached),
    )  # fmt: skip


def _is_over(asked: _Asked) -> bool:
    """Tell whether the end of a request has come, whether or not it was read."""
    waiting = asked.updates.qsize()
    last = None
    for _ in range(waiting):
        last = asked.updates.get_nowait()
    return isinstance(last, Refused) or (isinstance(last, Update) and last.finish is not None)
