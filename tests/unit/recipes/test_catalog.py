"""Recipes are short, valid training files, and come with all that they name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tutti.cli.main import run
from tutti.errors import InputError
from tutti.recipes.catalog import copy, find, names
from tutti.train.run.config import TrainConfig, with_changes
from tutti.train.run.trainer import Trainer

MOST_LINES = 40


@pytest.mark.parametrize("name", names())
def test_a_recipe_is_a_short_training_file_with_all_it_needs(name: str, tmp_path: Path) -> None:
    recipe = find(name)
    assert len(recipe.text.splitlines()) <= MOST_LINES
    assert recipe.text.splitlines()[1].startswith("# run: ")
    commands = recipe.command.split(" && ")
    assert commands[-1] == f"tutti train {name}.yaml"
    written = copy(recipe, tmp_path)
    assert all((tmp_path / command.split()[-1]).is_file() for command in commands)
    config = TrainConfig.load(written[0])
    assert (Path(config.model) / "config.json").is_file()
    for source in config.data.train:
        assert source.path.startswith("shipped:") or Path(source.path).is_file()
    with pytest.raises(InputError, match="is there already; name another folder"):
        copy(recipe, tmp_path)


def test_an_unknown_recipe_is_one_line_with_the_nearest_name() -> None:
    with pytest.raises(InputError, match="recipe 'sff': there is none; did you mean 'sft'"):
        find("sff")


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        run(["recipe", *arguments, "--json"])
    assert not ended.value.code
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_the_verbs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = said(capsys, "list")["recipes"]
    assert {one["name"] for one in listed} == set(names())
    copied = said(capsys, "copy", "lora", str(tmp_path))
    assert all(Path(path).is_file() for path in copied["written"])
    assert copied["run"] == f"cd {tmp_path} && tutti train lora.yaml"
    folder = tmp_path / "taught"
    said(capsys, "copy", "distillation", str(folder))
    needed = ("teacher.yaml", "tiny-teacher/config.json", "tiny-model/config.json", "chats.jsonl")
    assert all((folder / name).is_file() for name in needed)
    assert said(capsys, "show", "dpo")["text"] == find("dpo").text


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_a_recipe_trains(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is, but for fewer steps."""
    monkeypatch.chdir(tmp_path)
    recipe, fewer = find(name), {"steps": 6, "validation.every": 3}
    copy(recipe, tmp_path)
    for command in recipe.command.split(" && "):
        file = Path(command.split()[-1])
        result = Trainer(with_changes(TrainConfig.load(file), fewer)).fit()
        assert result.finished
    if name == "grpo":  # its loss is about zero, whatever it learns
        assert result.validation[-1][1] <= result.validation[0][1]
        assert "samples.jsonl" in {path.name for path in result.output.iterdir()}
    else:
        assert result.losses[-1] < result.losses[0]
    assert len(result.validation) == 2
    assert (result.adapter or result.huggingface).is_dir()  # type: ignore[union-attr]
