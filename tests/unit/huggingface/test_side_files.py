"""Files beside weights: links that lead outside of a model's folder are not copied."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.checkpoints import write_folder
from tutti.errors import InputError
from tutti.huggingface import open_checkpoint
from tutti.huggingface.conversion import convert
from tutti.huggingface.side_files import outside_links, plain_paths


def names(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in plain_paths(folder)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("not for others")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "key").write_text("nor this")
    folder = write_folder(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "alias.json").symlink_to("tokenizer.json")
    (folder / "notes.txt").symlink_to(tmp_path / "secret")
    (folder / "more").symlink_to(tmp_path / "secrets")
    (folder / "broken").symlink_to(tmp_path / "nowhere")
    return folder


def test_links_that_lead_outside_are_passed_over(model: Path) -> None:
    found = names(model)
    assert {"config.json", "tokenizer.json", "alias.json"} <= set(found)
    assert not {"notes.txt", "more/key", "broken"} & set(found)
    assert outside_links(model) == ["more", "notes.txt"]


def test_a_conversion_does_not_bring_them_along(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "ours")
    left = {path.name for path in (tmp_path / "ours").rglob("*")}
    assert "tokenizer.json" in left
    assert not {"notes.txt", "key"} & left


def test_a_folder_of_the_cache_is_whole(tmp_path: Path) -> None:
    """Its files are links into the neighbour `blobs`."""
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "abc").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    assert names(snapshot) == ["config.json"]
    assert outside_links(snapshot) == []


def test_a_tutti_folder_that_names_a_file_outside_is_refused(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "ours")
    path = tmp_path / "ours" / "tutti.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["../secret"] = {"num_bytes": 14, "sha256": "0" * 64}
    path.write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"names '\.\./secret', which is no file of this folder"):
        open_checkpoint(tmp_path / "ours")
