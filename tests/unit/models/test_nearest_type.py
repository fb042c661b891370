"""An unknown model type is answered with the nearest architecture, by what its config.json says."""

from __future__ import annotations

import re

import pytest

from tutti.errors import InputError
from tutti.models import catalog_config, catalog_names, read_config
from tutti.models.families import registry

PAGE = "docs/extend/add-a-model.md"
# Types that no field of their config.json tells from another one.
ALIKE = {
    "arcee": "llama",
    "glm4": "glm",
    "hunyuan_v1_dense": "llama",
    "internlm3": "llama",
    "olmo2": "llama",
    "olmo3": "mistral",
    "phi3": "mistral",
}


def refusal(config: dict[str, object]) -> str:
    with pytest.raises(InputError) as error:
        read_config(config, "m")
    assert "\n" not in str(error.value)
    return str(error.value)


def nearest(config: dict[str, object]) -> str:
    text = refusal(config)
    assert "which is not supported" in text
    assert PAGE in text
    found = re.search(r"the nearest architecture is '(\w+)'", text)
    assert found, text
    return found[1]


@pytest.mark.parametrize("name", catalog_names())
def test_every_shipped_model_is_nearest_to_its_own_type(name: str) -> None:
    config = catalog_config(name)
    own = str(config["model_type"])
    assert nearest({**config, "model_type": "unheard-of"}) == ALIKE.get(own, own)


def test_fields_come_before_names() -> None:
    """A name one letter from another type says less than thirty fields."""
    config = {**catalog_config("deepseek-v3"), "model_type": "llamas"}
    assert nearest(config) == "deepseek_v3"


def test_architectures_come_before_fields() -> None:
    config = {**catalog_config("llama-3-8b"), "model_type": "unheard-of"}
    assert nearest({**config, "architectures": ["Olmo2ForCausalLM"]}) == "olmo2"
    assert nearest({**config, "architectures": ["UnheardForCausalLM"]}) == "llama"


def test_an_encoder_has_no_nearest_decoder() -> None:
    config = {**catalog_config("llama-3-8b"), "model_type": "bert"}
    text = refusal({**config, "architectures": ["BertForMaskedLM"]})
    assert "'BertForMaskedLM' is no decoder that predicts the next token" in text
    assert "nearest" not in text


def test_a_shipped_type_cannot_be_replaced() -> None:
    from tutti.models.families.decoder import Decoder

    with pytest.raises(InputError, match="'llama' is registered already"):
        registry.register(Decoder(model_type="llama", differs={"rms_norm_eps": 1e-5}))


@pytest.mark.parametrize(
    ("config", "part", "near"),
    [
        ({"model_type": "qwen3_next", "linear_num_key_heads": 16}, "linear attention", True),
        ({"model_type": "minimax", "linear_attn_alpha_factor": 1}, "linear attention", True),
        ({"model_type": "granitemoehybrid", "mamba_d_state": 256}, "state-space layers", True),
        ({"model_type": "nemotron_h", "ssm_state_size": 128}, "state-space layers", True),
        ({"model_type": "lfm2", "conv_L_cache": 3}, "short convolutions", True),
        ({"model_type": "mamba2", "state_size": 128}, "state-space layers", False),
        ({"model_type": "falcon_mamba", "state_size": 16}, "state-space layers", False),
        ({"model_type": "llava", "vision_config": {}}, "a vision tower", False),
    ],
)
def test_parts_that_are_not_computed_are_named(
    config: dict[str, object], part: str, near: bool
) -> None:
    """With what the other layers are like, where there are any."""
    text = refusal({**catalog_config("llama-3-8b"), **config})
    assert f"it has {part}" in text
    assert ("; otherwise the nearest architecture is '" in text) is near
