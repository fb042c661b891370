"""`AsyncEngine`: many callers of one engine, each awaiting its own pieces.

The engine runs in a thread of its own; requests and cancellations reach it between two steps. Who
leaves an iteration early, or is cancelled, cancels its request.

    async with AsyncEngine(engine) as served:
        async for piece in served.stream("Once upon a time"):
            print(piece.text, end="")
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from tutti.errors import TuttiError
from tutti.serve.engine import GREEDY, Engine
from tutti.serve.outputs import Completion, Piece
from tutti.serve.parameters import Prompt, SamplingParameters


@dataclass(eq=False, slots=True)
class _Caller:
    """One request, and where its pieces go."""

    prompt: Prompt
    parameters: SamplingParameters
    loop: asyncio.AbstractEventLoop
    pieces: asyncio.Queue[Piece | Completion | BaseException] = field(default_factory=asyncio.Queue)
    number: int | None = None
    left: bool = False

    def tell(self, what: Piece | Completion | BaseException) -> None:
        """Hand something over, from the engine's thread."""
        self.loop.call_soon_threadsafe(self.pieces.put_nowait, what)


class AsyncEngine:
    """An engine that several coroutines use at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._changes: queue.SimpleQueue[_Caller | None] = queue.SimpleQueue()
        self._callers: dict[int, _Caller] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._closed = False

    async def __aenter__(self) -> Self:
        self._thread.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed = True
        self._changes.put(None)
        await asyncio.to_thread(self._thread.join)

    async def stream(
        self, prompt: Prompt, parameters: SamplingParameters = GREEDY
    ) -> AsyncIterator[Piece]:
        """Yield what comes of one prompt."""
        async for part in self._followed(prompt, parameters):
            if isinstance(part, Piece):
                yield part

    async def generate(self, prompt: Prompt, parameters: SamplingParameters = GREEDY) -> Completion:
        """Return all of one prompt's answers."""
        async for part in self._followed(prompt, parameters):
            if isinstance(part, Completion):
                return part
        raise AssertionError("a request ends with its completion")

    async def _followed(
        self, prompt: Prompt, parameters: SamplingParameters
    ) -> AsyncIterator[Piece | Completion]:
        if self._closed or not self._thread.is_alive():
            raise TuttiError("the engine is closed; use it inside of 'async with'")
        caller = _Caller(prompt, parameters, asyncio.get_running_loop())
        self._changes.put(caller)
        try:
            while True:
                part = await caller.pieces.get()
                if isinstance(part, BaseException):
                    raise part
                yield part
                if isinstance(part, Completion):
                    return
        finally:
            caller.left = True
            self._changes.put(caller)  # one that has ended already is left as it is

    # --- in the engine's thread ------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_changes():
                self._step()
        except BaseException as error:  # whatever it was, nobody may wait for ever
            for caller in self._callers.values():
                caller.tell(TuttiError(f"the engine stopped: {error}"))
            raise

    def _take_changes(self) -> bool:
        """Take what callers want; wait for them if there is nothing to compute."""
        while True:
            try:
                change = self._changes.get(block=self._engine.is_idle)
            except queue.Empty:
                return True
            if change is None:
                for number, caller in list(self._callers.items()):
                    self._engine.cancel(number)
                    caller.tell(TuttiError("the engine was closed"))
                return False
            if change.left:
                self._leave(change)
            else:
                self._add(change)

    def _add(self, caller: _Caller) -> None:
        try:
            caller.number = self._engine.add(caller.prompt, caller.parameters)
        except TuttiError as error:
            caller.tell(error)
        else:
            self._callers[caller.number] = caller

    def _leave(self, caller: _Caller) -> None:
        number = caller.number
        if number is not None and self._callers.pop(number, None) is not None:
            self._engine.cancel(number)
            self._engine.take(number)

    def _step(self) -> None:
        for piece in self._engine.step():
            caller = self._callers.get(piece.request)
            if caller is None:
                continue
            caller.tell(piece)
            done = self._engine.take(piece.request)
            if done is not None:
                del self._callers[piece.request]
                caller.tell(done)
