"""Tokenise once, whoever asks, however often, whatever happens meanwhile."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from tutti.errors import InputError
from tutti.huggingface.tokenizer import ByteTokenizer, open_tokenizer
from tutti.train.data import SourceConfig, cache, tokenise
from tutti.train.data.cache import CacheSettings, open_store
from tutti.train.data.sources import jsonl
from tutti.train.data.store import TokenStore


def write_lines(file: Path, count: int, *, chat: bool = False) -> None:
    def value(i: int) -> object:
        if not chat:
            return {"text": f"document {i} " * (i % 5 + 1)}
        turns = [("user", f"question {i}"), ("assistant", "answer" * (i % 7))]
        return {"messages": [{"role": role, "content": text} for role, text in turns]}

    file.write_text("".join(json.dumps(value(i)) + "\n" for i in range(count)))


def opened(folder: Path, **settings: object) -> TokenStore:
    where = CacheSettings(folder=folder / "cache", **settings)  # type: ignore[arg-type]
    return open_store(SourceConfig(path="a.jsonl"), ByteTokenizer(), where, base=folder)


def stores(folder: Path) -> list[str]:
    return [path.name for path in (folder / "cache").iterdir() if path.suffix != ".lock"]


def test_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(tmp_path / "a.jsonl", 50)
    said: list[tuple[str, float, float]] = []
    first = opened(tmp_path, progress=lambda *what: said.append(what))
    size = (tmp_path / "a.jsonl").stat().st_size
    assert said[-1] == ("tokenising a.jsonl", size, size)
    monkeypatch.setattr(cache, "tokenise", None)  # would fail if called
    second = opened(tmp_path)
    assert second.digest == first.digest
    assert np.array_equal(second.tokens, first.tokens)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "a.jsonl").rename(tmp_path / "elsewhere" / "a.jsonl")
    (tmp_path / "cache").rename(tmp_path / "elsewhere" / "cache")
    assert opened(tmp_path / "elsewhere").digest == first.digest  # small files go by content


@pytest.mark.parametrize("small", [1 << 20, 0])
def test_what_went_in_decides(small: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_SMALL_BYTES", small)
    write_lines(tmp_path / "a.jsonl", 5)
    opened(tmp_path)
    opened(tmp_path, end_of_document=False)
    assert len(stores(tmp_path)) == 2
    write_lines(tmp_path / "a.jsonl", 6)
    assert opened(tmp_path).num_documents == 6
    assert len(stores(tmp_path)) == 3


@pytest.mark.parametrize("chat", [False, True])
def test_any_number_of_processes_writes_the_same(
    chat: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "a.jsonl", 300, chat=chat)
    monkeypatch.setattr(jsonl, "PIECE_BYTES", 2000)
    alone = opened(tmp_path, processes=1)
    where = CacheSettings(folder=tmp_path / "other", processes=2)
    source = SourceConfig(path="a.jsonl")
    both = open_store(source, ByteTokenizer(), where, base=tmp_path)
    monkeypatch.setattr(jsonl, "PIECE_BYTES", 1 << 20)
    where = CacheSettings(folder=tmp_path / "third", processes=1)
    whole = open_store(source, ByteTokenizer(), where, base=tmp_path)
    assert alone.digest == both.digest == whole.digest
    assert alone.is_supervised == chat
    kept = range(alone.num_tokens)
    assert np.array_equal(
        alone.supervised(0, len(kept)),
        np.concatenate([whole.supervised(i, i + 1) for i in kept]),
    )


def test_errors_of_processes_are_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(tmp_path / "a.jsonl", 200)
    with (tmp_path / "a.jsonl").open("a") as stream:
        stream.write('{"text": 1}\n')
    monkeypatch.setattr(jsonl, "PIECE_BYTES", 2000)
    with pytest.raises(InputError, match=r"a\.jsonl: line 201: 'text' is 1; expected text"):
        opened(tmp_path, processes=2)
    assert stores(tmp_path) == []
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(InputError, match="the process that tokenised it ended with 1"):
        opened(tmp_path, processes=2)
    assert stores(tmp_path) == []


def test_one_builds_and_the_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(tmp_path / "a.jsonl", 20)
    built, go_on = [], threading.Event()
    real = cache.tokenise

    def slow(*arguments: object, **options: object) -> None:
        built.append(1)
        assert go_on.wait(30)
        real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(cache, "tokenise", slow)
    waiting = threading.Semaphore(0)

    def say(what: str, done: float, whole: float) -> None:
        if "another process" in what:
            waiting.release()

    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(opened(tmp_path, progress=say).digest))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for _ in range(4):  # both of the others have said that they wait
        assert waiting.acquire(timeout=30)
    go_on.set()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert len(found) == 3
    assert len(set(found)) == 1


def test_a_killed_builder_leaves_nothing_that_counts(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", 20)
    whole = opened(tmp_path)
    (name,) = stores(tmp_path)
    (tmp_path / "cache" / name).rename(tmp_path / "cache" / f".{name}.12345")
    (tmp_path / "cache" / f".{name}.12345" / "store.json").unlink()
    assert opened(tmp_path).digest == whole.digest
    assert stores(tmp_path) == [name]


_FULL = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
from tutti.errors import InputError
from tutti.train.data.cache import CacheSettings, open_store
from tutti.train.data import SourceConfig
from tutti.huggingface.tokenizer import ByteTokenizer
folder = Path(sys.argv[1])
try:
    where = CacheSettings(folder=folder / "cache")
    open_store(SourceConfig(path="a.jsonl"), ByteTokenizer(), where, base=folder)
except InputError as error:
    print(error)
"""


def test_a_file_that_cannot_grow(tmp_path: Path) -> None:
    """The system refuses to write on, as it does on a full disk."""
    write_lines(tmp_path / "a.jsonl", 500)
    done = subprocess.run(
        [sys.executable, "-c", _FULL, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    said = f"tokens of a.jsonl cannot be cached ({os.strerror(errno.EFBIG)}); make room or choose"
    assert said in done.stdout, done.stderr
    assert stores(tmp_path) == []


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(tmp_path / "a.jsonl", 5)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tokenise, "write_part", full)
    with pytest.raises(InputError, match=r"No space left on device.*make room"):
        opened(tmp_path)
    assert stores(tmp_path) == []


def test_a_cache_that_cannot_be_made(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", 5)
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(InputError, match=r"tokens cannot be cached here .*another folder with 'ca"):
        opened(tmp_path)


def test_a_damaged_cache(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", 5)
    opened(tmp_path)
    (name,) = stores(tmp_path)
    (tmp_path / "cache" / name / "tokens.bin").write_bytes(b"")
    with pytest.raises(InputError, match=r"the cached tokens are damaged .*remove the folder"):
        opened(tmp_path)


def test_no_such_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"tokenizer: no folder .*gone'; name a Hugging Face"):
        open_tokenizer("gone", folder=tmp_path)
