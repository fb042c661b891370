"""The client of `tutti bench serve URL`, against servers that behave and that do not."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable

import pytest

from tutti.bench.serving_load import Loaded, load
from tutti.bench.traces import Asked

pytest.importorskip("httptools")
Write = Callable[[bytes], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(text: str) -> bytes:
    data = text.encode()
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(**values: object) -> str:
    return f"data: {json.dumps(values)}\n\n"


def loaded(answer: Callable[[Write], Awaitable[None]], count: int = 1, key: str = "") -> Loaded:
    """Return what a load shows of a server that answers so; it sees each request whole."""
    seen: list[bytes] = []
    gone = asyncio.Semaphore(0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
        seen.append(head + await reader.readexactly(length))

        async def write(data: bytes) -> None:
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(0.001)

        await answer(write)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        gone.release()

    async def run() -> Loaded:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            asked = [Asked(prompt=(1, 2), new=3)] * count
            found = await load(f"http://127.0.0.1:{port}", "m", asked, [0.0] * count, key=key)
            for _ in seen:
                await gone.acquire()
            return found

    found = asyncio.run(run())
    assert all(b'"prompt": [1, 2]' in one for one in seen)
    assert all((b"Authorization: Bearer k\r\n" in one) == (key == "k") for one in seen)
    return found


async def good(write: Write) -> None:
    whole = chunk(event(choices=[{"text": "a"}])) + chunk(event(choices=[{"text": "b"}]))
    end = event(choices=[], usage={"completion_tokens": 3}) + "data: [DONE]\n\n"
    await write(HEAD + whole[:20])  # in the midst of an event
    await write(whole[20:])
    await write(chunk(end[:30]) + chunk(end[30:]) + b"0\r\n\r\n")


def test_events_are_counted_and_tokens_as_the_server_says() -> None:
    found = loaded(good, count=3, key="k")
    assert (found.failed, found.output_tokens) == (0, 9)
    assert 0 < found.first_s["p50"] <= found.whole_s["p50"]
    assert found.gap_s["mean"] >= 0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 429 Too Many\r\nContent-Length: 9\r\n\r\nqueue\n\nis", "429: queue\n\nis"),
        (HEAD + chunk(event(error={"message": "no luck"})) + b"0\r\n\r\n", "no luck"),
        (HEAD + chunk(event(choices=[{"text": "a"}])), "the server left before the end"),
        (b"", "the server left before the end"),
        (b"SSH-2.0-none\r\n", "HttpParser"),
    ],
)
def test_what_went_wrong_is_said(answer: bytes, expected: str) -> None:
    async def bad(write: Write) -> None:
        await write(answer)

    found = loaded(bad)
    assert found.failed == 1
    assert expected in found.first_error


def test_nobody_listens() -> None:
    found = asyncio.run(load("http://127.0.0.1:9", "m", [Asked(prompt=(1,), new=1)], [0.0]))
    assert found.failed == 1
    assert "Connect" in found.first_error
