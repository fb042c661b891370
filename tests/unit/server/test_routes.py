"""Routes of an API process, asked without a socket; the engines are what a test makes of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from tutti.server.messages import EngineState, ServerConfig, State, Update, Wishes
from tutti.server.openai import guard
from tutti.server.openai.app import MOST_CHOICES, PART, Api, make_app

COMPLETIONS = "/v1/completions"


class Engines:
    """Engines that answer every prompt with its first token, a moment later."""

    state = State(engines=(EngineState(ready=True, context=64, slots=4, vocab=9000),))
    load = None
    adapters: dict[str, str]

    def __init__(self) -> None:
        self.adapters, self.num_asked, self.most_asked = {}, 0, 0

    async def stream(
        self, tokens: list[int], _wishes: Wishes, _pooling: str | None = None
    ) -> AsyncGenerator[Update]:
        self.num_asked += 1
        self.most_asked = max(self.most_asked, self.num_asked)
        await asyncio.sleep(0)
        self.num_asked -= 1
        yield Update(1, tokens=tokens[:1], finish="length")


class Served:
    """An application and the engines behind it."""

    def __init__(self, queue: int = 1024) -> None:
        self.engines = Engines()
        config = ServerConfig(folder="", name="m", engine={}, queue=queue)
        self.app = make_app(Api(config, self.engines, None))  # type: ignore[arg-type]

    def ask(
        self, path: str, *pieces: bytes, method: str = "POST", pause_s: float = 0.0
    ) -> tuple[int, dict[str, str], bytes]:
        """Return the status, the headers and the body that answer a body of some pieces."""
        left, said = list(pieces) or [b""], []

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(pause_s if left else 3600)
            body = left.pop(0)
            return {"type": "http.request", "body": body, "more_body": bool(left)}

        async def send(message: Any) -> None:
            said.append(message)

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
            "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"",
            "scheme": "http", "headers": [(b"content-type", b"application/json")],
            "client": ("here", 1), "server": ("here", 2),
        }  # fmt: skip
        asyncio.run(self.app(scope, receive, send))
        headers = {key.decode(): value.decode() for key, value in said[0]["headers"]}
        return said[0]["status"], headers, b"".join(one.get("body", b"") for one in said[1:])


def completion(count: int, n: int = 1) -> bytes:
    prompt = [[token] for token in range(count)]
    return json.dumps({"prompt": prompt, "max_tokens": 1, "n": n, "logprobs": 0}).encode()


def test_a_request_larger_than_the_queue_is_fed_in_parts() -> None:
    served = Served(queue=100)
    status, _, body = served.ask(COMPLETIONS, completion(201))
    assert status == 200
    answer = json.loads(body)
    assert [choice["index"] for choice in answer["choices"]] == list(range(201))
    assert answer["usage"]["completion_tokens"] == 201
    assert served.engines.most_asked == PART


def test_one_that_fits_goes_to_the_engines_at_once() -> None:
    served = Served(queue=100)
    assert served.ask(COMPLETIONS, completion(50, n=2))[0] == 200
    assert served.engines.most_asked == 100


def test_parts_fit_beside_what_is_here_or_are_turned_away() -> None:
    served = Served(queue=100)
    served.engines.num_asked = 100 - PART + 1
    assert served.ask(COMPLETIONS, completion(201))[0] == 429
    assert served.engines.most_asked == 0
    served.engines.num_asked -= 1
    assert served.ask(COMPLETIONS, completion(201))[0] == 200
    assert served.engines.most_asked == 100


def test_choices_of_one_request_have_a_limit() -> None:
    status, _, body = Served().ask(COMPLETIONS, completion(100, n=128))
    assert status == 400
    assert (
        f"12800 choices (prompts times 'n') in one request; send at most {MOST_CHOICES}"
        in (json.loads(body)["error"]["message"])
    )


def test_a_body_may_come_in_many_pieces_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_S", 0.5)
    monkeypatch.setattr(guard, "LEAST_RATE", 20)
    whole = completion(1).ljust(240)
    pieces = [whole[at : at + 30] for at in range(0, 240, 30)]
    assert Served().ask(COMPLETIONS, *pieces, pause_s=0.1)[0] == 200, "longer than a pause in all"


def test_a_body_that_stays_away_or_drips_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_S", 0.1)
    status, _, body = Served().ask(COMPLETIONS, b"{", b"}", pause_s=0.5)
    assert status == 408
    assert "no pause may be longer than 0.1 s" in json.loads(body)["error"]["message"]
    status, _, body = Served().ask(COMPLETIONS, *[b" "] * 20, pause_s=0.03)
    assert status == 408
    assert "less than 16384 bytes a second" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"\xef\xbb\xbf" + completion(1), 200),
        (b'{"prompt": [1], "temperature": NaN}', 400),
        (b'{"prompt": [1], "temperature": Infinity}', 400),
        (b'{"prompt": "\\ud800"}', 400),
    ],
)
def test_a_byte_order_mark_is_left_out_and_no_number_is_refused(body: bytes, status: int) -> None:
    found, _, said = Served().ask(COMPLETIONS, body)
    assert found == status
    if status == 400:
        assert "the body is no JSON that can be read" in json.loads(said)["error"]["message"]


def test_metrics_are_described_as_they_are_answered() -> None:
    served = Served()
    described = json.loads(served.ask("/openapi.json", method="GET")[2])
    content = described["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
    assert list(content) == ["text/plain"]
    status, headers, body = served.ask("/metrics", method="GET")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    assert b"# TYPE tutti_requests_total counter" in body
