"""Parameter tensors: names, shapes, slices, ties; totals that others published."""

from __future__ import annotations

import math

import pytest

from tests.support.tiny_configs import TINY
from tutti.errors import InputError
from tutti.models import ParameterClass, ParameterKind, load_model, read_config

PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "smollm2-135m": 134_515_008,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200 - 58 * 256,  # whose checkpoint counts the router corrections
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "phi-3-mini": 3_821_079_552,
    "gpt-neox-20b": 20_554_567_680,
    "gpt2-xl": 1_557_611_200,
    "opt-350m": 331_196_416,
    "bloom-176b": 176_247_271_424,
    "olmo-2-7b": 7_298_617_344,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_that_others_published(name: str) -> None:
    assert load_model(name).num_parameters == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt-3-175b", 175), ("ernie-260b", 260), ("megatron-turing-530b", 530), ("gpt-1t", 1000)],
)
def test_round_names_are_about_right(name: str, billions: float) -> None:
    assert load_model(name).num_parameters == pytest.approx(billions * 1e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("deepseek-v3", 37), ("qwen3-30b-a3b", 3.3), ("mixtral-8x7b", 12.9), ("glm-4.5", 32)],
)
def test_activated_parameters(name: str, billions: float) -> None:
    assert load_model(name).num_activated == pytest.approx(billions * 1e9, rel=0.06)


@pytest.mark.parametrize("name", TINY)
def test_names_are_unique_and_slices_possible(name: str) -> None:
    spec = read_config(TINY[name], name)
    if spec.embedding.dim == spec.hidden:
        spec = spec.with_prediction_heads(2)
    for unit in range(spec.num_units):
        parameters = spec.parameters(unit)
        names = [p.name for p in parameters]
        assert len(names) == len(set(names))
        for p in parameters:
            assert p.size > 0
            assert (p.group is ParameterClass.EXPERT) == (p.experts > 0)
            if p.slice_dim is not None:
                assert p.shape[p.slice_dim] % p.slice_parts == 0
            if p.matmul_uses:
                assert p.kind is ParameterKind.LINEAR


def test_a_llama_block() -> None:
    found = {p.name: (p.shape, p.slice_dim) for p in load_model("llama-3-8b").parameters(1)}
    assert found == {
        "attention_norm.weight": ((4096,), None),
        "mlp_norm.weight": ((4096,), None),
        "attention.query.weight": ((4096, 4096), 0),
        "attention.key.weight": ((1024, 4096), 0),
        "attention.value.weight": ((1024, 4096), 0),
        "attention.output.weight": ((4096, 4096), 1),
        "mlp.gate.weight": ((14336, 4096), 0),
        "mlp.up.weight": ((14336, 4096), 0),
        "mlp.down.weight": ((4096, 14336), 1),
    }


def test_experts_and_corrections() -> None:
    found = {p.name: p for p in load_model("deepseek-v3").parameters(4)}
    gate, correction = found["moe.experts.gate.weight"], found["moe.router.correction"]
    assert gate.shape == (256, 2048, 7168)
    assert (gate.slice_dim, gate.group) == (1, ParameterClass.EXPERT)
    assert gate.activated_size == 8 * 2048 * 7168
    assert correction.buffer
    assert not correction.trainable
    assert not correction.counted
    ernie = {p.name: p for p in load_model("ernie-4.5-21b-a3b").parameters(2)}
    assert ernie["moe.router.correction"].counted


def test_tied_heads_are_in_both_ends_and_counted_once() -> None:
    spec = load_model("llama-3.2-1b")
    (table,) = spec.parameters(0)
    logits = spec.parameters(spec.head_unit)[-1]
    assert logits.tied_to == "0.token.weight"
    assert logits.shape == table.shape
    assert logits.matmul_uses == 1
    assert table.matmul_uses == 0


def test_prediction_heads_share_embedding_and_logits() -> None:
    spec = load_model("deepseek-v3")
    extra = spec.with_prediction_heads(1)
    h = 7168
    block = sum(p.size for p in spec.parameters(61) if p.counted)
    # two norms, the projection of both, a block, a norm
    assert extra.num_parameters - spec.num_parameters == 2 * h + 2 * h * h + block + h
    assert spec.published_prediction_heads == 1
    with pytest.raises(InputError, match="opt-350m: extra prediction heads need an embedding"):
        load_model("opt-350m").with_prediction_heads(1)


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8, 16])
def test_the_size_of_a_part_is_that_of_the_fullest_rank(tp):
    model = load_model("qwen3-0.6b")
    for unit in (0, 1, model.head_unit):
        for parameter in model.parameters(unit):
            parts = [parameter.part(tp=tp, rank=rank) for rank in range(tp)]
            sizes = [math.prod(stop - start for start, stop in part) for part in parts]
            assert parameter.local_size(tp=tp, expert_tp=tp) == max(sizes)
