"""Training data at URLs: fetched once, tokenised as if they lay here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tutti.bench.storage.object_server import ObjectServer
from tutti.errors import InputError
from tutti.storage import url as urls
from tutti.storage.url import RemoteFolder
from tutti.train.data.config import DataConfig, SourceConfig
from tutti.train.data.open_data import PackedData, check_data, open_data
from tutti.train.run.config import data_from


@pytest.fixture(autouse=True)
def quick(monkeypatch: Any) -> None:
    monkeypatch.setattr(urls, "_PAUSE_S", 0.001)


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(3):
        lines = [json.dumps({"text": f"text {number} {n} " * 9}) for n in range(20)]
        (folder / f"part-{number}.jsonl").write_text("\n".join(lines))


def opened(path: str, cache: Path, progress: Any = lambda *_: None) -> PackedData:
    config = DataConfig(
        train=(SourceConfig(path=path),), tokenizer="bytes", cache=str(cache), processes=1
    )
    check_data(config)
    return open_data(config, sequence_length=64, vocabulary=300, progress=progress)


@pytest.mark.parametrize("pattern", ["part-*.jsonl", ""])
def test_a_pattern_or_a_folder_at_a_url_gives_the_rows_of_the_files(
    tmp_path: Path, pattern: str
) -> None:
    write(tmp_path / "corpus")
    here = opened(str(tmp_path / "corpus" / (pattern or ".")), tmp_path / "a")
    told: list[str] = []
    with ObjectServer(tmp_path) as server:
        url = f"{server.url}/corpus/{pattern}".rstrip("/")
        there = opened(url, tmp_path / "b", lambda what, *_: told.append(what))
        sent = server.sent
        again = opened(url, tmp_path / "b")
        assert server.sent == sent  # it is here already
    assert there.fingerprint == here.fingerprint == again.fingerprint
    assert f"fetching {url}" in told
    assert there.reports[0].name == url


def test_a_file_that_changed_at_its_url_is_fetched_anew(tmp_path: Path) -> None:
    folder = RemoteFolder(f"memory://{tmp_path.name}-data")
    folder.write("x.txt", b"one text of some words " * 50)
    url = f"memory://{tmp_path.name}-data/x.txt"
    first = opened(url, tmp_path / "cache")
    folder.write("x.txt", b"two text of other words " * 60)
    assert opened(url, tmp_path / "cache").fingerprint != first.fingerprint


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing.jsonl", "no file is there, or none matches"),
        ("x-*.jsonl", "no file is there, or none matches"),
        ("odd.xyz", "no file of a known kind"),
    ],
)
def test_what_is_not_there_is_said_before_anything_is_read(
    tmp_path: Path, name: str, said: str
) -> None:
    (tmp_path / "odd.xyz").write_text("x")
    with ObjectServer(tmp_path) as server:
        config = DataConfig(train=(SourceConfig(path=f"{server.url}/{name}"),), tokenizer="bytes")
        with pytest.raises(InputError) as error:
            check_data(config)
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_url_is_not_taken_for_a_path_beside_the_file() -> None:
    data = DataConfig(train=(SourceConfig(path="s3://bucket/x.jsonl"),))
    assert data_from(Path("/somewhere"), data) == data
