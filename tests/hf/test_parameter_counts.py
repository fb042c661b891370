"""Parameters equal what transformers counts, and absent keys mean what transformers means."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.support.tiny_configs import TINY  # noqa: E402
from tutti.models import catalog_config, catalog_names, read_config  # noqa: E402
from tutti.models.families import model_types  # noqa: E402

LAYER = re.compile(r"(?:layers|h)\.(\d+)\.")


def hf_config(values: dict[str, object]) -> Any:
    values = copy.deepcopy({k: v for k, v in values.items() if k != "_source"})
    if int(str(values["vocab_size"])) < 1000:  # default padding tokens lie beyond a tiny vocabulary
        values["pad_token_id"] = 0
    return transformers.AutoConfig.for_model(**values)


def hf_counts(values: dict[str, object]) -> tuple[int, Counter[int]]:
    """Return transformers' total and its sum per layer, without allocating anything."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(hf_config(values))
    model.tie_weights()
    layers: Counter[int] = Counter()
    for name, parameter in model.named_parameters():
        if found := LAYER.search(name):
            layers[int(found[1])] += parameter.numel()
    return model.num_parameters(), layers


def check(values: dict[str, object]) -> None:
    spec = read_config(values, "model")
    total, layers = hf_counts(values)
    ours = {
        unit - 1: sum(p.size for p in spec.parameters(unit) if p.counted)
        for unit in range(1, spec.num_layers + 1)
    }
    assert ours == dict(layers)
    assert spec.num_parameters == total


@pytest.mark.parametrize("name", TINY)
def test_tiny_models_have_transformers_parameters(name: str) -> None:
    check(TINY[name])


@pytest.mark.parametrize("name", catalog_names())
def test_full_size_models_have_transformers_parameters(name: str) -> None:
    check(catalog_config(name))


@pytest.mark.parametrize("name", TINY)
def test_absent_keys_mean_what_transformers_means(name: str) -> None:
    """What transformers writes after filling in its defaults reads as the same model."""
    written = json.loads(hf_config(TINY[name]).to_json_string(use_diff=False))
    filled = read_config(written, "model")
    asked = {**TINY[name], "pad_token_id": written["pad_token_id"]}  # chosen by hf_config
    assert filled == read_config(asked, "model")


@pytest.mark.parametrize("name", catalog_names())
def test_the_catalog_survives_transformers(name: str) -> None:
    written = json.loads(hf_config(catalog_config(name)).to_json_string(use_diff=False))
    spec = read_config(catalog_config(name), name)
    assert read_config(written, name) == spec


def test_every_type_has_a_tiny_and_a_full_size_config() -> None:
    full = {str(catalog_config(name)["model_type"]) for name in catalog_names()}
    tiny = {str(config["model_type"]) for config in TINY.values()}
    assert tiny == set(model_types())
    assert full == set(model_types())
