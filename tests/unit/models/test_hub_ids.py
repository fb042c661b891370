"""A name of the Hugging Face hub is answered: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tutti.errors import InputError
from tutti.huggingface import open_checkpoint
from tutti.huggingface.tokenizer import open_tokenizer
from tutti.models import load_model
from tutti.models.load import is_hub_id


@pytest.mark.parametrize("opened", [load_model, open_checkpoint, open_tokenizer])
def test_it_says_what_to_do(
    opened: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as error:
        opened("meta-llama/Llama-3-8B")  # type: ignore[operator]
    assert str(error.value) == (
        "meta-llama/Llama-3-8B: no such folder; give a local folder, nothing is downloaded from "
        "the Hugging Face hub (hf download meta-llama/Llama-3-8B --local-dir FOLDER); to plan for "
        "its shape alone: 'llama-3-8b' of tutti model list"
    )


def test_a_model_that_the_catalog_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as error:
        load_model("acme/zzz-1")
    assert "nothing is downloaded" in str(error.value)
    assert "shape" not in str(error.value)


def test_what_is_no_name_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path of this machine, even a mistyped one, is a path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/llama").mkdir(parents=True)
    for text in ("models/llama", "models/lama", "./acme/one", "/acme/one", "a/b/c", "gpt2",
                 "acme/config.json", "../a/b", "~/a"):  # fmt: skip
        assert not is_hub_id(text), text
    assert is_hub_id("Qwen/Qwen3-8B")
    assert is_hub_id("Qwen/Qwen3-8B/")
