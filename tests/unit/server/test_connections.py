"""Connections that bring no request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("fastapi")
uvicorn = pytest.importorskip("uvicorn")

from uvicorn.server import ServerState  # noqa: E402

from tutti.server.openai import connections  # noqa: E402
from tutti.server.openai.connections import Connection  # noqa: E402


class Written(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.data, self.closed = b"", False

    def write(self, data: Any) -> None:
        self.data += bytes(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


async def app(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


def heard(*pieces: bytes, wait_s: float = 0.0) -> Written:
    """Return what is answered to some data."""

    async def talk() -> Written:
        transport = Written()
        made = Connection(uvicorn.Config(app, log_level="critical"), ServerState(), {})
        made.connection_made(transport)
        for piece in pieces:
            if not transport.closed:
                made.data_received(piece)
            await asyncio.sleep(0.01)
        await asyncio.sleep(wait_s)
        made.connection_lost(None)
        return transport

    return asyncio.run(talk())


def test_headers_may_have_their_length_and_no_more() -> None:
    head = b"GET / HTTP/1.1\r\nhost: x\r\n"
    whole = heard(head, b"a: %s\r\n" % (b"b" * 60_000), b"\r\n")
    assert whole.data.startswith(b"HTTP/1.1 204")
    for more in (b"b" * 1000, b"c: d\r\n" * 200):
        refused = heard(head, *[b"a: "] + [more] * 100)
        assert refused.data.startswith(b"HTTP/1.1 431")
        assert refused.closed


def test_bodies_are_not_headers() -> None:
    body = b"x" * 200_000
    sent = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n"
    said = heard(sent, body, b"GET / HTTP/1.1\r\nho", b"st: x\r\n\r\n").data
    assert said.count(b"HTTP/1.1 204") == 2
    assert b"431" not in said


@pytest.mark.parametrize(("data", "said"), [((), b""), ((b"GET / HT",), b"HTTP/1.1 408")])
def test_who_says_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, data: tuple[bytes, ...], said: bytes
) -> None:
    monkeypatch.setattr(connections, "HEADERS_S", 0.1)
    found = heard(*data, wait_s=0.3)
    assert found.closed
    assert found.data.startswith(said)


def test_a_request_under_way_has_no_such_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADERS_S", 0.05)
    head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n"
    assert not heard(head, wait_s=0.2).data.startswith(b"HTTP/1.1 408")


def test_what_is_no_http_is_answered_in_openais_form() -> None:
    found = heard(b"\x16\x03\x01 nothing\r\n\r\n")
    assert found.data.startswith(b"HTTP/1.1 400 Bad Request")
    assert b'{"error":{"message":"Invalid HTTP request received."' in found.data
    assert found.closed
