"""Vectorised pricing: parts sum, shared rows change nothing, the study's figures come out."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.cost.arrays import Machine, Shape, Strategy
from tutti.cost.constants import Constants
from tutti.cost.memory.footprint import footprint
from tutti.cost.operators.distinct import distinct_rows
from tutti.cost.operators.sizes import (
    flops_per_token,
    matmul_parameters,
    recomputed_flops_per_token,
)
from tutti.cost.operators.unit_times import UNFUSED_LAUNCHES
from tutti.cost.step import price
from tutti.models import flops as model_flops
from tutti.models import load_model

MACHINE = Machine.filled(
    peak=312e12, memory_bandwidth=2e12, compute_units=108, link=300e9, nic=200e9, nics=8
)
REFERENCE = json.loads((Path(__file__).parent / "data" / "reference_prices.json").read_text())

DEGREES = st.sampled_from([1.0, 2.0, 4.0, 8.0])
STRATEGY = st.fixed_dictionaries(
    {
        "tp": DEGREES,
        "pp": DEGREES,
        "dp": st.sampled_from([1.0, 3.0, 16.0]),
        "cp": st.sampled_from([1.0, 2.0]),
        "sequences": DEGREES,
        "micro_batches": st.integers(1, 64).map(float),
        "vpp": st.sampled_from([1.0, 2.0]),
        "shard": st.sampled_from([0.0, 1.0, 3.0]),
        "recompute_gemm": st.sampled_from([0.0, 2 / 3, 1.0]),
        "recompute_attention": st.sampled_from([0.0, 1.0]),
    }
)


def stacked(rows: list[dict[str, float]]) -> Strategy:
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    chips = columns["tp"] * columns["pp"] * columns["dp"] * columns["cp"]
    return Strategy.filled(sequence_length=4096, num_chips=chips, **columns)


@pytest.mark.parametrize("number", range(len(REFERENCE)))
def test_the_study(number: int) -> None:
    """Values of the prototype that the accuracy study was made with, at its priors.

    It took as long to issue a block with unfused attention as with fused, and narrow heads to lose
    more.
    """
    case = REFERENCE[number]
    shape = Shape.filled(**case["shape"])
    strategy = Strategy.filled(**case["strategy"])
    machine = Machine.filled(**case["machine"])
    launches = np.where(strategy.flash > 0, 1.0, UNFUSED_LAUNCHES)
    then = Constants(
        fp8_speedup=1.6, fp4_speedup=2.4, flash_head_dim=32.0, host_layer_s=5e-4 / launches
    )
    found = price(shape, strategy, machine, then)
    assert float(found.step_seconds) == pytest.approx(case["step_seconds"], rel=1e-12)
    memory = footprint(shape, strategy)
    assert float(memory.total_bytes) == pytest.approx(case["memory_bytes"], rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.lists(STRATEGY, min_size=1, max_size=30), st.sampled_from(["gpt-3-175b", "mixtral-8x7b"]))
def test_parts_sum_and_shared_rows_change_nothing(rows: list[dict[str, float]], model: str) -> None:
    shape, strategy = Shape.of(load_model(model), 0), stacked(rows)
    found = price(shape, strategy, MACHINE, Constants())
    total = np.zeros(len(rows))
    for seconds in found.parts.values():
        assert np.all(seconds > -1e-12)
        total = total + seconds
    assert np.array_equal(total, found.step_seconds)
    for i in range(len(rows)):
        alone = price(shape, strategy.take(i), MACHINE, Constants())
        assert float(alone.step_seconds) == pytest.approx(float(found.step_seconds[i]), rel=1e-12)


def test_many_rows_are_priced_in_blocks() -> None:
    shape = Shape.of(load_model("llama-3-8b"), 0)
    many = np.arange(1.0, 40_001.0)
    found = price(
        shape, Strategy.filled(sequence_length=4096, micro_batches=many), MACHINE, Constants()
    )
    assert np.all(np.diff(found.step_seconds) > 0)
    sample = np.array([0, 16383, 16384, 39_999])
    few = Strategy.filled(sequence_length=4096, micro_batches=many[sample])
    expected = price(shape, few, MACHINE, Constants()).step_seconds
    assert np.array_equal(found.step_seconds[sample], expected)


def test_constants_may_differ_by_row() -> None:
    shape = Shape.of(load_model("llama-3-8b"), 0)
    strategy = Strategy.filled(sequence_length=4096, micro_batches=np.array([4.0, 4.0]))
    both = price(shape, strategy, MACHINE, Constants(gemm_efficiency=np.array([0.5, 0.9])))
    for i, efficiency in enumerate((0.5, 0.9)):
        one = price(shape, strategy.take(0), MACHINE, Constants(gemm_efficiency=efficiency))
        assert float(one.step_seconds) == both.step_seconds[i]


@given(st.lists(STRATEGY, min_size=1, max_size=50))
def test_distinct_rows(rows: list[dict[str, float]]) -> None:
    strategy = stacked(rows)
    columns = ("tp", "cp", "recompute_gemm", "micro_batches", "sequence_length")
    found = distinct_rows(strategy, columns)
    assert found is not None
    keys = [tuple(row[c] for c in columns[:-1]) for row in rows]
    assert len(found.first) == len(set(keys))
    assert [keys[i] for i in found.first[found.inverse]] == keys


def test_nothing_is_distinct_without_arrays() -> None:
    assert distinct_rows(Strategy.filled(sequence_length=1), ("tp", "cp")) is None


@pytest.mark.parametrize("model", ["llama-3-8b", "gpt-3-175b", "mixtral-8x7b", "deepseek-v3"])
def test_flops_are_the_models(model: str) -> None:
    spec = load_model(model)
    moe = next((i for i, block in enumerate(spec.blocks) if block.moe is not None), 0)
    shape = Shape.of(spec, moe)
    assert float(matmul_parameters(shape)) == model_flops.matmul_parameters(spec)
    length = np.asarray(4096.0)
    assert float(flops_per_token(shape, length)) == model_flops.flops_per_token(spec, 4096)


def test_mfu_and_hfu() -> None:
    shape = Shape.of(load_model("gpt-3-175b"), 0)
    strategy = Strategy.filled(
        sequence_length=2048, tp=8, pp=8, dp=2, num_chips=128, micro_batches=32, recompute_gemm=1,
        recompute_attention=1,
    )  # fmt: skip
    found = price(shape, strategy, MACHINE, Constants())
    tokens = 2 * 32 * 2048
    work = tokens * float(flops_per_token(shape, strategy.sequence_length))
    peak = np.asarray(312e12)
    mfu = found.mfu(shape, strategy, peak)
    assert float(mfu) == pytest.approx(work / (float(found.step_seconds) * 128 * 312e12))
    again = float(recomputed_flops_per_token(shape, strategy)) * tokens
    hfu = float(found.hfu(shape, strategy, peak))
    assert hfu / float(mfu) == pytest.approx(1 + again / work)
    assert 0.2 < float(mfu) < hfu < 1


def test_every_field_of_a_strategy_is_priced() -> None:
    """A column that no key names would be taken from whichever row comes last."""
    from tutti.cost import step

    keyed = set(step._UNIT_COLUMNS) | set(step._GROUP_COLUMNS)
    by_row = {"micro_batches", "vpp"}
    assert keyed | by_row == {field.name for field in fields(Strategy)}
