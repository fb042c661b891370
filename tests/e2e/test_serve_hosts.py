"""`tutti serve --listen` and `--join`: engines of one plan on hosts of their own, and one lost.

Hosts are network namespaces joined by wires of 1 Gb/s: nothing but TCP leads from one to another.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from tests.e2e.test_serve_plan import COUNT, PROMPTS, streamed
from tests.support.deployed import pipeline, write_folder, write_plan
from tests.support.train_job import tutti
from tutti.bench.beds.namespaces import visiting, why_not
from tutti.bench.emulated_network import Bed, BedSpec, address
from tutti.plan.serving import Role, Route
from tutti.serve import Engine, SamplingParameters

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
FRONT = f"{address(0, 0)}:29555"
URL = f"http://{address(0, 0)}:8000"


class Deployed:
    """A front and two agents, each in a namespace."""

    def __init__(self, bed: Bed, folder: Path, plan: Path) -> None:
        self._bed, self._folder, self._plan = bed, folder, plan
        self._log: IO[str] = (plan.parent / "front.log").open("w+")
        self.started: list[subprocess.Popen[bytes]] = []
        secret = plan.parent / "secret"
        secret.touch(0o600)
        secret.write_text("4" * 64)
        self._environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "TUTTI_SECRET_FILE": str(secret),
        }  # fmt: skip
        at = ("--host", address(0, 0), "--port", "8000", "--listen", FRONT, "--dtype", "fp32")
        self.front = self._start(0, *at, stderr=self._log)
        self.agents = {name: self.agent(name) for name in ("fast/0", "slow/0")}

    def agent(self, name: str) -> subprocess.Popen[bytes]:
        host = {"fast/0": 1, "slow/0": 2}[name]
        return self._start(host, "--join", FRONT, "--node", name)

    def _start(
        self, host: int, *options: str, stderr: IO[str] | None = None
    ) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tutti.cli.main", "serve", str(self._folder)]
        with visiting(self.holder(host)):
            made = subprocess.Popen(
                [*command, "--plan", str(self._plan), *options],
                env=self._environment,
                stderr=stderr,
            )
        self.started.append(made)
        return made

    def holder(self, host: int) -> int:
        return self._bed.holders[1 + host]

    def lines(self) -> list[str]:
        self._log.seek(0)
        return self._log.read().splitlines()

    def until_ready(self, engines: int, seconds: float = 200.0) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            assert self.front.poll() is None, self.lines()
            if len([line for line in self.lines() if "is ready after" in line]) >= engines:
                time.sleep(0.5)  # an API process looks every 0.1 s
                return
            time.sleep(0.2)
        raise AssertionError(self.lines())

    def streams(self, kill: subprocess.Popen[bytes] | None = None) -> list[str]:
        """Return all texts; `kill`: an agent that dies in the middle."""

        async def all_at_once() -> list[str]:
            begun: list[list[str]] = [[] for _ in PROMPTS]
            answers = [
                asyncio.create_task(streamed(URL, prompt, own))
                for prompt, own in zip(PROMPTS, begun, strict=True)
            ]
            while kill is not None and sum(len(own) for own in begun) < 3 * len(PROMPTS):
                await asyncio.sleep(0.02)
            if kill is not None:
                kill.kill()
            return await asyncio.gather(*answers)

        with visiting(self.holder(0)):
            return asyncio.run(all_at_once())

    def close(self) -> None:
        if self.front.poll() is None:
            self.front.send_signal(signal.SIGTERM)
        for process in self.started:
            process.wait(60)
        self._log.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("hosts") / "tiny")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    engine = Engine.from_pretrained(folder, dtype="fp32", device="cpu", slots=8)
    wishes = SamplingParameters(max_tokens=COUNT, ignore_end=True)
    return [done.text or "" for done in engine.generate(PROMPTS, wishes)]


@pytest.fixture
def deployed(folder: Path) -> Iterator[tuple[Deployed, Bed]]:
    """A prefill engine on one host, a decode engine across both, one for all on the other."""
    path = folder.parent / "plan.json"
    write_plan(
        path,
        folder,
        pipeline(((0, 6), "slow/0/0"), role=Role.PREFILL, share=0.6),
        pipeline(
            ((0, 3), "fast/0/0"), ((3, 6), "slow/0/1"), role=Role.DECODE, share=0.0, page_size=8
        ),
        pipeline(((0, 6), "fast/0/1"), share=0.4),
        routes=(Route(prefill=0, decode=1),),
    )
    spec = BedSpec(
        name="hosts", nics=((1000,), (1000,), (1000,)), ranks_per_host=1, summary="three hosts"
    )
    bed = Bed(spec)
    try:
        made = Deployed(bed, folder, path)
        try:
            yield made, bed
        finally:
            made.close()
    finally:
        bed.close()


def test_engines_on_hosts_of_their_own_and_one_lost(
    deployed: tuple[Deployed, Bed], expected: list[str]
) -> None:
    server, bed = deployed
    server.until_ready(3)
    before = bed.sent_bytes()
    assert server.streams() == expected
    sent = {name: count - before[name] for name, count in bed.sent_bytes().items()}
    assert sent["2/0"] > 100_000  # prompts' keys and values, and boundaries between stages
    assert sent["1/0"] > 20_000
    ready = len([line for line in server.lines() if "is ready after" in line])
    assert server.streams(kill=server.agents["slow/0"]) == expected
    assert any("slow/0 was not heard of" in line for line in server.lines())
    server.agent("slow/0")
    server.until_ready(ready + 2)
    assert server.streams() == expected
    server.front.send_signal(signal.SIGTERM)
    assert server.front.wait(60) == 0
    assert server.agents["fast/0"].wait(30) == 0
    assert server.started[-1].wait(30) == 0


SSH = """#!/usr/bin/env bash
# ssh -tt HOST COMMAND: hosts are namespaces
exec nsenter --net=/proc/$(cat "$(dirname "$0")/$2.pid")/ns/net bash -c "$3"
"""


def test_run_sh_starts_all_hosts(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files of `tutti launch`, with namespaces in the place of hosts."""
    path = folder.parent / "plan.json"
    write_plan(
        path,
        folder,
        pipeline(((0, 3), "fast/0/0"), ((3, 6), "slow/0/1")),
    )
    bed = Bed(BedSpec(name="hosts", nics=((1000,), (1000,))))
    process = None
    try:
        for host in range(2):
            (tmp_path / f"{address(host, 0)}.pid").write_text(str(bed.holders[1 + host]))
        (tmp_path / "ssh").write_text(SSH)
        (tmp_path / "ssh").chmod(0o755)
        (tmp_path / "launch.yaml").write_text(
            f"command: [{sys.executable}, -m, tutti.cli.main, serve]\n"
            f"pools: {{fast: {{hosts: [{address(0, 0)}]}}, slow: {{hosts: [{address(1, 0)}]}}}}\n"
        )
        files = tmp_path / "job"
        words = ["--to", "torchrun", "--with", str(tmp_path / "launch.yaml"), "-o", str(files)]
        code, out, error = tutti(
            capsys, "launch", str(path), "--serve", str(folder), *words, "--", "--dtype", "fp32"
        )
        assert code == 0, error
        assert f"next: bash {files}/run.sh" in out
        process = subprocess.Popen(
            ["bash", str(files / "run.sh")],
            env={**os.environ, "TUTTI_SSH": str(tmp_path / "ssh"), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            if "is ready after" in line:
                break
        time.sleep(0.5)
        with visiting(bed.holders[1]):
            text = asyncio.run(streamed(f"http://{address(0, 0)}:8000", PROMPTS[0]))
        assert text
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        assert process.wait(60) == 143, rest
    finally:
        if process is not None and process.poll() is None:
            process.kill()
        if process is not None and process.stdout is not None:
            process.stdout.close()
        bed.close()
