"""Where the first weights come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny import write_model
from tutti.document import Place, build
from tutti.errors import InputError
from tutti.train.run.config import TrainConfig
from tutti.train.run.weights import model_folder, wants_pretrained


def config(model: Path | str, start: str = "auto") -> TrainConfig:
    written = {"model": str(model), "start": start, "data": {"train": [{"kind": "synthetic"}]}}
    return build(TrainConfig, written, Place("train.yaml"))


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    return write_model(tmp_path / "empty")


@pytest.fixture
def full(tmp_path: Path) -> Path:
    folder = write_model(tmp_path / "full")
    (folder / "model-00001-of-00002.safetensors").touch()
    return folder


def test_a_folder_is_found_by_itself_or_its_config(empty: Path) -> None:
    assert model_folder(str(empty)) == empty
    assert model_folder(str(empty / "config.json")) == empty
    assert model_folder("gpt2") is None
    assert model_folder(str(empty.parent)) is None


@pytest.mark.parametrize(("start", "wanted"), [("auto", True), ("pretrained", True),
                                               ("random", False)])  # fmt: skip
def test_with_weights(full: Path, start: str, wanted: bool) -> None:
    assert wants_pretrained(config(full, start)) is wanted
    assert wants_pretrained(config(full / "config.json", start)) is wanted


def test_without_weights(empty: Path) -> None:
    assert wants_pretrained(config(empty)) is False
    assert wants_pretrained(config("gpt2")) is False
    for model in (empty, "gpt2"):
        with pytest.raises(InputError, match=r"holds no \.safetensors; .*start: random"):
            wants_pretrained(config(model, "pretrained"))
