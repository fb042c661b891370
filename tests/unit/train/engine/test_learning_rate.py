"""The learning rate of every step."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.train.engine.learning_rate import LearningRate
from tutti.train.run.config import OptimizerConfig

KINDS = ("constant", "linear", "cosine", "stable")


@given(
    kind=st.sampled_from(KINDS),
    steps=st.integers(1, 60),
    warmup=st.integers(0, 20),
    decay=st.integers(0, 30),
    final=st.floats(0, 1),
)
def test_up_and_then_never_up_again(
    kind: str, steps: int, warmup: int, decay: int, final: float
) -> None:
    rates = LearningRate(
        peak=2.0, kind=kind, steps=steps, warmup=warmup, decay=decay, final_share=final
    )  # type: ignore[arg-type]
    up = [rates.at(step) for step in range(1, warmup + 1)]
    assert up == pytest.approx([2.0 * step / warmup for step in range(1, warmup + 1)])
    down = [rates.at(step) for step in range(warmup + 1, warmup + steps + 5)]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(down))
    assert all(2.0 * final - 1e-9 <= rate <= 2.0 + 1e-9 for rate in down)


@pytest.mark.parametrize("kind", ["linear", "cosine", "stable"])
def test_the_last_step_has_the_final_rate(kind: str) -> None:
    rates = LearningRate(peak=1.0, kind=kind, steps=50, warmup=5, decay=10, final_share=0.2)  # type: ignore[arg-type]
    assert rates.at(50) == pytest.approx(0.2)
    assert rates.at(5) == 1.0
    assert rates.at(60) == pytest.approx(0.2)


def test_halfway() -> None:
    def half(kind: str, step: int) -> float:
        return LearningRate(peak=1.0, kind=kind, steps=100, decay=20, final_share=0.0).at(step)  # type: ignore[arg-type]

    assert half("linear", 25) == pytest.approx(0.75)
    assert half("cosine", 50) == pytest.approx(0.5)
    assert half("cosine", 25) == pytest.approx(0.8535533906)
    assert [half("stable", step) for step in (80, 90, 95)] == pytest.approx([1.0, 0.5, 0.25])
    assert half("constant", 100) == 1.0


def test_stable_decays_over_the_last_tenth_unless_said() -> None:
    assert OptimizerConfig(schedule="stable").rates(200).decay == 20
    assert OptimizerConfig(schedule="stable", decay_steps=3).rates(200).decay == 3
