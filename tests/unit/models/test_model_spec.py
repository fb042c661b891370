"""ModelSpec: round trip, cycles of blocks, units, fingerprint."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiny_configs import TINY
from tutti import document
from tutti.errors import InputError
from tutti.models import ModelSpec, catalog_names, load_model, read_config
from tutti.models.spec import cycle_of


def through_json(spec: ModelSpec) -> ModelSpec:
    text = json.dumps(document.plain(spec))
    return document.build(ModelSpec, json.loads(text), document.Place("model"))


@pytest.mark.parametrize("name", catalog_names())
def test_the_catalog_round_trips_exactly_and_stays_small(name: str) -> None:
    spec = load_model(name)
    assert through_json(spec) == spec
    assert len(json.dumps(document.plain(spec))) < 1500


@pytest.mark.parametrize("name", TINY)
def test_tiny_models_round_trip_exactly(name: str) -> None:
    spec = read_config(TINY[name], name)
    again = through_json(spec)
    assert again == spec
    assert again.fingerprint == spec.fingerprint


def test_the_fingerprint_ignores_the_name_and_nothing_else() -> None:
    spec = load_model("llama-3-8b")
    assert replace(spec, name="other").fingerprint == spec.fingerprint
    assert replace(spec, vocab=1).fingerprint != spec.fingerprint
    prints = {load_model(name).fingerprint for name in catalog_names()}
    assert len(prints) == len(catalog_names())


@given(st.lists(st.integers(0, 3), min_size=1, max_size=200))
def test_cycles_repeat_to_the_layers_they_were_made_from(indices: list[int]) -> None:
    base = load_model("smollm2-135m")
    blocks = tuple(
        replace(base.blocks[0], residual_multiplier=float(i + 1)) for i in range(max(indices) + 1)
    )
    spec = replace(base, num_layers=len(indices), blocks=blocks, cycle=cycle_of(indices))
    assert list(spec.layer_blocks) == indices
    assert [spec.block(unit + 1) for unit in range(len(indices))] == [blocks[i] for i in indices]


def test_long_models_have_short_cycles() -> None:
    assert load_model("llama-3.1-405b").cycle == ((0, 1),)
    assert load_model("deepseek-v3").cycle == ((0, 3), (1, 58))
    assert load_model("gemma-3-27b").cycle == ((0, 5), (1, 1))


def test_units() -> None:
    spec = load_model("llama-2-7b")
    assert (spec.num_units, spec.head_unit) == (34, 33)
    kinds = [spec.unit_kind(unit) for unit in range(spec.num_units)]
    assert kinds == ["embedding"] + ["block 0"] * 32 + ["head"]
    with pytest.raises(IndexError, match="unit 33 is no block"):
        spec.block(33)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": []}, "model: 'blocks' and 'cycle' must not be empty"),
        ({"cycle": [[4, 1]]}, "model: 'cycle' names block 4; there are only 1 blocks"),
        ({"num_layers": 0}, "model: 'num_layers' is 0; must be at least 1"),
        ({"hiden": 3}, "model: unknown key 'hiden'; did you mean 'hidden'?"),
        ({"hidden": float("nan")}, "model: 'hidden' is NaN; expected a whole number"),
    ],
)
def test_bad_documents_are_one_line(change: dict[str, object], message: str) -> None:
    plain = {**document.plain(load_model("llama-2-7b")), **change}
    with pytest.raises(InputError) as caught:
        document.build(ModelSpec, plain, document.Place("model"))
    assert str(caught.value) == message


def test_tensor_parallel_problems_name_the_numbers() -> None:
    spec = load_model("llama-3-8b")
    assert spec.tensor_parallel_problem(8) is None
    assert spec.tensor_parallel_problem(16) is None  # two ranks share each of the 8 kv heads
    assert spec.tensor_parallel_problem(3) == "tp=3 does not divide the 32 attention heads"
    falcon = load_model("falcon-7b")
    assert falcon.tensor_parallel_problem(2) == "tp=2 does not divide the 71 attention heads"
