"""`tutti serve` with real clients, and what happens when its processes die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")

from tests.support.asked import BAD, PROMPT, lines, offline  # noqa: E402
from tests.support.peft_folders import write_adapter  # noqa: E402
from tests.support.served import Served, write_model  # noqa: E402
from tests.support.train_job import tutti  # noqa: E402
from tutti.serve import Engine, SamplingParameters  # noqa: E402

KEY = "a-secret"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with Served(folder, environment={"TUTTI_SERVING": "tests.support.hooks"}) as made:
        made.wait()
        yield made


@pytest.fixture(scope="module")
def client(server: Served) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.from_pretrained(folder, dtype="fp32", device="cpu", slots=4)


def test_a_completion_is_the_engines(client: Any, engine: Engine) -> None:
    done = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0)
    assert done.choices[0].text == offline(engine, 24)
    assert done.choices[0].finish_reason == "length"
    assert done.usage.completion_tokens == 24
    assert done.usage.total_tokens == done.usage.prompt_tokens + 24


def test_streams_say_the_same(client: Any, engine: Engine) -> None:
    said = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=24, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    pieces = list(said)
    assert "".join(p.choices[0].text for p in pieces if p.choices) == offline(engine, 24)
    assert pieces[-1].usage.completion_tokens == 24
    assert pieces[-2].choices[0].finish_reason == "length"


def test_chats_use_the_template(client: Any) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    done = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=9, temperature=0, logprobs=True,
        top_logprobs=3,
    )  # fmt: skip
    choice = done.choices[0]
    assert choice.message.role == "assistant"
    assert len(choice.logprobs.content) == 9
    assert all(len(one.top_logprobs) == 3 for one in choice.logprobs.content)
    rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    plain = client.completions.create(model="tiny", prompt=rendered, max_tokens=9, temperature=0)
    assert choice.message.content == plain.choices[0].text
    streamed = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=9, temperature=0, stream=True
    )
    assert "".join(p.choices[0].delta.content or "" for p in streamed) == plain.choices[0].text


def test_hooks_are_on_the_way(client: Any, server: Served, engine: Engine) -> None:
    def ask(hooks: dict[str, Any], **more: Any) -> str:
        done = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=6, temperature=0, extra_body={"hooks": hooks},
            **more,
        )  # fmt: skip
        return str(done.choices[0].text)

    plain = offline(engine, 6)
    assert ask({}) == plain
    other = engine.generate(["the fox"], SamplingParameters(max_tokens=6))[0].text
    assert ask({"shout": {"prompt": "the fox"}}) == other
    assert engine.tokenizer is not None
    first = [int(token) for token in engine.tokenizer.encode([PROMPT])[0][:2]]
    cut = engine.generate([first], SamplingParameters(max_tokens=6))[0].text
    assert ask({"shout": {"first": 2}}) == cut
    assert ask({"shout": {"held": True}}) == plain.upper()
    assert ask({"shout": {"only": [65, 66]}}) == engine.tokenizer.decode([65, 66] * 3)
    stream = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=6, temperature=0, stream=True,
        extra_body={"hooks": {"shout": {"held": True}}},
    )  # fmt: skip
    assert "".join(piece.choices[0].text for piece in stream) == plain.upper()


@pytest.mark.parametrize("at", ["before", "tokenised", "after", "logits", "shape"])
def test_a_hook_that_fails_fails_its_request_alone(server: Served, engine: Engine, at: str) -> None:
    async def both() -> list[Any]:
        asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        async with httpx.AsyncClient(timeout=60) as own:
            return await asyncio.gather(
                own.post(f"{server.url}/v1/completions", json=asked),
                own.post(
                    f"{server.url}/v1/completions",
                    json={**asked, "hooks": {"broken": {"at": at}}},
                ),
            )

    good, bad = asyncio.run(both())
    assert good.json()["choices"][0]["text"] == offline(engine, 12)
    assert bad.status_code == 500
    error = bad.json()["error"]
    assert error["type"] == "server_error"
    assert "hook" in error["message"]
    if at in ("before", "after", "logits"):
        assert "hook 'broken' failed" in error["message"]
        assert "on purpose" in error["message"]


def test_hooks_that_are_not_there(server: Served) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 2}
    for hooks, why in (
        ({"shot": {}}, "hooks: 'shot' is not installed; did you mean 'shout'?"),
        ({"shout": {"refuse": True}}, "shout: not today"),
    ):
        answer = httpx.post(f"{server.url}/v1/completions", json={**asked, "hooks": hooks})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == why


def test_no_messages_are_no_conversation(server: Served) -> None:
    answer = httpx.post(f"{server.url}/tokenize", json={"messages": []})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"


def test_the_description_says_what_is_done(server: Served) -> None:
    described = httpx.get(f"{server.url}/openapi.json").json()
    for route in described["paths"].values():
        for operation in route.values():
            assert "422" not in operation["responses"]
    asked = described["components"]["schemas"]["CompletionRequest"]
    assert asked["additionalProperties"] is False
    assert "user" in asked["properties"]


def test_samples_follow_their_seed(client: Any, engine: Engine) -> None:
    def ask(seed: int) -> list[str]:
        done = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=8, temperature=1.0, n=3, seed=seed
        )
        return [choice.text for choice in done.choices]

    first = ask(7)
    assert first == ask(7) != ask(8)
    wanted = engine.generate(
        [PROMPT], SamplingParameters(max_tokens=8, temperature=1.0, n=3, seed=7)
    )[0]
    assert first == [answer.text for answer in wanted.answers]


def test_stop_texts_end_an_answer(client: Any, engine: Engine) -> None:
    whole = offline(engine, 40)
    stop = whole[len(whole) // 2 :][:2]
    done = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=40, temperature=0, stop=stop
    )
    assert done.choices[0].text == whole[: whole.index(stop)]
    assert done.choices[0].finish_reason == "stop"


def test_prompts_with_logprobs_as_evaluations_want_them(client: Any, engine: Engine) -> None:
    tokens = [int(t) for t in engine.tokenizer.encode([PROMPT])[0]]  # type: ignore[union-attr]
    done = client.completions.create(
        model="tiny", prompt=[tokens, tokens[:2]], max_tokens=1, temperature=0, logprobs=1,
        echo=True,
    )  # fmt: skip
    own = engine.generate([tokens], SamplingParameters(max_tokens=1, prompt_logprobs=1))[0]
    found = done.choices[0].logprobs
    assert len(found.tokens) == len(tokens) + 1
    assert found.token_logprobs[0] is None
    wanted = [one.logprob for one in own.prompt_logprobs or () if one is not None]
    assert found.token_logprobs[1 : len(tokens)] == pytest.approx(wanted, abs=1e-5)
    assert [choice.index for choice in done.choices] == [0, 1]


def test_embeddings_are_the_engines(client: Any, engine: Engine) -> None:
    found = client.embeddings.create(model="tiny", input=[PROMPT, "a dog"])
    wanted = engine.embed([PROMPT, "a dog"])
    for row, vector in zip(found.data, wanted, strict=True):
        assert row.embedding == pytest.approx(vector.tolist(), abs=1e-5)


def test_many_clients_at_once(server: Served, engine: Engine) -> None:
    wanted = offline(engine, 16)

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

            async def one() -> str:
                said = await client.completions.create(
                    model="tiny", prompt=PROMPT, max_tokens=16, temperature=0, stream=True
                )
                return "".join([piece.choices[0].text async for piece in said])

            return await asyncio.gather(*(one() for _ in range(24)))

    assert asyncio.run(ask()) == [wanted] * 24


def test_answers_follow_a_schema(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99},
                       "kind": {"enum": ["a", "b"]}},
        "required": ["n", "kind"],
        "additionalProperties": False,
    }  # fmt: skip
    done = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "go"}], n=3, temperature=1.0, seed=3,
        max_completion_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )  # fmt: skip
    for choice in done.choices:
        assert choice.finish_reason == "stop"
        found = json.loads(choice.message.content)
        assert set(found) == {"n", "kind"}
        assert 0 <= found["n"] <= 99


def test_tools_that_must_be_called(client: Any) -> None:
    shape = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"],
             "additionalProperties": False}  # fmt: skip
    tool = {"type": "function", "function": {"name": "lamp", "parameters": shape}}
    asked: dict[str, Any] = {
        "model": "tiny", "messages": [{"role": "user", "content": "light"}], "tools": [tool],
        "tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.0, "seed": 1,
        "max_completion_tokens": 300,
    }  # fmt: skip
    done = client.chat.completions.create(**asked).choices[0]
    assert done.finish_reason == "tool_calls"
    (call,) = done.message.tool_calls
    assert call.function.name == "lamp"
    assert isinstance(json.loads(call.function.arguments)["on"], bool)
    pieces = [p.choices[0] for p in client.chat.completions.create(**asked, stream=True)]
    calls = [c for p in pieces for c in p.delta.tool_calls or ()]
    assert [c.function.arguments for c in calls] == [call.function.arguments]
    assert pieces[-1].finish_reason == "tool_calls"


def test_a_load_is_measured(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--requests", "6", "--rate", "20", "--json"]
    code, out, _ = tutti(capsys, "bench", "serve", f"{server.url}/v1", *options)
    assert code == 0
    found = json.loads(out)
    assert (found["requests"], found["failed"], found["model"]) == (6, 0, "tiny")
    assert found["output_tokens"] > 6 * 16
    assert 0 < found["first_s"]["p50"] <= found["whole_s"]["p50"]
    code, _, err = tutti(capsys, "bench", "serve", "http://127.0.0.1:9")
    assert code != 0
    assert "does not answer" in err


@pytest.mark.parametrize(("route", "body", "status", "text"), BAD)
def test_mistakes_are_said_in_one_line(
    server: Served, route: str, body: dict[str, Any] | str, status: int, text: str
) -> None:
    data = body if isinstance(body, str) else json.dumps(body)
    headers = {"content-type": "application/json"}
    got = httpx.post(f"{server.url}/v1/{route}", content=data, headers=headers, timeout=30)
    error = got.json()["error"]
    assert (got.status_code, text in error["message"]) == (status, True), error
    assert "\n" not in error["message"]


def test_who_leaves_frees_what_it_had(server: Served) -> None:
    body = {
        "prompt": PROMPT,
        "max_tokens": 900,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as said:
        next(said.iter_lines())
    until = time.monotonic() + 30
    while server.metric("tutti_engine_running") or server.metric("tutti_engine_pages_used"):
        assert time.monotonic() < until, "a request without a reader goes on"
        time.sleep(0.2)


def test_a_stream_outlives_its_engine(server: Served, folder: Path, engine: Engine) -> None:
    """Also one of an adapter that came while the server ran, which counts what it said before."""
    adapter = folder.parent / "adapter"
    write_adapter(folder, adapter)
    engine.add_adapter("late", adapter)
    body = {"lora_name": "late", "lora_path": str(adapter)}
    assert httpx.post(f"{server.url}/v1/load_lora_adapter", json=body).status_code == 200
    penalties = {"frequency_penalty": 0.9, "presence_penalty": 0.3, "repetition_penalty": 1.2}
    wanted = offline(engine, 200, ignore_end=True, adapter="late", **penalties)
    assert wanted != offline(engine, 200, ignore_end=True, **penalties)
    said, killed = "", False
    for text in lines(server, 200, model="late", **penalties):
        said += text
        if not killed and len(said) > 40:
            os.kill(server.pid("engine_process"), signal.SIGKILL)
            killed = True
    assert killed
    assert said == wanted, "no gap, and nothing twice"
    assert server.metric("tutti_engine_restarts_total") >= 1
    names = [row["id"] for row in httpx.get(f"{server.url}/v1/models").json()["data"]]
    assert names == ["tiny", "late"]
    assert "".join(lines(server, 30)) == offline(engine, 30, ignore_end=True)


def test_an_api_process_that_dies_is_replaced(server: Served, client: Any) -> None:
    os.kill(server.pid("api_process"), signal.SIGKILL)
    server.wait()
    done = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=2, temperature=0)
    assert done.usage.completion_tokens == 2


def test_keys_queue_and_the_end(folder: Path, engine: Engine) -> None:
    with Served(folder, "--api-key", KEY, "--queue", "1", "--name", "mine") as own:
        own.wait()
        url = f"{own.url}/v1/completions"
        body = {
            "prompt": PROMPT,
            "max_tokens": 400,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        long = httpx.post(
            url, content=b"x" * (17 << 20), headers={"authorization": f"Bearer {KEY}"}
        )
        assert long.status_code == 413
        for headers in ({}, {"authorization": "Bearer wrong"}):
            assert httpx.post(url, json=body, headers=headers).status_code == 401
        right = {"authorization": f"Bearer {KEY}"}
        said = ""
        with httpx.stream("POST", url, json=body, headers=right, timeout=120) as stream:
            for line in stream.iter_lines():
                if not line.startswith("data: {"):
                    continue
                if not said:
                    full = httpx.post(url, json=body, headers=right)
                    assert full.status_code == 429
                    assert full.headers["retry-after"] == "1"
                    own.process.send_signal(signal.SIGTERM)
                said += json.loads(line[6:])["choices"][0]["text"]
        assert said == offline(engine, 400, ignore_end=True), "what runs goes to its end"
        assert own.process.wait(60) == 0


def test_a_port_that_is_taken_and_a_folder_that_is_none(server: Served, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from tutti.cli.main import app
    from tutti.errors import InputError

    port = server.url.rsplit(":", 1)[1]
    with pytest.raises(InputError, match="choose another with --port"):
        CliRunner().invoke(app, ["serve", str(tmp_path), "--port", port], catch_exceptions=False)
    with pytest.raises(InputError, match="is not a folder"):
        CliRunner().invoke(app, ["serve", str(tmp_path / "no")], catch_exceptions=False)
