"""An API process's side of the engines: submit token ids, await what comes.

Requests go where the router says. When an engine dies, its requests go on elsewhere from their
prompt and the tokens that came: random numbers hang on seed and position, so that sampled answers
stay what they would have been. Whoever awaits notices nothing but the pause.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from tutti.batching.router import Choice, Router, Routes
from tutti.errors import InputError, TuttiError
from tutti.plan.files import load_plan
from tutti.serve.handover.handed import Handover
from tutti.server import messages
from tutti.server.messages import (
    Cancel,
    Done,
    DropAdapter,
    EngineState,
    Load,
    LoadAdapter,
    Refused,
    ServerConfig,
    ServerFolder,
    State,
    Submit,
    Update,
    Wishes,
)
from tutti.server.sockets import ServerSockets, SocketName

LOOK_S = 0.1  # how often the supervisor's word is read
MOST_DEATHS = 3  # of engines under a request that brought no token: it may be what ends them


class EngineFailedError(TuttiError):
    """The engine could not do what was asked, through no mistake of the user's."""


@dataclass(slots=True, eq=False)
class _Asked:
    """A request whose end has not come."""

    submit: Submit
    updates: asyncio.Queue[Update | Refused | Done] = field(default_factory=asyncio.Queue)
    tokens: list[int] = field(default_factory=list)
    engine: int | None = None  # that has it now
    onward: int | None = None  # that goes on when this one has computed the prompt
    key: str = ""  # of the keys and values on their way there
    cached: int | None = None  # of the prompt, where it was computed; later engines are sent it
    over: bool = False
    deaths: int = 0  # of engines that had it, since its last token

    @property
    def is_suspect(self) -> bool:
        """Whether one more death gives it up: such requests go to engines one at a time."""
        return self.deaths >= MOST_DEATHS - 1 and not self.over

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
    """Requests to the server's engines."""

    def __init__(self, folder: ServerFolder, name: bytes, config: ServerConfig) -> None:
        self._folder, self._name = folder, name
        self._server_sockets = ServerSockets.of(folder, config)
        self._context = zmq.asyncio.Context()
        self._sockets: dict[int, zmq.asyncio.Socket] = {}
        self._listening: dict[int, asyncio.Task[None]] = {}
        routes = Routes.of(load_plan(Path(config.plan))) if config.plan else Routes.alone()
        self.router = Router(routes, config.routing)
        self._asked: dict[int, _Asked] = {}
        self._changes: dict[int, messages.ToEngine] = {}
        self._numbers = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.state = State()
        self.adapters: dict[str, str] = {}  # folders by name
        self.loads: dict[int, Load] = {}
        self.on_restart: Callable[[], None] = lambda: None

    async def start(self) -> None:
        """Begin to look for engines, and to listen to them."""
        self._tasks = [asyncio.create_task(self._watch())]

    async def close(self) -> None:
        """Leave."""
        for task in (*self._tasks, *self._listening.values()):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for socket in self._sockets.values():
            socket.close(0)
        self._context.destroy(0)

    @property
    def num_asked(self) -> int:
        """Requests whose end has not come."""
        return len(self._asked)

    @property
    def load(self) -> Load | None:
        """How busy all engines are together; None: none has said it."""
        if not self.loads:
            return None
        names = Load.__struct_fields__
        return Load(*(sum(getattr(load, name) for load in self.loads.values()) for name in names))

    async def stream(
        self, tokens: list[int], wishes: Wishes, pooling: str | None = None
    ) -> AsyncGenerator[Update]:
        """Yield what comes of a request until its end; who leaves early cancels it."""
        number = self._number()
        asked = _Asked(Submit(number, tokens, wishes, pooling))
        self._asked[number] = asked
        try:
            await self._dispatch(number, asked)
            while True:
                said = await asked.updates.get()
                if isinstance(said, Refused):
                    raise _error(said)
                assert isinstance(said, Update)
                said = _joined(said, asked.updates)
                yield said
                if said.finish is not None:
                    return
        finally:
            self._asked.pop(number, None)
            self.router.ended(number)
            if not asked.over:
                await self._send(asked.engine, Cancel(number))
            if asked.is_suspect:
                await self._next_suspect()

    async def change_adapter(self, name: str, folder: str | None) -> None:
        """Let an adapter come, or go."""
        number = self._number()
        said = DropAdapter(number, name) if folder is None else LoadAdapter(number, name, folder)
        asked = _Asked(Submit(number, [], Wishes(max_tokens=1)), engine=0)
        self._asked[number], self._changes[number] = asked, said
        try:
            await self._send(0, said)
            answer = await asked.updates.get()
            if isinstance(answer, Refused):
                raise _error(answer)
            self.adapters = self._folder.adapters() or {}
        finally:
            self._asked.pop(number, None)
            self._changes.pop(number, None)
            if asked.is_suspect:
                await self._next_suspect()

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    async def _send(self, engine: int | None, message: messages.ToEngine) -> None:
        """Tell an engine; one that is not there is told nothing."""
        socket = None if engine is None else self._sockets.get(engine)
        if socket is not None:
            await socket.send(messages.encode(message))

    # --- which engine ----------------------------------------------------------------------

    async def _dispatch(self, number: int, asked: _Asked) -> None:
        """Send a request to an engine, from where it stands; without one it waits for the next."""
        if asked.is_suspect and any(
            own.is_suspect and own.engine is not None and own is not asked
            for own in self._asked.values()
        ):
            return
        change = self._changes.get(number)
        if change is not None:
            asked.engine = 0
            await self._send(asked.engine, change)
            return
        submit, asked.onward, asked.key = asked.again(), None, ""
        wishes = submit.wishes
        root = f"{wishes.adapter}/{wishes.salt}"
        most_new = 0 if submit.pooling else wishes.max_tokens
        choice = self.router.choose(number, submit.tokens, most_new, root=root)
        asked.engine = None if choice is None else choice.engine
        if choice is None:
            return
        if choice.onward is not None:
            submit = self._begun(asked, submit, choice)
        await self._send(asked.engine, submit)

    async def _next_suspect(self) -> None:
        """Send the next request under which engines ended: the last one is cleared or over."""
        for number, asked in list(self._asked.items()):
            if asked.is_suspect and asked.engine is None:
                await self._dispatch(number, asked)
                return

    def _begun(self, asked: _Asked, submit: Submit, choice: Choice) -> Submit:
        """Return the part of a request that a prefill engine computes: prompt and one token."""
        assert choice.onward is not None
        asked.onward = choice.onward
        target = self._state_of(choice.onward)
        handover = None
        if len(submit.tokens) >= target.page_size:
            name = f"{self._name.decode()}/{submit.id}/{len(asked.tokens)}"
            asked.key = f"{name}/{target.generation}"
            handover = Handover(asked.key, target.number, target.generation)
        wishes = submit.wishes
        one = msgspec.structs.replace(wishes, max_tokens=1, min_tokens=min(1, wishes.min_tokens))
        return msgspec.structs.replace(submit, wishes=one, handover=handover)

    async def _go_on(self, number: int, asked: _Asked) -> None:
        """Send a request whose prompt is computed to the engine that decodes."""
        submit, wanted, key = asked.again(), asked.onward, asked.key
        asked.onward, asked.key = None, ""
        wishes = submit.wishes
        root = f"{wishes.adapter}/{wishes.salt}"
        asked.engine = self.router.go_on(
            number, submit.tokens, wishes.max_tokens, wanted=wanted, root=root
        )
        if asked.engine is None:
            return
        if asked.engine == wanted and key.endswith(f"/{self._state_of(wanted).generation}"):
            submit = msgspec.structs.replace(submit, imported=key)
        await self._send(asked.engine, submit)

    def _state_of(self, engine: int) -> EngineState:
        return next(own for own in self.state.engines if own.number == engine)

    # --- engines come and go ---------------------------------------------------------------

    async def _watch(self) -> None:
        turned: dict[int, tuple[int, bool]] = {}  # to an engine's generation, when it was ready
        while True:
            self.look()
            for engine in self.state.engines:
                now = (engine.generation, engine.ready)
                if turned.get(engine.number, (0, False)) != now:
                    turned[engine.number] = now
                    await self._turn_to(engine)
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Read how the engines are, as the supervisor says it."""
        self.state = self._folder.state()
        self.adapters = self._folder.adapters() or {}

    async def _turn_to(self, state: EngineState) -> None:
        """Leave an engine that is gone; take up with one that is there."""
        number = state.number
        left = []
        if number in self._sockets:
            self._listening.pop(number).cancel()
            self._sockets.pop(number).close(0)
            self.loads.pop(number, None)
            self.router.left(number)
            left = self._lost(number)
            left = [(name, own) for name, own in left if not await self._given_up(name, own)]
            self.on_restart()
        if state.ready:
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, self._name)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            of_engine = SocketName("engine", number, state.generation)
            self._server_sockets.connect(socket, of_engine, state.address)
            self._sockets[number] = socket
            self._listening[number] = asyncio.create_task(self._listen(number, socket))
            self.router.came(number)
            left += [(name, own) for name, own in self._asked.items() if own.engine is None]
            left += [(name, self._asked[name]) for name in self._changes if name in self._asked]
        for name, asked in dict(left).items():
            if asked.engine is None or name in self._changes:
                await self._dispatch(name, asked)

    def _lost(self, engine: int) -> list[tuple[int, _Asked]]:
        """Return the requests that an engine took with it; they have none now."""
        lost = [(n, own) for n, own in self._asked.items() if own.engine == engine and not own.over]
        for number, asked in lost:
            asked.engine = None
            asked.deaths += 1
            self.router.ended(number)
        return lost

    async def _given_up(self, number: int, asked: _Asked) -> bool:
        """Tell whether a request that lost its engine goes to no other: too many have ended."""
        if asked.deaths < MOST_DEATHS:
            return False
        why = f"{asked.deaths} engines ended under this request, and no other takes it up"
        await self._heard(number, asked, Refused(number, why, failed=True))
        return True

    async def _listen(self, engine: int, socket: zmq.asyncio.Socket) -> None:
        while True:
            for said in messages.from_engine(await socket.recv()):
                if isinstance(said, Load):
                    self.loads[engine] = said
                    self.router.heard(engine, said.running + said.waiting)
                    continue
                asked = self._asked.get(said.id)
                if asked is not None and asked.engine == engine and not asked.over:
                    await self._heard(said.id, asked, said)

    async def _heard(self, number: int, asked: _Asked, said: Update | Refused | Done) -> None:
        was_suspect = asked.is_suspect
        if isinstance(said, Update):
            asked.tokens += said.tokens
            asked.deaths = 0 if said.tokens else asked.deaths
            self.router.noted(number, len(said.tokens))
        if isinstance(said, Update) and said.finish == "length" and asked.onward is not None:
            asked.cached = said.cached
            asked.updates.put_nowait(msgspec.structs.replace(said, finish=None))
            await self._go_on(number, asked)
        else:
            if isinstance(said, Update) and asked.cached is not None:
                said = msgspec.structs.replace(said, cached=asked.cached)
            asked.over = not isinstance(said, Update) or said.finish is not None
            asked.updates.put_nowait(said)
        if was_suspect and not asked.is_suspect:
            await self._next_suspect()


def _error(said: Refused) -> TuttiError:
    return EngineFailedError(said.message) if said.failed else InputError(said.message)


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
