"""Shapes given by numbers, and finding models by what a person types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_configs import TINY
from tutti.errors import InputError
from tutti.models import catalog_names, load_model, plain_gpt


def test_a_gpt_by_numbers() -> None:
    spec = plain_gpt(layers=24, hidden=2304, heads=24, vocab=51200, sequence_length=2048)
    h, block = 2304, 12 * 2304**2 + 13 * 2304
    assert spec.num_parameters == 24 * block + (51200 + 2048) * h + 2 * h
    assert spec.head.tied
    assert spec.dropout.attention == 0.1


def test_a_llama_by_numbers_is_the_catalogs() -> None:
    spec = plain_gpt(
        layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, gated_mlp=True, vocab=128256
    )
    assert spec.num_parameters == load_model("llama-3-70b").num_parameters


def test_experts_by_numbers() -> None:
    spec = plain_gpt(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        ffn=14336,
        gated_mlp=True,
        vocab=32000,
        experts=8,
        topk=2,
    )
    mixtral = load_model("mixtral-8x7b")
    assert spec.num_parameters == mixtral.num_parameters
    assert spec.num_activated == mixtral.num_activated


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "run 7: 'layers' is 0; must be a whole number, 1 to 10000"),
        ({"hidden": 1.5}, "run 7: 'hidden' is 1.5; must be a whole number"),
        ({"hidden": float("nan")}, "run 7: 'hidden' is nan; must be a whole number"),
        ({"heads": 7}, "run 7: 'heads' is 7, which does not divide hidden=64"),
        ({"kv_heads": 3}, "run 7: 8 attention heads cannot share 3 key-value heads"),
        ({"experts": 8}, "run 7: 'experts' is 8 and 'topk' is None; give both or none"),
        ({"experts": 2, "topk": 3}, "run 7: a token cannot use 3 of 2 experts"),
        ({"dropout": -0.1}, "run 7: 'dropout' is -0.1; must be from 0 to below 1"),
        ({"vocab": -5}, "run 7: 'vocab' is -5; must be a whole number"),
    ],
)
def test_bad_numbers_are_one_line(change: dict[str, Any], message: str) -> None:
    numbers: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 8, "name": "run 7"}
    with pytest.raises(InputError) as caught:
        plain_gpt(**{**numbers, **change})
    assert str(caught.value).startswith(message)


# --- loading -----------------------------------------------------------------------------------


def test_a_folder_a_file_and_a_name(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY["llama"]))
    (tmp_path / "other.json").write_text(json.dumps(TINY["llama"]))
    assert load_model(str(folder)).name == "my-model"
    assert load_model(str(folder / "config.json")) == load_model(str(folder))
    assert load_model(str(tmp_path / "other.json")).name == "other"
    assert load_model("gpt-1t").name == "gpt-1t"


def test_a_bare_folder_name_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "config.json").write_text(json.dumps(TINY["opt"]))
    monkeypatch.chdir(tmp_path)
    assert load_model("local").model_type == "opt"


def test_catalog_files_name_their_source() -> None:
    from tutti.models import catalog_config

    names = catalog_names()
    assert len(names) >= 60
    for name in names:
        assert name == name.lower()
        assert str(catalog_config(name)["_source"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: not valid JSON"),
        ("[1, 2]", "not a model's config.json: expected a mapping at the top"),
        ("{}", "'model_type' is missing; this is not the config.json of a Hugging Face model"),
        ('{"model_type": "llama", "hidden_size": NaN}', "NaN is not a number"),
        ('{"model_type": "llama", "model_type": "opt"}', "the key 'model_type' stands twice"),
        ("\x00\xff", "not valid JSON"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"config\.json: ") as caught:
        load_model(str(tmp_path))
    assert message in str(caught.value)


def test_what_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the folder holds no config\.json"):
        load_model(str(tmp_path))
    with pytest.raises(InputError, match="no such file"):
        load_model(str(tmp_path / "nothing.json"))
    with pytest.raises(InputError, match="did you mean 'llama-2-7b'"):
        load_model("llama2-7b")
    with pytest.raises(InputError):
        load_model("")
    with pytest.raises(InputError):
        load_model("x" * 5000)
    with pytest.raises(InputError):
        load_model("\0")
