"""Load on a server that speaks OpenAI's interface: requests arrive, and wait."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

import numpy as np

from tutti.bench.traces import Asked
from tutti.errors import InputError
from tutti.optional_imports import library
from tutti.simulate.serving.requests import arrival_times

Arrival = Literal["at-once", "poisson", "bursts"]
BURST = 8  # requests at a time


@dataclass(slots=True)
class Timed:
    """One request, seconds from its arrival."""

    first_s: float | None = None
    whole_s: float = 0.0
    pieces: list[float] = field(default_factory=list)  # when each came
    tokens: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a load showed."""

    requests: int
    failed: int
    first_error: str
    seconds: float
    output_tokens: int
    output_rate: float
    request_rate: float
    first_s: dict[str, float]
    per_token_s: dict[str, float]
    gap_s: dict[str, float]
    whole_s: dict[str, float]

    def plain(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


def arrivals(kind: Arrival, count: int, rate: float | None, seed: int = 0) -> list[float]:
    """Return when requests arrive, in seconds."""
    rate = None if kind == "at-once" else rate
    times = arrival_times(kind, count, rate, BURST, np.random.default_rng(seed))
    return [float(time) for time in times]


async def load(
    url: str,
    model: str,
    asked: Sequence[Asked],
    times: Sequence[float],
    *,
    key: str = "",
    most: int = 512,
    progress: Callable[[int], None] = lambda _: None,
) -> Loaded:
    """Send requests to a server as they arrive, `most` of them at a time; return what was seen."""
    room = asyncio.Semaphore(most)
    done = 0
    began = time.perf_counter()

    async def one(request: Asked, at: float) -> Timed:
        nonlocal done
        await asyncio.sleep(max(0.0, at - (time.perf_counter() - began)))
        async with room:
            timed = await _one(url, model, request, key)
        done += 1
        progress(done)
        return timed

    answers = await asyncio.gather(*(one(r, at) for r, at in zip(asked, times, strict=True)))
    return _summary(answers, time.perf_counter() - began)


async def _one(url: str, model: str, asked: Asked, key: str) -> Timed:
    """Stream one answer; tokens are counted by the server's own usage."""
    body = {
        "model": model, "prompt": list(asked.prompt), "max_tokens": asked.new, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    place = urlsplit(url)
    secure = place.scheme == "https"
    own = asyncio.get_running_loop()
    stream = _Stream(_post(place, json.dumps(body).encode(), key))
    try:
        transport, _ = await own.create_connection(
            lambda: stream,
            place.hostname or "",
            place.port or (443 if secure else 80),
            ssl=secure or None,
        )
    except OSError as error:
        stream.timed.error = f"{type(error).__name__}: {error}"
        return stream.timed
    try:
        await stream.ended
    finally:
        transport.close()
    return stream.timed


def _post(place: SplitResult, body: bytes, key: str) -> bytes:
    """Return a request as it goes over the wire."""
    lines = [
        f"POST {place.path.rstrip('/')}/v1/completions HTTP/1.1",
        f"Host: {place.netloc.rpartition('@')[2]}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    if key:
        lines.append(f"Authorization: Bearer {key}")
    return "\r\n".join([*lines, "", ""]).encode() + body


class _Stream(asyncio.Protocol):
    """One request's connection: notes when each event came.

    A client that takes longer for an event than the server measures itself; so there is no more
    between the socket and the clock than the parser of uvicorn.
    """

    def __init__(self, request: bytes) -> None:
        self._request, self._rest = request, b""
        self._parser = library("httptools", "bench serve URL").HttpResponseParser(self)
        self._began = time.perf_counter()
        self._now = 0.0
        self.timed = Timed()
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        self._now = time.perf_counter() - self._began
        try:
            self._parser.feed_data(data)
        except Exception as error:  # httptools' own: what came is not HTTP
            self._end(f"{type(error).__name__}: {error}")

    def on_body(self, body: bytes) -> None:
        """Take events that are whole."""
        *events, self._rest = (self._rest + body).split(b"\n\n")
        if self._parser.get_status_code() != 200:
            self._rest = b"\n\n".join([*events, self._rest])
            return
        for event in events:
            if event.startswith(b"data: {"):
                _take(self.timed, json.loads(event[6:]), self._now)

    def on_message_complete(self) -> None:
        """End with the response."""
        status = self._parser.get_status_code()
        text = self._rest.decode(errors="replace")
        self._end("" if status == 200 else f"{status}: {text[:200]}")

    def connection_lost(self, exc: Exception | None) -> None:
        """End where the response does not."""
        self._end(f"the server left: {exc}" if exc else "the server left before the end")

    def _end(self, error: str) -> None:
        if self.ended.done():
            return
        self.timed.error = self.timed.error or error
        self.timed.whole_s = self._now
        self.ended.set_result(None)


def _take(timed: Timed, said: dict[str, Any], now: float) -> None:
    if "error" in said:
        timed.error = str(said["error"].get("message", said["error"]))
    if said.get("usage"):
        timed.tokens = int(said["usage"].get("completion_tokens", 0))
    if said.get("choices"):
        timed.pieces.append(now)
        if timed.first_s is None:
            timed.first_s = now


def _summary(answers: Sequence[Timed], seconds: float) -> Loaded:
    right = [one for one in answers if not one.error and one.first_s is not None]
    tokens = sum(one.tokens for one in right)
    errors = [one.error for one in answers if one.error]
    return Loaded(
        requests=len(answers),
        failed=len(answers) - len(right),
        first_error=errors[0] if errors else "",
        seconds=seconds,
        output_tokens=tokens,
        output_rate=tokens / seconds,
        request_rate=len(right) / seconds,
        first_s=_shares([one.first_s or 0.0 for one in right]),
        per_token_s=_shares(
            [(one.whole_s - (one.first_s or 0.0)) / (one.tokens - 1)
             for one in right if one.tokens > 1]
        ),
        gap_s=_shares([gap for one in right for gap in np.diff(one.pieces).tolist()]),
        whole_s=_shares([one.whole_s for one in right]),
    )  # fmt: skip


def _shares(values: Sequence[float]) -> dict[str, float]:
    """Return mean, median and the slowest of a hundred."""
    if not values:
        return {"mean": 0.0, "p50": 0.0, "p99": 0.0}
    p50, p99 = np.percentile(values, (50, 99)).tolist()
    return {"mean": float(np.mean(values)), "p50": p50, "p99": p99}


async def served_model(url: str, key: str = "") -> tuple[str, int | None]:
    """Return the name of a server's model, and its context where the server says it."""
    httpx = library("httpx", "bench serve URL")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        async with httpx.AsyncClient(headers=headers, timeout=10.0) as client:
            response = await client.get(f"{url}/v1/models")
            served = response.json()["data"][0]
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise InputError(
            f"bench serve: {url}/v1/models does not answer as OpenAI's interface does ({error})"
        ) from None
    length = served.get("max_model_len")
    return str(served["id"]), int(length) if length else None
