"""Seconds of units: the parts sum to the whole, and the products are those of the model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tutti.cost.arrays import Machine, Shape, Strategy
from tutti.cost.constants import Constants
from tutti.cost.operators.unit_times import (
    UnitSeconds,
    block_seconds,
    embedding_seconds,
    head_seconds,
    optimizer_seconds,
)
from tutti.hardware.chip import Dtype
from tutti.hardware.cluster import Cluster
from tutti.models import load_model
from tutti.models.flops import unit_operators
from tutti.models.operators import OperatorKind, Workload

MACHINE = Machine.filled(
    peak=312e12, memory_bandwidth=2e12, compute_units=108, link=300e9, nic=200e9, nics=8
)
# Every product at the peak, nothing else: seconds × peak are FLOPs, where tiles divide evenly.
IDEAL = Constants(
    gemm_efficiency=1.0,
    gemm_fill_s=0.0,
    wave_quantisation=0.0,
    kernel_gap_s=0.0,
    misaligned_slowdown=1.0,
    moe_gemm_ratio=1.0,
    hbm_efficiency=1e6,
)


def check_sum(unit: UnitSeconds) -> None:
    total = sum(unit.parts.values())
    np.testing.assert_allclose(total, unit.total, rtol=1e-12)
    passes = unit.forward + unit.recompute + unit.backward_input + unit.backward_weight
    np.testing.assert_allclose(passes, unit.total, rtol=1e-12)
    for seconds in (unit.forward, unit.recompute, unit.backward_input, unit.backward_weight):
        assert np.all(seconds >= 0)


@pytest.mark.parametrize("model", ["gpt-3-175b", "llama-3-8b", "deepseek-v3", "mixtral-8x7b"])
@pytest.mark.parametrize("constants", [Constants(), Constants(host_layer_s=1.0)])
def test_the_parts_sum(model: str, constants: Constants) -> None:
    spec = load_model(model)
    strategy = Strategy.filled(
        sequence_length=4096,
        tp=np.array([1.0, 2.0, 8.0]),
        cp=np.array([1.0, 2.0, 2.0]),
        ep=np.array([1.0, 4.0, 8.0]),
        recompute_gemm=np.array([0.0, 1.0, 0.5]),
        recompute_attention=1.0,
        sequence_parallel=1.0,
    )
    for index, block in enumerate(spec.blocks):
        shape = Shape.of(spec, index)
        expert = block.moe is not None
        check_sum(block_seconds(shape, strategy, MACHINE, constants, expert=expert))
    check_sum(head_seconds(shape, strategy, MACHINE, constants))
    check_sum(embedding_seconds(shape, strategy, MACHINE, constants))


@pytest.mark.parametrize(
    ("model", "tp"),
    [("gpt-3-175b", 8), ("llama-3-8b", 1), ("llama-3.1-405b", 4), ("mixtral-8x7b", 1)],
)
def test_the_products_are_the_models(model: str, tp: int) -> None:
    spec = load_model(model)
    expert = spec.blocks[0].moe is not None
    shape = Shape.of(spec, 0)
    strategy = Strategy.filled(sequence_length=4096, tp=tp)
    work = Workload(sequence_length=4096, tp=tp)
    kinds = (OperatorKind.GEMM, OperatorKind.GROUPED_GEMM)
    operators = [
        o for o in unit_operators(spec, 1, work) if o.kind in kinds and o.name != "moe.router"
    ]
    found = block_seconds(shape, strategy, MACHINE, IDEAL, expert=expert).parts["gemm"]
    flops = sum(o.forward.flops + o.backward.flops for o in operators)
    assert float(found) * 312e12 == pytest.approx(flops, rel=1e-6)
    (logits,) = (o for o in unit_operators(spec, spec.head_unit, work) if o.name == "logits")
    head = head_seconds(shape, strategy, MACHINE, IDEAL).parts["gemm"]
    head_flops = logits.forward.flops + logits.backward.flops
    assert float(head) * 312e12 == pytest.approx(head_flops, rel=0.02)  # its last tile is part full


def test_latent_attention_has_its_low_ranks() -> None:
    spec = load_model("deepseek-v3")
    shape = Shape.of(spec, 0)
    assert (float(shape.q_lora), float(shape.kv_lora), float(shape.rope_dim)) == (1536, 512, 64)
    found = block_seconds(shape, Strategy.filled(sequence_length=4096), MACHINE, IDEAL)
    work = Workload(sequence_length=4096)
    gemms = [o for o in unit_operators(spec, 1, work) if o.kind is OperatorKind.GEMM]
    flops = sum(o.forward.flops + o.backward.flops for o in gemms)
    assert float(found.parts["gemm"]) * 312e12 == pytest.approx(flops, rel=0.02)


def test_the_launch_floor_holds() -> None:
    spec = load_model("gpt2")
    tiny = Strategy.filled(sequence_length=128)
    unit = block_seconds(Shape.of(spec, 0), tiny, MACHINE, Constants())
    assert float(unit.forward) >= 5e-4
    assert float(unit.backward) >= 1.3 * 5e-4
    assert float(unit.parts["launch"]) > 0.5 * float(unit.total)


def test_unfused_attention_takes_longer_to_issue() -> None:
    shape = Shape.of(load_model("gpt-3-175b"), 0)
    slow = Constants(host_layer_s=1.0)  # all there is
    fused, unfused = (
        block_seconds(shape, Strategy.filled(sequence_length=2048, flash=flash), MACHINE, slow)
        for flash in (1.0, 0.0)
    )
    assert float(fused.forward) == pytest.approx(1.0, rel=0.01)
    assert float(unfused.forward) == pytest.approx(1.8, rel=0.01)


def test_more_tensor_parallelism_computes_less_and_sends() -> None:
    shape = Shape.of(load_model("gpt-3-175b"), 0)
    strategy = Strategy.filled(sequence_length=2048, tp=np.array([1.0, 2.0, 4.0, 8.0]))
    parts = block_seconds(shape, strategy, MACHINE, Constants()).parts
    assert np.all(np.diff(parts["gemm"]) < 0)
    assert parts["tensor parallel"][0] == 0
    assert np.all(np.diff(parts["tensor parallel"]) > 0)


def test_the_optimizer_streams_its_states() -> None:
    seconds = optimizer_seconds(1e9, MACHINE, Constants())
    assert seconds == pytest.approx(1e9 * 40 / (0.8 * 2e12) + 20 * 4e-6 + 5e-3)


def test_a_machine_from_a_cluster() -> None:
    cluster = Cluster.load("nvl72")
    pool = cluster.pools[0]
    machine = Machine.of(cluster, pool, Dtype.FP8)
    chip = pool.chip
    assert float(machine.peak) == chip.peak_flops(Dtype.BF16) * chip.sustained
    assert float(machine.chips_per_node) == 72
    assert float(machine.link) == 900e9
    mixed = Cluster.load("laptop")
    assert float(Machine.of(mixed, mixed.pools[0], Dtype.BF16).nic) >= 1


def cut(sequences: float, chunks: object, **columns: object) -> UnitSeconds:
    shape = Shape.of(load_model("llama-2-70b"), 0)
    strategy = Strategy.filled(
        sequence_length=4096, sequences=sequences, tp=8, overlap_chunks=chunks, **columns
    )
    return block_seconds(shape, strategy, MACHINE, Constants())


@pytest.mark.parametrize("paired", [0.0, 1.0])
def test_chunks_pay_on_large_shapes_and_cost_on_small_ones(paired: float) -> None:
    chunks = np.array([1.0, 2.0, 4.0])
    large = cut(4.0, chunks, sequence_parallel=paired)
    check_sum(large)
    assert np.all(np.diff(large.total) < 0)
    small = cut(1 / 64, chunks, sequence_parallel=paired)
    check_sum(small)
    assert np.all(np.diff(small.total) > 0)


def test_what_chunks_expose_is_the_first_piece_and_what_products_do_not_hide() -> None:
    """Products that never end hide all but one piece; products that take no time hide nothing."""
    shape, latency = Shape.of(load_model("llama-2-70b"), 0), 4.5e-5
    strategy = Strategy.filled(sequence_length=4096, tp=8, overlap_chunks=4, sequence_parallel=1)
    moved = 4096 * 8192 * 2 * 7 / 8 / (0.78 * 300e9)
    slow = block_seconds(shape, strategy, MACHINE, Constants(gemm_efficiency=1e-3))
    piece = latency + moved / 4
    assert slow.parts["tensor parallel"] == pytest.approx(8 * piece)
    fast = Constants(gemm_efficiency=1e9, hbm_efficiency=1e9, kernel_gap_s=0.0, gemm_fill_s=0.0)
    quick = block_seconds(shape, strategy, MACHINE, fast)
    again = 2 * (latency + moved)  # two inputs are gathered once more for the weights' gradients
    assert quick.parts["tensor parallel"] == pytest.approx(8 * 4 * piece + again, rel=1e-4)


def test_the_chunks_of_one_chip_change_nothing() -> None:
    shape = Shape.of(load_model("llama-3-8b"), 0)
    strategy = Strategy.filled(sequence_length=4096, overlap_chunks=np.array([1.0, 4.0]))
    found = block_seconds(shape, strategy, MACHINE, Constants()).total
    assert found[0] == found[1]


def test_shared_experts_hide_the_ways_to_the_others() -> None:
    shape = Shape.of(load_model("deepseek-v3"), 1)
    strategy = Strategy.filled(sequence_length=4096, ep=64, shared_beside=np.array([0.0, 1.0]))
    found = block_seconds(shape, strategy, MACHINE, Constants(), expert=True)
    check_sum(found)
    exposed, hidden = found.parts["expert parallel"]
    assert 0 < hidden < exposed
    slow = block_seconds(shape, strategy, MACHINE, Constants(gemm_efficiency=1e-4), expert=True)
    assert slow.parts["expert parallel"][1] == 0
    none = replace(shape, shared_ffn=np.zeros(()))
    same = block_seconds(none, strategy, MACHINE, Constants(), expert=True).parts["expert parallel"]
    assert same[0] == same[1] == exposed


def test_a_ring_hides_behind_long_attention_and_a_gather_has_one_latency() -> None:
    shape = Shape.of(load_model("llama-3-8b"), 0)
    strategy = Strategy.filled(
        sequence_length=np.array([[1024.0], [262144.0]]),
        cp=8,
        context_gather=np.array([0.0, 1.0]),
    )
    found = block_seconds(shape, strategy, MACHINE, Constants())
    check_sum(found)
    (short_ring, short_gather), (long_ring, long_gather) = found.parts["context parallel"]
    assert short_gather < short_ring
    assert long_ring == 0 < long_gather
