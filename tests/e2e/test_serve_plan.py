"""`tutti serve --plan`: engines of a plan, a router, and what happens when an engine dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

from tests.support.deployed import pipeline, write_folder, write_plan  # noqa: E402
from tests.support.served import Served  # noqa: E402
from tests.support.train_job import tutti  # noqa: E402
from tests.support.warm_commands import started_by  # noqa: E402
from tutti.plan.serving import Role, Route  # noqa: E402
from tutti.serve import Engine, SamplingParameters  # noqa: E402

PROMPTS = [[7 + n, 20, 300, 4 + n, 99] * (4 + n) for n in range(8)]
COUNT = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("planned") / "tiny")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    engine = Engine.from_pretrained(folder, dtype="fp32", device="cpu", slots=8)
    wishes = SamplingParameters(max_tokens=COUNT, ignore_end=True)
    return [done.text or "" for done in engine.generate(PROMPTS, wishes)]


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    """A prefill engine of two stages, a decode engine of two ranks, and one that does both."""
    path = folder.parent / "plan.json"
    write_plan(
        path,
        folder,
        pipeline(((0, 3), "fast/0/0"), ((3, 6), "fast/0/1"), role=Role.PREFILL, share=0.6),
        pipeline(((0, 6), "slow/0/0-1"), role=Role.DECODE, share=0.0, page_size=8),
        pipeline(((0, 6), "fast/0/2"), share=0.4),
        routes=(Route(prefill=0, decode=1),),
    )
    with Served(folder, "--plan", str(path)) as made:
        until_all_ready(made, 3)
        yield made


def until_all_ready(server: Served, engines: int, seconds: float = 240.0) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if len([line for line in said(server) if "is ready after" in line]) >= engines:
            server.wait()
            return
        time.sleep(0.2)
    raise AssertionError(server.lines)


def said(server: Served) -> list[str]:
    assert server.process.stderr is not None
    while line := server.process.stderr.readline():
        server.lines.append(line.rstrip())
    return server.lines


async def streamed(url: str, prompt: list[int], pieces: list[str] | None = None) -> str:
    """Return the text of a stream, in the order in which it came."""
    asked = {
        "model": "tiny", "prompt": prompt, "max_tokens": COUNT, "temperature": 0, "stream": True,
        "ignore_eos": True,
    }  # fmt: skip
    found = [] if pieces is None else pieces
    async with (
        httpx.AsyncClient(timeout=120) as client,
        client.stream("POST", f"{url}/v1/completions", json=asked) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                found.append(choice["text"])
    return "".join(found)


def rank_pids(server: Served, engine: int) -> list[int]:
    """Return the processes of an engine, by rank."""
    found = []
    for pid in started_by(server.process.pid):
        words = psutil.Process(pid).cmdline()
        if "tutti.server.rank_process" in words:
            at = words.index("tutti.server.rank_process")
            if words[at + 2] == str(engine):
                found.append((int(words[at + 4]), pid))
    return [pid for _, pid in sorted(found)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tokens_are_those_of_one_engine(server: Served, expected: list[str]) -> None:
    async def all_at_once() -> list[str]:
        return await asyncio.gather(*(streamed(server.url, prompt) for prompt in PROMPTS))

    assert asyncio.run(all_at_once()) == expected
    assert not any("computed again" in line for line in said(server))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("engine", "rank", "how"),
    [(1, 1, signal.SIGKILL), (0, 0, signal.SIGKILL), (2, 0, signal.SIGSTOP)],
)
def test_streams_go_on_elsewhere(
    server: Served, expected: list[str], engine: int, rank: int, how: signal.Signals
) -> None:
    """An engine dies or hangs in the middle; nobody notices but for the pause."""

    async def with_a_death() -> list[str]:
        started: list[list[str]] = [[] for _ in PROMPTS]
        answers = [
            asyncio.create_task(streamed(server.url, prompt, own))
            for prompt, own in zip(PROMPTS, started, strict=True)
        ]
        while sum(len(own) for own in started) < 3 * len(PROMPTS):
            await asyncio.sleep(0.02)
        os.kill(rank_pids(server, engine)[rank], how)
        return await asyncio.gather(*answers)

    before = len([line for line in said(server) if "is ready after" in line])
    assert asyncio.run(with_a_death()) == expected
    until_all_ready(server, before + 1)
    assert any(f"engine {engine}" in line and "starting another" in line for line in said(server))


def test_what_cannot_be_served(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder.parent / "small.json"
    write_plan(path, folder, pipeline(((0, 6), "fast/0/0")))
    other = write_folder(tmp_path / "other", layers=3)
    cases = {
        ("--plan", str(path), "--slots", "3"): "'slots' is the plan's",
        ("--plan", str(path), "--guesses", "2"): "'guesses' is for one engine",
        ("--plan", str(tmp_path / "none.json")): "no such file",
        ("--plan", str(path), "--routing", "queue"): "--routing is 'queue'; did you mean 'queues'?",
    }
    for options, why in cases.items():
        code, _, error = tutti(capsys, "serve", str(folder), *options)
        assert code == 2, error
        assert why in error
    code, _, error = tutti(capsys, "serve", str(other), "--plan", str(path))
    assert code == 2
    assert "has another shape; plan again, or serve the planned model" in error
