"""Files at URLs: memory, a disk and a real HTTP server; what fails is one line."""

from __future__ import annotations

import importlib.util
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tutti.bench.storage.object_server import ObjectServer
from tutti.errors import InputError, TuttiError
from tutti.storage import ranged, url
from tutti.storage.ranged import fetch, read_into, require_file
from tutti.storage.url import RemoteError, RemoteFolder, is_url, split_url

KIB = 1 << 10


@pytest.fixture(autouse=True)
def quick(monkeypatch: Any) -> None:
    monkeypatch.setattr(url, "_PAUSE_S", 0.001)


@pytest.fixture(params=["memory", "file", "http"])
def folder(request: Any, tmp_path: Path) -> Any:
    if request.param == "http":
        with ObjectServer(tmp_path) as server:
            yield RemoteFolder(server.url)
    elif request.param == "file":
        yield RemoteFolder(f"file://{tmp_path}/store")
    else:
        yield RemoteFolder(f"memory://{tmp_path.name}")


def test_what_is_a_url() -> None:
    assert all(map(is_url, ("s3://b/x", "file:///x", "http://h/x", "simplecache::s3://b/x")))
    assert not any(map(is_url, ("data/x.jsonl", "/x", "shipped:verse", "C:\\x", "x:y")))


def test_a_url_is_parted_at_its_pattern() -> None:
    assert split_url("s3://bucket/a/b.jsonl") == ("s3://bucket/a", "b.jsonl")
    assert split_url("s3://bucket/a/*/b-*.jsonl") == ("s3://bucket/a", "*/b-*.jsonl")
    assert split_url("memory://corpus/x") == ("memory://corpus", "x")


def test_what_is_written_is_read_back_whole_and_in_ranges(
    folder: RemoteFolder, tmp_path: Path
) -> None:
    content = os.urandom(300 * KIB + 17)
    source = tmp_path / "source.bin"
    source.write_bytes(content)
    assert folder.upload(source, "a/large.bin") == len(content)
    folder.write("small.json", b"{}")
    folder.write("small.json", b"[1]")
    assert folder.read("small.json") == b"[1]"
    assert folder.read("a/large.bin", 1000, 77) == content[1000:1077]
    assert folder.read("a/large.bin", 0, 5) == content[:5]
    assert folder.read("a/large.bin", 9, 0) == b""
    memory = bytearray(100 * KIB)
    with ThreadPoolExecutor(4) as pool:
        read_into(folder, "a/large.bin", 12345, memoryview(memory), pool, each=7 * KIB)
    assert memory == content[12345 : 12345 + len(memory)]
    assert folder.file("nothing") is None
    found = folder.file("a/large.bin")
    assert found is not None
    assert found.num_bytes == len(content)


def test_names_that_match_come_in_order(folder: RemoteFolder, tmp_path: Path) -> None:
    for name in ("b/2.jsonl", "b/1.jsonl", "b/readme.md"):
        folder.write(name, b"x")
    assert folder.matching("b/*.jsonl") == ["b/1.jsonl", "b/2.jsonl"]


def test_a_fetch_goes_on_where_it_was_left(folder: RemoteFolder, tmp_path: Path) -> None:
    content = os.urandom(64 * KIB + 3)
    folder.write("data.bin", content)
    file, target = require_file(folder, "data.bin"), tmp_path / "here" / "data.bin"
    real, reads = folder.read, []

    def breaks_off(name: str, start: int = 0, length: int | None = None) -> bytes:
        reads.append(start)
        if len(reads) > 5:
            raise RemoteError("the line is cut")
        return real(name, start, length)

    folder.read = breaks_off  # type: ignore[method-assign]
    with pytest.raises(RemoteError):
        fetch(folder, file, target, each=8 * KIB, streams=1)
    assert not target.exists()
    folder.read = real  # type: ignore[method-assign]
    told: list[tuple[int, int]] = []
    again = fetch(folder, file, target, each=8 * KIB, streams=2, report=lambda *a: told.append(a))
    assert target.read_bytes() == content
    assert again == len(content) - 5 * 8 * KIB
    assert told[0] == (5 * 8 * KIB, len(content))
    assert told[-1] == (len(content), len(content))
    assert [path.name for path in target.parent.iterdir()] == ["data.bin"]


def test_a_damaged_half_is_read_again(tmp_path: Path) -> None:
    folder = RemoteFolder(f"file://{tmp_path}/store")
    content = os.urandom(32 * KIB)
    folder.write("data.bin", content)
    file, target = require_file(folder, "data.bin"), tmp_path / "data.bin"
    real = folder.read

    def breaks_off(name: str, start: int = 0, length: int | None = None) -> bytes:
        if start >= 16 * KIB:
            raise RemoteError("the line is cut")
        return real(name, start, length)

    folder.read = breaks_off  # type: ignore[method-assign]
    with pytest.raises(RemoteError):
        fetch(folder, file, target, each=8 * KIB, streams=1)
    folder.read = real  # type: ignore[method-assign]
    partial = target.with_name(".data.bin.part")
    with partial.open("r+b") as stream:
        stream.seek(9 * KIB)
        stream.write(b"\0\0\0\0\0\0\0\0")
    assert fetch(folder, file, target, each=8 * KIB) == 24 * KIB
    assert target.read_bytes() == content


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    folder = RemoteFolder(f"file://{tmp_path}/store")
    folder.write("data.bin", b"a" * 10)
    file = require_file(folder, "data.bin")
    time.sleep(0.02)
    folder.write("data.bin", b"b" * 10)
    with pytest.raises(RemoteError, match="was changed while it was read"):
        fetch(folder, file, tmp_path / "data.bin")
    assert not (tmp_path / "data.bin").exists()


def test_a_server_that_knows_no_ranges_is_read_all_the_same(tmp_path: Path) -> None:
    content = os.urandom(10 * KIB)
    (tmp_path / "x").write_bytes(content)
    with ObjectServer(tmp_path, knows_ranges=False) as server:
        assert RemoteFolder(server.url).read("x", 100, 50) == content[100:150]


def test_a_busy_server_is_asked_again_and_a_closed_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    with ObjectServer(tmp_path) as server:
        folder = RemoteFolder(server.url)
        server.failures = [503, 500]
        assert folder.read("x", 1, 3) == b"234"
        server.failures = [403] * 10
        with pytest.raises(TuttiError) as error:
            folder.read("x", 1, 3)
        assert "403" in str(error.value)
        assert len(server.failures) == 9


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nosuch://bucket/x", "kinds of URL: s3"),
        pytest.param(
            "s3://bucket/x",
            "s3fs",
            marks=pytest.mark.skipif(bool(importlib.util.find_spec("s3fs")), reason="s3fs is here"),
        ),
    ],
)
def test_a_kind_of_url_that_cannot_be_opened(text: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        RemoteFolder(text)
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_missing_file_is_named(folder: RemoteFolder) -> None:
    with pytest.raises(InputError, match="no such file"):
        folder.read("nothing.bin", 0, 4)
    with pytest.raises(InputError, match="no such file"):
        require_file(folder, "nothing.bin")


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: Any) -> None:
    folder = RemoteFolder(f"file://{tmp_path}/store")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ranged.os, "pwrite", full)
    folder.write("x", b"12")
    with pytest.raises(InputError, match="No space left on device"):
        fetch(folder, require_file(folder, "x"), tmp_path / "y")
    monkeypatch.setattr(url.os, "replace", full)
    with pytest.raises(RemoteError, match="No space left on device"):
        folder.write("z", b"12")


def test_fsspec_is_asked_for_where_it_is_missing(monkeypatch: Any) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(InputError, match=r"pip install 'tutti-ml\[storage\]'"):
        RemoteFolder("memory://x")


def test_a_server_that_is_down_is_not_an_empty_one(tmp_path: Path) -> None:
    with ObjectServer(tmp_path) as server:
        folder = RemoteFolder(server.url)
        assert folder.file("x") is None
        assert folder.read_if_there("x") is None
        server.failures = [503] * 40
        with pytest.raises(RemoteError, match="503"):
            folder.read_if_there("x")
        server.failures = [503] * 40
        with pytest.raises(RemoteError, match="503"):
            folder.file("x")
        server.failures = []
    gone = RemoteFolder("http://127.0.0.1:9")
    with pytest.raises(RemoteError, match="failed"):
        gone.file("x")
    with pytest.raises(InputError, match="cannot be written to"):
        gone.require_writable()
