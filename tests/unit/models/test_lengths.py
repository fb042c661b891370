"""How long a sequence may be: learned positions end, rotary ones are only made for a length."""

from __future__ import annotations

import pytest

from tutti.models import read_config
from tutti.models.lengths import length_refusal, length_warning, longest
from tutti.models.load import catalog_config, load_model
from tutti.models.spec import ModelSpec


def stretched(**scaling: object) -> ModelSpec:
    config = dict(catalog_config("llama-2-7b")) | {"rope_scaling": scaling}
    return read_config(config, "stretched")


def test_learned_positions_end():
    gpt = load_model("gpt2")
    assert length_refusal(gpt, 1024) == ""
    assert length_refusal(gpt, 1025) == (
        "a sequence of 1,025 tokens is longer than the 1,024 learned positions of 'gpt2'; "
        "give 1024 or less"
    )
    assert length_warning(gpt, 1025) == ""


def test_an_offset_is_no_position():
    opt = load_model("opt-350m")
    assert opt.embedding.position_offset == 2
    assert length_refusal(opt, 2048) == ""
    assert "2,048 learned positions" in length_refusal(opt, 2049)


def test_rotary_positions_are_doubtful_beyond_what_the_model_was_made_for():
    llama = load_model("llama-2-7b")
    assert length_refusal(llama, 9_999_999) == ""
    assert length_warning(llama, 4096) == ""
    assert "9,999,999 tokens is longer than the 4,096" in length_warning(llama, 9_999_999)


@pytest.mark.parametrize(
    ("scaling", "reach"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 16384),
        ({"rope_type": "dynamic", "factor": 2.0}, 8192),
        ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}, 32768),
    ],
)
def test_a_scaling_factor_counts(scaling, reach):
    spec = stretched(**scaling)
    assert longest(spec) == reach
    assert length_warning(spec, reach) == ""
    assert length_warning(spec, reach + 1)
    assert longest(load_model("llama-3.1-8b")) == 131072
