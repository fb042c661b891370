"""What is trained: patterns, adapters' tensors, kinds of units, and words for what cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.plans import small_model
from tutti.errors import InputError
from tutti.models import Workload, activation_bytes, flops_per_token, unit_operators
from tutti.models.parameters import ParameterClass
from tutti.models.tuning import AdapterSpec, Tuning, is_adapter, trained_share

LORA = Tuning(adapter=AdapterSpec(rank=4, alpha=8.0))


def names(spec, unit):
    return {p.name: p for p in spec.parameters(unit)}


def test_an_adapter_freezes_everything_else_and_adds_two_factors_per_layer():
    spec = small_model(2).with_tuning(LORA)
    found = names(spec, 1)
    query = found["attention.query.weight"]
    assert query.frozen
    assert not query.trainable
    assert found["attention.query.lora_down"].shape == (4, query.shape[1])
    assert found["attention.query.lora_up"].shape == (query.shape[0], 4)
    trained = {name for name, p in found.items() if p.trainable}
    assert all(is_adapter(name) for name in trained)
    assert len(trained) == 14  # seven layers
    assert not any(p.trainable for p in spec.parameters(0))


def test_factors_are_sliced_along_the_dimension_they_share_with_their_weight():
    found = names(small_model(2).with_tuning(LORA), 1)
    column, row = found["mlp.up.lora_up"], found["mlp.down.lora_down"]
    assert (column.slice_dim, row.slice_dim) == (0, 1)
    whole = found["mlp.up.lora_down"], found["mlp.down.lora_up"]
    assert [p.slice_dim for p in whole] == [None, None]
    assert all(p.is_partial(tp=2, sequence_parallel=False, spread=False) for p in whole)
    assert not column.is_partial(tp=2, sequence_parallel=True, spread=False)


def test_experts_share_the_factor_of_gate_and_up():
    found = names(small_model(2, experts_in=(1,)).with_tuning(LORA), 2)
    assert "moe.experts.gate.lora_down" in found
    assert "moe.experts.up.lora_down" not in found
    up = found["moe.experts.up.lora_up"]
    assert up.group is ParameterClass.EXPERT
    assert up.shape[0] == up.experts


def test_patterns_name_units_layers_and_hugging_face_modules():
    adapter = AdapterSpec(rank=2, targets=("q_proj", "2.mlp.down"))
    spec = small_model(2).with_tuning(Tuning(adapter=adapter, trained=("*norm*",)))
    first, second = ({n for n in names(spec, u) if is_adapter(n)} for u in (1, 2))
    assert first == {"attention.query.lora_down", "attention.query.lora_up"}
    assert second - first == {"mlp.down.lora_down", "mlp.down.lora_up"}
    assert names(spec, 1)["attention_norm.weight"].trainable
    assert spec.unit_kind(1) != spec.unit_kind(2)


def test_a_tied_head_is_frozen_with_its_table():
    spec = small_model(2, tied=True).with_tuning(Tuning(frozen=("token.weight",)))
    assert not names(spec, spec.head_unit)["logits.weight"].trainable
    assert names(spec, 1)["mlp.up.weight"].trainable


def test_the_fingerprint_knows_the_tuning_and_the_base_does_not():
    spec = small_model(2)
    tuned = spec.with_tuning(LORA)
    assert tuned.fingerprint != spec.fingerprint
    assert tuned.untuned.fingerprint == spec.fingerprint


def test_frozen_products_have_no_weight_gradients():
    spec = small_model(2)
    tuned = spec.with_tuning(LORA)
    work = Workload(sequence_length=16, sequences=2)
    whole = sum(op.backward_weight.flops for op in unit_operators(spec, 1, work))
    left = unit_operators(tuned, 1, work)
    own = [op for op in left if op.name.endswith((".down", ".up")) and op.m]
    assert sum(op.backward_weight.flops for op in left) < whole
    assert own
    assert trained_share(tuned.parameters(1)) == 0.0
    assert activation_bytes(tuned, 1, work) > activation_bytes(spec, 1, work)
    assert flops_per_token(tuned, 16) < flops_per_token(spec, 16)


@pytest.mark.parametrize(
    ("tuning", "words"),
    [
        (Tuning(adapter=AdapterSpec(targets=("mlp.dwon",))), "did you mean 'mlp.down'"),
        (Tuning(frozen=("*",)), "nothing is left to train"),
    ],
)
def test_what_cannot_be_is_one_line(tuning, words):
    with pytest.raises(InputError, match=words):
        small_model(2).with_tuning(tuning)


def test_half_of_a_joined_pair_and_dora_on_experts_are_refused():
    spec = small_model(2, experts_in=(1,))
    half = Tuning(adapter=AdapterSpec(targets=("moe.experts.up",)))
    with pytest.raises(InputError, match="name both, or neither"):
        spec.with_tuning(half)
    dora = replace(LORA, adapter=AdapterSpec(method="dora"))
    with pytest.raises(InputError, match="DoRA has no form for experts"):
        spec.with_tuning(dora)


def test_a_tuning_that_says_nothing_and_few_bits_without_an_adapter_are_refused():
    with pytest.raises(ValueError, match="leave 'tuning' out"):
        Tuning()
    with pytest.raises(ValueError, match="beside an adapter"):
        Tuning(frozen=("mlp.*",), base="nf4")
