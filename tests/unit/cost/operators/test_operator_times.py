"""Seconds of operators: by hand, in the limits, monotone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.cost.arrays import Machine, Shape, Strategy
from tutti.cost.constants import Constants
from tutti.cost.operators.operator_times import (
    alignment_rate,
    attention_seconds,
    gemm_seconds,
    linear_seconds,
    memory_bound_seconds,
    smooth_max,
)

A100 = Machine.filled(peak=312e12, memory_bandwidth=2.039e12, compute_units=108, link=300e9)
CONSTANTS = Constants()
SHAPE = Shape.filled(
    hidden=4096, heads=32, kv_heads=32, d_qk=128, d_v=128, ffn=11008, vocab=32000, head_vocab=32000
)


def test_a_product_by_hand() -> None:
    # 16 × 18 tiles of 128 × 256 over 108 units: 2⅔ waves, 0.9 of the missing third is paid.
    waves = 288 / 108 + 0.9 * (3 - 288 / 108)
    fill = 3.5e-6 * (312e12 / 108) / (2 * 128 * 256)
    by_hand = waves * 2 * 128 * 256 * (12288 + fill) / (0.85 * 312e12 / 108) + 4e-6
    assert gemm_seconds(2048, 4608, 12288, A100, CONSTANTS) == pytest.approx(by_hand, rel=1e-12)


def test_a_thin_product_is_bound_by_memory() -> None:
    num_bytes = 2 * (1 * 8192 + 8192 * 8192 + 1 * 8192)
    seconds = gemm_seconds(1, 8192, 8192, A100, Constants(gemm_fill_s=0.0))
    compute = gemm_seconds(1, 8192, 8192, A100, Constants(gemm_fill_s=0.0, hbm_efficiency=1e9))
    assert seconds == max(compute, num_bytes / (0.8 * 2.039e12) + 4e-6)


def test_a_huge_product_reaches_its_efficiency() -> None:
    n = 1 << 17
    assert 2 * n**3 / gemm_seconds(n, n, n, A100, CONSTANTS) == pytest.approx(
        0.85 * 312e12, rel=3e-3
    )


def test_alignment() -> None:
    assert alignment_rate(50304, 1024, CONSTANTS) == 1
    assert alignment_rate(50257, 1024, CONSTANTS) == pytest.approx(1 / 3)
    assert alignment_rate(25130, 1024, CONSTANTS) == pytest.approx(1 / (1 + 0.33 * 2))


@given(st.integers(1, 1 << 16), st.integers(1, 1 << 14), st.integers(1, 1 << 14))
def test_a_deeper_product_takes_longer(m: int, n: int, k: int) -> None:
    one, two = (gemm_seconds(m, n, depth, A100, CONSTANTS) for depth in (k, 2 * k))
    assert 0 < one < two


@given(st.integers(1, 4096), st.integers(1, 4096))
def test_a_faster_chip_is_no_slower(m: int, n: int) -> None:
    fast = Machine.filled(peak=624e12, memory_bandwidth=4e12, compute_units=108, link=300e9)
    assert gemm_seconds(m, n, 4096, fast, CONSTANTS) <= gemm_seconds(m, n, 4096, A100, CONSTANTS)


def test_a_linear_layer_is_three_products() -> None:
    strategy = Strategy.filled(sequence_length=2048)
    passes = linear_seconds(2048, 4096, 1024, strategy, A100, CONSTANTS)
    assert passes.forward == gemm_seconds(2048, 4096, 1024, A100, CONSTANTS)
    assert passes.backward_input == gemm_seconds(2048, 1024, 4096, A100, CONSTANTS)
    assert passes.backward_weight == gemm_seconds(1024, 4096, 2048, A100, CONSTANTS)


def test_fp8_is_faster_and_pays_for_casts() -> None:
    plain = linear_seconds(8192, 8192, 8192, Strategy.filled(sequence_length=1), A100, CONSTANTS)
    narrow = Strategy.filled(sequence_length=1, fp8=1)
    no_casts = Constants(fp8_cast_bytes=0.0)
    fast = linear_seconds(8192, 8192, 8192, narrow, A100, no_casts)
    real = linear_seconds(8192, 8192, 8192, narrow, A100, CONSTANTS)
    assert fast.forward < real.forward < plain.forward
    ratio = (plain.forward - 4e-6) / (fast.forward - 4e-6)
    assert ratio == pytest.approx(CONSTANTS.fp8_speedup)


def test_memory_bound_kernels() -> None:
    seconds = memory_bound_seconds(2.039e12 * 0.8, A100, CONSTANTS, kernels=3)
    assert seconds == pytest.approx(1 + 3 * 4e-6)


@pytest.mark.parametrize("flash", [0.0, 1.0])
def test_attention_by_sequence(flash: float) -> None:
    lengths = 2.0 ** np.arange(9, 16)
    strategy = Strategy.filled(sequence_length=lengths, flash=flash)
    forward, backward = attention_seconds(SHAPE, strategy, A100, CONSTANTS)
    assert np.all(np.diff(forward) > 0)
    assert np.all(backward > forward)
    assert forward[-1] / forward[-2] == pytest.approx(4, rel=0.02)  # quadratic at last


def test_a_window_bounds_attention() -> None:
    windowed = Shape.filled(
        **{n: getattr(SHAPE, n) for n in ("hidden", "heads", "kv_heads", "d_qk", "d_v", "ffn")},
        vocab=32000,
        head_vocab=32000,
        window=1024,
    )
    long = Strategy.filled(sequence_length=np.array([1024.0, 65536.0, 131072.0]))
    near, far = (attention_seconds(s, long, A100, CONSTANTS)[0] for s in (windowed, SHAPE))
    assert near[0] == far[0]
    assert near[2] / near[1] == pytest.approx(2, rel=0.01)
    assert far[2] / far[1] == pytest.approx(4, rel=0.01)


def test_mixed_kernels_price_each_by_itself() -> None:
    both = Strategy.filled(sequence_length=2048, flash=np.array([0.0, 1.0]))
    together = attention_seconds(SHAPE, both, A100, CONSTANTS)
    for i in (0, 1):
        alone = attention_seconds(SHAPE, both.take(np.array([i])), A100, CONSTANTS)
        assert together[0][i] == alone[0]
        assert together[1][i] == alone[1]


@given(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3))
def test_smooth_max(a: float, b: float) -> None:
    found = float(smooth_max(np.asarray(a), np.asarray(b)))
    assert max(a, b) * (1 - 1e-12) <= found <= 2**0.25 * max(a, b) * (1 + 1e-12)
