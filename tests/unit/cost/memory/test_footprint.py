"""Memory of plain strategies: the published formulas, and parts that sum."""

from __future__ import annotations

import numpy as np
import pytest

from tutti.cost.arrays import Shape, Strategy
from tutti.cost.memory.footprint import EAGER_LOGIT_BYTES, activation_bytes, footprint
from tutti.models import load_model

S, B, H, A, T = 2048, 4, 6144, 64, 8
SHAPE = Shape.of(load_model("megatron-22b"), 0)


def kept(**values: float) -> float:
    strategy = Strategy.filled(sequence_length=S, sequences=B, tp=T, flash=0, **values)
    return float(activation_bytes(SHAPE, strategy))


def test_korthikanti() -> None:
    """Korthikanti et al. 2022, equations 1 to 6, per layer."""
    tokens = S * B * H
    scores = 5 * A * S / H
    assert kept() == pytest.approx(tokens * (10 + 24 / T + scores / T), rel=1e-12)
    assert kept(sequence_parallel=1) == pytest.approx(tokens / T * (34 + scores), rel=1e-12)
    selective = kept(sequence_parallel=1, recompute_attention=1)
    assert selective == pytest.approx(tokens * 34 / T, rel=1e-12)
    assert kept(recompute_gemm=1, recompute_attention=1) == pytest.approx(2 * tokens, rel=1e-12)


@pytest.mark.parametrize("model", ["gpt-3-175b", "mixtral-8x7b", "deepseek-v3"])
def test_parts_sum(model: str) -> None:
    spec = load_model(model)
    shape = Shape.of(spec, len(spec.blocks) - 1)
    strategy = Strategy.filled(
        sequence_length=4096,
        tp=8,
        pp=np.array([1.0, 4.0, 8.0, 8.0]),
        dp=8,
        ep=8,
        vpp=np.array([1.0, 1.0, 1.0, 2.0]),
        micro_batches=16,
        shard=np.array([0.0, 1.0, 3.0, 1.0]),
        recompute_gemm=np.array([0.0, 0.5, 1.0, 0.0]),
    )
    found = footprint(shape, strategy)
    total = sum(np.broadcast_to(part, (4,)) for part in found.parts.values())
    np.testing.assert_allclose(total, found.total_bytes, rtol=1e-12)
    assert all(np.all(part >= 0) for part in found.parts.values())
    assert np.all(found.of_process() > found.total_bytes)


def test_sharding_and_recomputation_save() -> None:
    shape = Shape.of(load_model("llama-3-8b"), 0)

    def total(**values: float) -> float:
        strategy = Strategy.filled(sequence_length=8192, dp=8, num_chips=8, **values)
        return float(footprint(shape, strategy).total_bytes)

    assert total() > total(shard=1) > total(shard=3)
    assert total() > total(recompute_gemm=1, recompute_attention=1)
    eager = footprint(
        shape, Strategy.filled(sequence_length=8192, sequences=8), logit_bytes=EAGER_LOGIT_BYTES
    )
    lean = footprint(shape, Strategy.filled(sequence_length=8192, sequences=8))
    assert float(eager.total_bytes) > float(lean.total_bytes)


def test_interleaving_holds_more() -> None:
    def total(vpp: float) -> float:
        strategy = Strategy.filled(sequence_length=2048, pp=8, tp=8, micro_batches=64, vpp=vpp)
        return float(footprint(SHAPE, strategy).total_bytes)

    assert total(2) > total(1)


def test_context_buffers() -> None:
    """A ring holds the next piece of keys and values and of their gradients, a gather all."""
    shape = Shape.of(load_model("llama-3-8b"), 0)
    alone, ring, whole = (
        float(
            footprint(shape, Strategy.filled(sequence_length=65536, **c), logit_bytes=0).parts[
                "transient"
            ]
        )
        for c in ({"cp": 1}, {"cp": 8}, {"cp": 8, "context_gather": 1})
    )
    piece = 2 * 65536 / 8 * 8 * 256
    assert whole - ring == pytest.approx(2 * 7 * piece)
    assert ring < alone
