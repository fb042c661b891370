"""A server under load whose processes are killed, stopped and pestered: nobody's answer suffers.

TUTTI_FIRE_S (default: 600) is how long it goes on.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

from tests.support.peft_folders import write_adapter  # noqa: E402
from tests.support.served import TEXT, Served, write_model  # noqa: E402
from tutti.serve import Engine, SamplingParameters  # noqa: E402

SECONDS = float(os.environ.get("TUTTI_FIRE_S", "600"))
FAULTS = round(SECONDS / 30)
RATE = 3.0  # requests a second
MALFORMED: list[tuple[str, bytes]] = [
    ("completions", b"{"),
    ("completions", b'{"prompt": 7, "max_tokens": "x"}'),
    ("completions", b'{"prompt": "a", "temprature": 1}'),
    ("chat/completions", b'{"messages": [{"role": "user", "content": 5}]}'),
    ("completions", json.dumps({"prompt": "a", "max_tokens": 10**9}).encode()),
    ("chat/completions", b"\xff\xfe\x00"),
    ("load_lora_adapter", b'{"lora_name": "x", "lora_path": "/nowhere"}'),
    ("unload_lora_adapter", b'{"lora_name": "nobody"}'),
]


class Case:
    """A request whose answer is known."""

    def __init__(self, prompt: str, count: int, adapter: str, wanted: str) -> None:
        self.prompt, self.count, self.adapter, self.wanted = prompt, count, adapter, wanted

    def body(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt, "max_tokens": self.count, "temperature": 0, "stream": True,
            "ignore_eos": True, **({"model": self.adapter} if self.adapter else {}),
        }  # fmt: skip


def cases(folder: Path, adapter: Path) -> list[Case]:
    """Return requests with the answers of an engine that nobody disturbs."""
    r = random.Random(1)
    engine = Engine.from_pretrained(
        folder, dtype="fp32", device="cpu", slots=8, adapters={"kept": adapter}
    )
    asked = []
    for number in range(24):
        start = r.randrange(200)
        prompt = TEXT[start : start + r.randint(8, 400)]
        asked.append((prompt, r.choice((4, 30, 80, 160)), "kept" if number % 4 == 0 else ""))
    wishes = [
        SamplingParameters(max_tokens=count, ignore_end=True, adapter=name)
        for _, count, name in asked
    ]
    done = engine.generate([prompt for prompt, _, _ in asked], wishes)
    return [Case(*one, str(own.text)) for one, own in zip(asked, done, strict=True)]


async def texts(client: Any, body: dict[str, Any]) -> AsyncIterator[tuple[str, str | None]]:
    """Yield what a stream says, and its end."""
    async with client.stream("POST", "/v1/completions", json=body) as said:
        if said.status_code != 200:
            await said.aread()
            raise httpx.HTTPStatusError(said.text, request=said.request, response=said)
        async for line in said.aiter_lines():
            if line.startswith("data: {"):
                piece = json.loads(line[6:])
                if "error" in piece:
                    raise RuntimeError(piece["error"]["message"])
                choice = piece["choices"][0]
                yield choice["text"], choice["finish_reason"]


class Fire:
    """Load and faults on one server, and what came of them."""

    def __init__(self, server: Served, known: list[Case], adapter: Path) -> None:
        self.server, self.known, self.adapter = server, known, adapter
        self.tally: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.random = random.Random(7)
        self.api_deaths: list[float] = []

    async def ask(self, client: Any) -> None:
        """Send a request; read it to its end, slowly, or leave it."""
        case, began = self.random.choice(self.known), time.monotonic()
        leaves, slow = self.random.random() < 0.15, self.random.random() < 0.15
        said, finish = "", None
        try:
            async for text, end in texts(client, case.body()):
                said += text
                assert finish is None, "a stream goes on after its end"
                finish = end
                if leaves and len(said) > 10:
                    self.tally["left"] += 1
                    return
                if slow:
                    await asyncio.sleep(0.05)
        except httpx.HTTPStatusError as error:
            code = error.response.status_code
            self.tally[f"HTTP {code}"] += 1
            if code not in (429, 503):
                self.wrong.append(f"{code}: {error}")
            return
        except httpx.HTTPError as error:  # its API process died, or the next did not listen yet
            self.tally["cut"] += 1
            died = any(began - 2 <= at <= time.monotonic() for at in self.api_deaths)
            if not died or not case.wanted.startswith(said):
                self.wrong.append(f"cut without a reason: {error!r} after {said!r}")
            return
        if finish is None and not any(at >= began for at in self.api_deaths):
            self.wrong.append(f"no end after {said!r}")
        elif finish is not None and said != case.wanted:
            self.wrong.append(f"{said!r} instead of {case.wanted!r}")
        self.tally["whole" if finish is not None else "cut"] += 1

    async def load(self, client: Any, until: float) -> None:
        """Let requests come at random, and in bursts."""
        tasks: set[asyncio.Task[None]] = set()
        while time.monotonic() < until:
            for _ in range(12 if self.random.random() < 0.05 else 1):
                task = asyncio.create_task(self.ask(client))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.sleep(self.random.expovariate(RATE))
        await asyncio.gather(*tasks)

    async def pester(self, client: Any, until: float) -> None:
        """Send what no request is, and let adapters come and go."""
        while time.monotonic() < until:
            route, body = self.random.choice(MALFORMED)
            try:
                said = await client.post(f"/v1/{route}", content=body)
                self.tally[f"malformed {said.status_code}"] += 1
                if said.status_code >= 500 and said.status_code != 503:
                    self.wrong.append(f"{route} {body!r}: {said.status_code} {said.text}")
                named = {"lora_name": "brief", "lora_path": str(self.adapter)}
                await client.post("/v1/load_lora_adapter", json=named)
                await asyncio.sleep(0.5)
                await client.post("/v1/unload_lora_adapter", json={"lora_name": "brief"})
            except httpx.HTTPError:
                pass
            await asyncio.sleep(1.0)

    async def harm(self, until: float) -> None:
        """Kill or stop a process of the server, again and again."""
        every = (until - time.monotonic()) / (FAULTS + 1)
        for number in range(FAULTS):
            await asyncio.sleep(every)
            await asyncio.to_thread(self.server.wait)  # an engine that never comes up is given up
            module = ("engine_process", "api_process")[number % 3 == 2]
            stops = number % 4 == 1 and module == "engine_process"
            if module == "api_process":
                self.api_deaths.append(time.monotonic())
            os.kill(self.server.pid(module), signal.SIGSTOP if stops else signal.SIGKILL)
            self.tally[f"{module} {'stopped' if stops else 'killed'}"] += 1

    async def rage(self, seconds: float) -> None:
        """Do it all at once."""
        until = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=400, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=self.server.url, timeout=120, limits=limits
        ) as client:
            await asyncio.gather(
                self.load(client, until), self.pester(client, until), self.harm(until)
            )


def resident(pid: int) -> int:
    """Return a process's memory in bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nobody_suffers_when_processes_die(tmp_path: Path) -> None:
    folder, adapter = write_model(tmp_path / "tiny"), tmp_path / "adapter"
    write_adapter(folder, adapter)
    known = cases(folder, adapter)
    options = ("--apis", "2", "--slots", "8", "--adapter", f"kept={adapter}")
    with Served(folder, *options) as server:
        server.wait()
        fire = Fire(server, known, adapter)
        asyncio.run(fire.rage(SECONDS))
        print(dict(fire.tally))
        assert not fire.wrong, fire.wrong[:5]
        assert fire.tally["whole"] > SECONDS
        server.wait()
        until = time.monotonic() + 30
        while server.metric("tutti_engine_running") or server.metric("tutti_engine_pages_used"):
            assert time.monotonic() < until, "pages are left over"
            time.sleep(0.5)
        assert resident(server.pid("engine_process")) < 2 << 30
        assert resident(server.pid("api_process")) < 1 << 30
