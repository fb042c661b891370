"""Reading config.json: what is understood, what is refused, and never anything but one line."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.draws import examples
from tests.support.tiny_configs import BASE, DEEPSEEK, GQA, SHORT, TINY
from tutti import document
from tutti.errors import InputError
from tutti.models import Activation, ModelSpec, Placement, Residual, read_config, unit_operators
from tutti.models.families import model_types
from tutti.models.operators import Workload

LLAMA = {"model_type": "llama", **BASE}


def read(**config: Any) -> ModelSpec:
    return read_config(config, "m")


def without(key: str) -> dict[str, object]:
    return {k: v for k, v in LLAMA.items() if k != key}


def test_all_types_are_understood() -> None:
    assert len(model_types()) == 43


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "m: 'model_type' is missing; this is not the config.json of a Hugging Face model"),
        (
            {"model_type": "lama"},
            "m: 'model_type' is 'lama', which is not supported; did you mean 'llama'; docs",
        ),
        (
            {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}},
            "m: 'model_type' is 'gemma3', which is not supported; only its 'text_config' can",
        ),
        ({"model_type": 3}, "m: 'model_type' is 3, which is not supported; known: arcee"),
        (
            without("num_hidden_layers"),
            "m: 'num_hidden_layers' or 'n_layer' is missing; a config.json of this model type",
        ),
        ({**LLAMA, "num_hidden_layers": None}, "m: 'num_hidden_layers' is null; expected a whole"),
        ({**LLAMA, "num_hidden_layers": -1}, "m: 'num_hidden_layers' is -1; expected a whole"),
        ({**LLAMA, "num_hidden_layers": 10**9}, "m: 'num_hidden_layers' is 1000000000; expected"),
        ({**LLAMA, "hidden_size": "64"}, "m: 'hidden_size' is '64'; expected a whole number"),
        ({**LLAMA, "hidden_size": math.nan}, "m: 'hidden_size' is NaN; expected a whole number"),
        ({**LLAMA, "hidden_size": True}, "m: 'hidden_size' is true; expected a whole number"),
        (
            {**LLAMA, "num_attention_heads": 7},
            "m: 'hidden_size' is 64, which the 7 attention heads do not divide",
        ),
        (
            {**LLAMA, "num_key_value_heads": 3},
            "m: 8 attention heads cannot share 3 key-value heads; the second must divide the first",
        ),
        ({**LLAMA, "hidden_act": "silly"}, "m: 'hidden_act' is 'silly'; did you mean 'silu'?"),
        ({**LLAMA, "rms_norm_eps": -1}, "m: 'rms_norm_eps' is -1; expected a number above 0"),
        ({**LLAMA, "rms_norm_eps": math.inf}, "m: 'rms_norm_eps' is Infinity; expected a number"),
        ({**LLAMA, "attention_dropout": 2}, "m: 'attention_dropout' is 2.0; expected a number fr"),
        ({**LLAMA, "rope_scaling": 3}, "m: 'rope_scaling' is 3; expected a mapping"),
        (
            {**LLAMA, "rope_scaling": {"rope_type": "yarm", "factor": 2.0}},
            "m: rope_scaling: 'rope_type' is 'yarm'; did you mean 'yarn'?",
        ),
        (
            {**LLAMA, "rope_scaling": {"type": "linear"}},
            "m: rope_scaling: 'factor' is missing; a config.json of this model type has it",
        ),
    ],
)
def test_bad_input_is_one_line(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_config(config, "m")
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({**LLAMA, "is_encoder_decoder": True}, "is_encoder_decoder"),
        ({**LLAMA, "attention_chunk_size": 8192}, "attention_chunk_size"),
        ({**TINY["gemma2"], "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({**TINY["gpt2"], "add_cross_attention": True}, "add_cross_attention"),
        ({**TINY["opt"], "layerdrop": 0.1}, "layerdrop"),
        (
            {**TINY["bloom"], "apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm",
        ),
        ({**TINY["gpt_neox"], "num_key_value_heads": 2}, "num_key_value_heads"),
        ({"model_type": "deepseek_v2", **DEEPSEEK, "norm_topk_prob": True}, "norm_topk_prob"),
        ({"model_type": "deepseek_v2", **DEEPSEEK, "scoring_func": "sigmoid"}, "scoring_func"),
        ({"model_type": "deepseek_v3", **DEEPSEEK, "topk_method": "greedy"}, "topk_method"),
        ({"model_type": "falcon", **SHORT, "num_ln_in_parallel_attn": 2}, "num_ln_in_parallel"),
        ({**TINY["gpt_oss"], "hidden_act": "gelu"}, "hidden_act"),
        ({**TINY["gemma2"], "layer_types": ["full_attention"]}, "layer_types"),
        ({**TINY["gemma2"], "layer_types": ["linear_attention"] * 4}, "layer_types"),
    ],
)
def test_options_that_are_not_modelled_are_refused(config: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError, match=f"m: .*{key}"):
        read_config(config, "m")


def test_keys_that_do_not_matter_are_ignored() -> None:
    extra = {"torch_dtype": "bfloat16", "architectures": ["X"], "_source": "y", "z": [1]}
    assert read(**LLAMA, **extra) == read(**LLAMA)


# --- what the types mean -----------------------------------------------------------------------


def test_old_and_new_rotary_forms_agree() -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 32}
    old = read(**LLAMA, rope_theta=5e5, rope_scaling={"type": "yarn", **scaling})
    new = read(**LLAMA, rope_parameters={"rope_type": "yarn", "rope_theta": 5e5, **scaling})
    assert old == new
    rotary = old.blocks[0].attention.rotary
    assert rotary is not None
    assert rotary.scaling is not None
    assert rotary.scaling.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_scales_the_scores_of_latent_attention() -> None:
    attention = read(**TINY["deepseek_v2/grouped"]).blocks[0].attention
    mscale = 0.1 * 0.7 * math.log(4.0) + 1.0
    assert attention.softmax_scale == pytest.approx(mscale**2 / math.sqrt(12))
    assert attention.rotary is not None
    assert attention.rotary.interleaved
    assert attention.rotary.dim == 4


def test_gemma_3_layers_alternate_in_window_and_rotary() -> None:
    spec = read(**TINY["gemma3_text/pattern"])
    sliding, full = (block.attention for block in spec.blocks)
    assert (sliding.window, full.window) == (16, None)
    assert sliding.rotary is not None
    assert full.rotary is not None
    assert (sliding.rotary.theta, full.rotary.theta) == (5e3, 1e5)
    assert sliding.rotary.scaling is None
    assert full.rotary.scaling is not None
    assert spec.cycle == ((0, 1), (1, 1))
    assert spec.embedding.scale == 8.0


def test_placements_and_residuals() -> None:
    assert read(**TINY["opt/350m"]).blocks[0].placement is Placement.POST
    assert read(**TINY["olmo2"]).blocks[0].placement is Placement.BRANCH
    assert read(**TINY["glm4"]).blocks[0].placement is Placement.SANDWICH
    assert read(**TINY["falcon"]).blocks[0].residual is Residual.PARALLEL_ONE_NORM
    assert read(**TINY["falcon/new"]).blocks[0].residual is Residual.PARALLEL_TWO_NORMS
    assert read(**TINY["falcon/alibi"]).blocks[0].residual is Residual.SEQUENTIAL
    assert read(**TINY["gpt_neox"]).blocks[0].residual is Residual.PARALLEL_TWO_NORMS


def test_activations_have_one_name_each() -> None:
    mlp = read(**TINY["gemma/1"]).blocks[0].mlp
    assert mlp is not None
    assert mlp.activation is Activation.GELU_TANH
    moe = read(**TINY["gpt_oss"]).blocks[0].moe
    assert moe is not None
    assert moe.activation is Activation.CLAMPED_SWIGLU
    assert moe.router.scores == "topk_softmax"


def test_qwen_2_windows_start_late() -> None:
    spec = read(**TINY["qwen2/window"])
    assert [spec.block(u).attention.window for u in range(1, 5)] == [None, None, 16, 16]


def test_minicpm3_scales_by_depth_and_width() -> None:
    config = {"model_type": "minicpm3", **GQA, "num_key_value_heads": 8}
    spec = read_config({**config, "dim_model_base": 32, "scale_depth": 1.4}, "m")
    assert spec.blocks[0].residual_multiplier == pytest.approx(1.4 / 2)
    assert spec.head.logit_divisor == 2.0
    assert spec.embedding.scale == 12.0


# --- mutations ---------------------------------------------------------------------------------

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=8),
    st.lists(st.integers(-2, 5), max_size=5),
    st.lists(st.sampled_from(["full_attention", "sliding_attention", "x"]), max_size=5),
    st.dictionaries(
        st.sampled_from(["type", "rope_type", "factor", "rope_theta", "alpha"]),
        st.one_of(st.none(), st.text(max_size=4), st.sampled_from(["yarn", "linear"]), st.floats()),
        max_size=3,
    ),
)


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, object]:
    """A valid config with some keys replaced, removed, or taken from other types."""
    config = copy.deepcopy(TINY[draw(st.sampled_from(sorted(TINY)))])
    others = sorted({key for other in TINY.values() for key in other} - {"model_type"})
    for _ in range(draw(st.integers(1, 4))):
        key = draw(st.sampled_from(others + sorted(config)))
        if draw(st.booleans()):
            config.pop(key, None)
        else:
            config[key] = draw(VALUES)
    return config


def attempt(config: dict[str, object]) -> ModelSpec | InputError:
    try:
        return read_config(config, "m")
    except InputError as error:
        return error


@settings(max_examples=examples(1500, 400), deadline=None)
@given(mutated())
def test_mutations_give_an_input_error_or_a_valid_model(config: dict[str, object]) -> None:
    spec = attempt(config)
    if isinstance(spec, InputError):
        assert str(spec).startswith("m: ")
        assert "\n" not in str(spec)
        return
    plain = document.plain(spec)
    assert document.build(ModelSpec, plain, document.Place("m")) == spec
    assert spec.num_parameters >= spec.num_activated > 0
    for unit in {0, 1, spec.num_layers, spec.head_unit}:
        operators = unit_operators(spec, unit, Workload(sequence_length=16))
        assert all(op.forward.flops >= 0 for op in operators)
