"""Clients that a server is better off without: what they send costs nobody else anything."""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

from tests.support import socket_fuzz  # noqa: E402
from tests.support.peft_folders import write_adapter  # noqa: E402
from tests.support.served import Served, write_model  # noqa: E402

PROMPT = "once upon a time"
ASKED = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_model(tmp_path_factory.mktemp("abused") / "tiny")
    adapter = folder.parent / "adapter"
    write_adapter(folder, adapter)
    with Served(folder, "--queue", "64", "--adapter", f"kept={adapter}") as made:
        made.wait()
        yield made


@pytest.fixture
def address(server: Served) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    return host, int(port)


def nested(count: int) -> str:
    return "[" * count + "]" * count


def schema(inside: str) -> str:
    asked = '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "response_format": '
    return f'{asked}{{"type": "json_schema", "json_schema": {{"name": "a", "schema": {inside}}}}}}}'


HALF = r"\ud800"
BAD: list[tuple[str, str | bytes, str]] = [
    ("v1/completions", f'{{"prompt": "{HALF}"}}', "one half of a surrogate pair"),
    ("v1/completions", f'{{"prompt": "a", "{HALF}": 1}}', "one half of a surrogate pair"),
    ("v1/completions", f'{{"prompt": "a", "model": "{HALF}"}}', "one half of a surrogate pair"),
    ("v1/embeddings", f'{{"input": ["{HALF}"]}}', "one half of a surrogate pair"),
    ("tokenize", f'{{"prompt": "{HALF}"}}', "one half of a surrogate pair"),
    ("v1/completions", b'{"prompt": "\xff"}', "a text is no UTF-8"),
    ("v1/completions", b'{"prompt": "a", "temperature": NaN}', "no JSON that can be read"),
    ("v1/completions", '{"prompt": "a", "seed": ' + "9" * 5000 + "}", "out of range"),
    ("v1/completions", f'{{"prompt": {nested(5000)}}}', "nested too deeply"),
    (
        "v1/chat/completions",
        f'{{"messages": [{{"role": "user", "content": "a", "x": {nested(900)}}}]}}',
        "nested too deeply",
    ),
    ("v1/completions", '{"prompt": "a", "grammar": "start: start"}', "no text of this model's"),
    (
        "v1/chat/completions",
        schema('{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'),
        "no text of this model's",
    ),
    (
        "v1/completions",
        f'{{"prompt": {json.dumps(["a"] * 65)}, "n": 128, "max_tokens": 1}}',
        "8320 choices (prompts times 'n') in one request; send at most 8192",
    ),
    ("v1/load_lora_adapter", f'{{"lora_name": "x", "lora_path": "/{HALF}"}}', "surrogate pair"),
    ("v1/load_lora_adapter", r'{"lora_name": "x", "lora_path": "/\u0000"}', "no such folder"),
    (
        "v1/load_lora_adapter",
        json.dumps({"lora_name": "x", "lora_path": "/" + "a" * 5000}),
        "cannot be looked at (File name too long)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("route", "body", "why"), BAD)
def test_what_no_reader_takes_is_refused_in_one_line(
    server: Served, route: str, body: str | bytes, why: str
) -> None:
    headers = {"content-type": "application/json"}
    said = httpx.post(f"{server.url}/{route}", content=body, headers=headers, timeout=30)
    error = said.json()["error"]
    assert (said.status_code, why in error["message"]) == (400, True), error
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    assert len(error["message"]) < 400


@pytest.mark.parametrize(
    "config",
    ["{", "[1]", b"\xff\xfe", {"r": "x"}, {"lora_alpha": "x"}, {"alpha_pattern": 5},
     {"alpha_pattern": {"(": 1}}, {"alpha_pattern": {".*": "x"}}, None],
)  # fmt: skip
def test_folders_that_are_no_adapters_leave_the_engine_alone(
    server: Served, tmp_path: Path, config: str | bytes | dict[str, object] | None
) -> None:
    kept = next(Path(server.folder.parent).glob("adapter"))
    right = json.loads((kept / "adapter_config.json").read_text())
    written = {**right, **config} if isinstance(config, dict) else right
    data = json.dumps(written).encode()
    if isinstance(config, str | bytes):
        data = config.encode() if isinstance(config, str) else config
    (tmp_path / "adapter_config.json").write_bytes(data)
    weights = (kept / "adapter_model.safetensors").read_bytes()
    (tmp_path / "adapter_model.safetensors").write_bytes(weights[: None if config else 300])
    engine = server.pid("engine_process")
    body = {"lora_name": "bad", "lora_path": str(tmp_path)}
    said = httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=30)
    if config == {"r": "x"}:  # the weights say it
        assert said.status_code == 200
        httpx.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": "bad"})
    else:
        assert said.status_code == 400, said.text
        assert "\n" not in said.json()["error"]["message"]
    assert server.pid("engine_process") == engine


def test_a_long_body_without_a_length(server: Served) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(17):
            yield b" " * (1 << 20)

    headers = {"content-type": "application/json"}
    said = httpx.post(f"{server.url}/v1/completions", content=pieces(), headers=headers)
    assert said.status_code == 413
    assert re.search(r"more than \d+ bytes", said.json()["error"]["message"])


def abused(server: Served, address: tuple[str, int], attacks: int, threads: int) -> Counter[str]:
    """Attack a server from several threads, while somebody asks it something."""
    wanted = httpx.post(f"{server.url}/v1/completions", json=ASKED, timeout=60).json()["choices"]
    tally: Counter[str] = Counter()

    def harm(seed: int) -> None:
        r = random.Random(seed)
        for _ in range(attacks // threads):
            socket_fuzz.attack(r, *address, tally)

    harmful = [threading.Thread(target=harm, args=(seed,)) for seed in range(threads)]
    for thread in harmful:
        thread.start()
    answers = 0
    while any(thread.is_alive() for thread in harmful) or not answers:
        said = httpx.post(f"{server.url}/v1/completions", json=ASKED, timeout=60)
        if said.status_code != 429:  # those who want a stream and leave may fill the queue
            assert said.status_code == 200, said.text
            assert said.json()["choices"] == wanted
            answers += 1
    for thread in harmful:
        thread.join()
    assert tally["500"] == 0, tally
    return tally


def test_garbage_costs_nobody_anything(server: Served, address: tuple[str, int]) -> None:
    engine, api = server.pid("engine_process"), server.pid("api_process")
    before = socket_fuzz.num_files(api)
    tally = abused(server, address, attacks=120, threads=4)
    assert all(tally[each.__name__] for each in socket_fuzz.ATTACKS), tally
    assert socket_fuzz.files_after(api, before + 2, 20) <= before + 2
    assert (server.pid("engine_process"), server.pid("api_process")) == (engine, api)


def test_headers_that_never_end_are_refused(address: tuple[str, int]) -> None:
    for more in (b"x" * 1000, b"a: b\r\n" * 200):
        said = b""
        with socket.create_connection(address, timeout=10) as to:
            to.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n")
            with contextlib.suppress(ConnectionError):  # what it says may be lost: it closes
                for _ in range(10_000):
                    to.sendall(more)
                while piece := to.recv(4096):
                    said += piece
        assert not said or b" 431 " in said.splitlines()[0]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_long_attack_leaves_nothing_behind(server: Served, address: tuple[str, int]) -> None:
    """Memory and open files stay; connections that say nothing are closed."""
    engine, api = server.pid("engine_process"), server.pid("api_process")
    abused(server, address, attacks=1000, threads=8)
    files = {pid: socket_fuzz.num_files(pid) for pid in (engine, api, server.process.pid)}
    memory = {pid: socket_fuzz.resident(pid) for pid in files}
    held = socket_fuzz.hold(*address, 600)
    tally = abused(server, address, attacks=6000, threads=8)
    print(dict(tally))
    for pid, most in files.items():
        assert socket_fuzz.files_after(pid, most + 4, 120) <= most + 4
    for to in held:
        to.close()
    for pid, before in memory.items():
        grown = socket_fuzz.resident(pid) - before
        print(f"{pid}: {before >> 20} MiB and {grown >> 20} more")
        assert grown < 24 << 20
    assert (server.pid("engine_process"), server.pid("api_process")) == (engine, api)
