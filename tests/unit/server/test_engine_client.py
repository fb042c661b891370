"""What an API process makes of an engine's words."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tutti.server.engine_client import MOST_DEATHS, EngineClient, EngineFailedError, _joined
from tutti.server.engine_process import EngineLoop
from tutti.server.messages import (
    Done,
    EngineState,
    FromEngine,
    Likely,
    Refused,
    ServerConfig,
    ServerFolder,
    State,
    Submit,
    Update,
    Wishes,
)


def joined(first: Update, *behind: Update | Refused) -> tuple[Update, int]:
    """Return what is made of an update and those behind it, and how many are left."""
    queue: asyncio.Queue[Update | Refused | Done] = asyncio.Queue()
    for one in behind:
        queue.put_nowait(one)
    return _joined(first, queue), queue.qsize()


def test_who_falls_behind_says_more_at_a_time() -> None:
    likely = Likely(7, -0.5, [])
    made, left = joined(
        Update(1, tokens=[5], prompt_logprobs=[likely]),
        Update(1, tokens=[7], logprobs=[likely]),
        Update(1, tokens=[8, 9], finish="length", cached=4),
    )
    assert left == 0
    assert made == Update(
        1, tokens=[5, 7, 8, 9], finish="length", logprobs=[likely], prompt_logprobs=[likely],
        cached=4,
    )  # fmt: skip


def test_one_alone_is_as_it_came() -> None:
    one = Update(1, tokens=[5])
    assert joined(one) == (one, 0)


def test_a_refusal_stays_the_last_word() -> None:
    made, left = joined(Update(1, tokens=[5]), Update(1, tokens=[6]), Refused(1, "gone"))
    assert made.tokens == [5, 6]
    assert made.finish is None
    assert left == 1


def test_an_engine_that_was_ready_a_moment_ago_is_known_and_taken_up_with(tmp_path: Path) -> None:
    """Who looks between two rounds of the watch must not hide the news from it."""
    folder = ServerFolder(tmp_path)

    async def run() -> None:
        client = EngineClient(folder, b"api0", ServerConfig(folder="", name="m", engine={}))
        await client.start()
        await asyncio.sleep(0.01)
        assert client.state == State()
        address = f"ipc://{tmp_path}/engine"
        engine = EngineState(generation=1, address=address, ready=True, context=64, slots=4)
        folder.write("state.json", State(engines=(engine,)))
        client.look()
        assert client.state.context == 64
        for _ in range(1000):
            if client._sockets:
                break
            await asyncio.sleep(0.01)
        assert list(client._sockets) == [0]
        await client.close()

    asyncio.run(run())


class Listening:
    """Engines as far as a client sees them: files, and sockets that take and say nothing."""

    def __init__(self, folder: ServerFolder) -> None:
        self.folder, self.generation = folder, 0

    def restart(self) -> None:
        self.generation += 1
        address = f"ipc://{self.folder.path}/engine{self.generation}"
        engine = EngineState(
            generation=self.generation, address=address, ready=True, context=64, slots=4
        )
        self.folder.write("state.json", State(engines=(engine,)))


async def until(what: Callable[[], object]) -> None:
    for _ in range(1000):
        if what():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


async def end_engine(client: EngineClient, engines: Listening) -> None:
    """Let an engine end, and another come that the client has taken up with."""
    before = client._sockets[0]
    engines.restart()
    await until(lambda: client._sockets.get(0, before) is not before)
    await asyncio.sleep(0.05)  # what it is sent then


def sent(client: EngineClient) -> list[int]:
    return [number for number, asked in client._asked.items() if asked.engine is not None]


def test_a_request_under_which_engine_after_engine_ends_is_given_up(tmp_path: Path) -> None:
    """It may be what ends them: others must not wait for it for ever."""
    folder = ServerFolder(tmp_path)
    engines = Listening(folder)

    async def run() -> None:
        client = EngineClient(folder, b"api0", ServerConfig(folder="", name="m", engine={}))
        engines.restart()
        await client.start()
        await until(lambda: client._sockets)
        wishes = Wishes(max_tokens=8)
        streams = [client.stream([1, 2], wishes), client.stream([3], wishes)]
        first, second = (asyncio.ensure_future(anext(stream)) for stream in streams)
        change = asyncio.ensure_future(client.change_adapter("x", "/x"))
        await until(lambda: len(client._asked) == 3)
        for number in range(MOST_DEATHS + 1):
            assert first.done() == (number == MOST_DEATHS), "one at a time, the others wait"
            assert not change.done()
            await client._heard(2, client._asked[2], Update(2, tokens=[7]))
            await end_engine(client, engines)
        for task in (first, change):
            with pytest.raises(EngineFailedError, match="3 engines ended under this request"):
                await task
        assert (await second).tokens[:1] == [7]
        assert list(client._asked) == [2], "one that moves on is not to blame"
        for stream in streams:
            await stream.aclose()
        await client.close()

    asyncio.run(run())


def test_a_request_that_only_waited_beside_the_one_that_ends_engines_is_answered(
    tmp_path: Path,
) -> None:
    folder = ServerFolder(tmp_path)
    engines = Listening(folder)

    async def run() -> None:
        client = EngineClient(folder, b"api0", ServerConfig(folder="", name="m", engine={}))
        engines.restart()
        await client.start()
        await until(lambda: client._sockets)
        wishes, guilty = Wishes(max_tokens=2), 2
        streams = [client.stream([token], wishes) for token in range(4)]
        asked = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await until(lambda: sent(client) == [1, 2, 3, 4])
        for _ in range(MOST_DEATHS - 1):
            await end_engine(client, engines)
        assert sent(client) == [1]
        await client._heard(1, client._asked[1], Update(1, tokens=[7]))
        assert sent(client) == [1, guilty], "the first is cleared; the next has its turn"
        await end_engine(client, engines)
        assert sent(client) == [1, 3]
        asked[2].cancel()
        await until(lambda: sent(client) == [1, 4])  # who leaves lets the next one go
        await client._heard(4, client._asked[4], Update(4, tokens=[8]))
        with pytest.raises(EngineFailedError, match="3 engines ended under this request"):
            await asked[1]
        assert [(await asked[place]).tokens for place in (0, 3)] == [[7], [8]]
        for stream in streams:
            await stream.aclose()
        await client.close()

    asyncio.run(run())


class Brittle:
    """An engine that fails in ways that nobody foresaw."""

    is_idle = True

    def add(self, *_args: object, **_named: object) -> int:
        raise ZeroDivisionError("no\nway")


def test_an_engine_outlives_what_it_cannot_take() -> None:
    said: list[FromEngine] = []
    loop = EngineLoop(Brittle(), None, None)  # type: ignore[arg-type]
    loop._send = lambda _client, more: said.extend(more)  # type: ignore[method-assign]
    loop._handle(b"api0", Submit(5, [1], Wishes(max_tokens=1)))
    assert said == [Refused(5, "the engine failed: ZeroDivisionError: no", failed=True)]
