"""What an API process makes of an engine's words."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tutti.server.engine_client import EngineClient, _joined
from tutti.server.messages import (
    Done,
    EngineState,
    Likely,
    Refused,
    ServerConfig,
    ServerFolder,
    State,
    Update,
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
