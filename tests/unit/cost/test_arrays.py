"""From models and clusters to arrays."""

from __future__ import annotations

import numpy as np
import pytest

from tutti.cost.arrays import Machine, Shape, Strategy
from tutti.hardware.chip import Dtype
from tutti.hardware.cluster import Cluster
from tutti.models import load_model


def test_a_dense_model() -> None:
    shape = Shape.of(load_model("llama-3-8b"), 0)
    assert [float(v) for v in (shape.hidden, shape.kv_heads, shape.ffn, shape.gated)] == [
        4096,
        8,
        14336,
        1,
    ]
    assert float(shape.moe_layers) == 0
    assert float(shape.window) == np.inf


def test_a_model_of_dense_and_expert_blocks() -> None:
    spec = load_model("deepseek-v3")
    for index in range(len(spec.blocks)):
        shape = Shape.of(spec, index)
        assert (float(shape.ffn), float(shape.expert_ffn)) == (18432, 2048)
        assert (float(shape.layers), float(shape.moe_layers)) == (61, 58)


def test_windows_are_per_block() -> None:
    spec = load_model("gemma-3-27b")
    windows = {float(Shape.of(spec, i).window) for i in range(len(spec.blocks))}
    assert windows == {1024.0, np.inf}


def test_taking_rows_keeps_what_is_the_same() -> None:
    strategy = Strategy.filled(sequence_length=2048, tp=np.array([1.0, 2.0, 4.0]))
    assert strategy.size == 3
    taken = strategy.take(np.array([2, 0]))
    assert taken.tp.tolist() == [4, 1]
    assert taken.sequence_length.ndim == 0
    assert taken.size == 2
    assert strategy.tokens == 2048


@pytest.mark.parametrize("name", ["small-mixed", "E100", "nvl72", "laptop", "leftovers"])
def test_every_pool_is_a_machine(name: str) -> None:
    cluster = Cluster.load(name)
    for pool in cluster.pools:
        machine = Machine.of(cluster, pool, Dtype.BF16)
        chip = pool.chip
        assert float(machine.peak) == chip.peak_flops(Dtype.BF16, fallback=True) * chip.sustained
        assert float(machine.compute_units) == chip.compute_units
        assert float(machine.nic) > 0
        assert 1 <= float(machine.chips_per_node) <= pool.node.num_chips


def test_tiers_narrow_what_leaves_groups_of_nodes() -> None:
    cluster = Cluster.load("oversubscribed")
    pool = cluster.pools[0]
    machine = Machine.of(cluster, pool, Dtype.BF16)
    assert float(machine.nic) == pytest.approx(pool.node.nic_bandwidth)
    assert (float(machine.leaf_nodes), float(machine.leaf_over)) == (8, 2)
    assert (float(machine.pod_nodes), float(machine.pod_over)) == (16, 4)
    assert machine.has_tiers
    # all of this pool hangs on one leaf group: nothing leaves it
    assert not Machine.of(cluster, cluster.pools[1], Dtype.BF16).has_tiers
