"""The factor of gradients, computed where they are, is what the host would compute."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tutti.accelerator.devices.cpu import CpuAccelerator
from tutti.ranks.links import Links
from tutti.train.engine.step_totals import LateSums, StepSums, gradient_factor, joined

ALONE: Links = None  # type: ignore[assignment]  # one rank talks to nobody


def scalars(square: float, tokens: float, loss: float = 7.0) -> torch.Tensor:
    named = {
        "square": square, "tokens": tokens, "count": tokens, "loss": loss, "balance": 0.0,
        "signals": 1.0,
    }  # fmt: skip
    return joined(ALONE, 1, {k: torch.tensor(v, dtype=torch.float64) for k, v in named.items()})


def on_the_host(sums: StepSums, loss_factor: float, clip: float | None) -> float:
    result = sums.result(loss_factor)
    if result.skipped:
        return math.nan
    scale = 1.0 / (max(result.tokens, 1) * loss_factor)
    if clip is None or not result.gradient_norm > clip:
        return scale
    return scale * clip / result.gradient_norm


@given(
    square=st.floats(0, 1e30),
    tokens=st.integers(0, 10**9),
    power=st.integers(-24, 16),
    clip=st.none() | st.floats(1e-3, 1e3),
)
def test_the_factor_is_the_hosts(square: float, tokens: int, power: int, clip: float) -> None:
    given_sums, loss_factor = scalars(square, tokens), 2.0**power
    late = LateSums(CpuAccelerator())
    late.send(given_sums)
    wanted = on_the_host(late.read(), loss_factor, clip)
    found = gradient_factor(given_sums, loss_factor, clip)
    assert found.dtype is torch.float32
    assert torch.equal(found, torch.tensor(wanted, dtype=torch.float64).float())


@pytest.mark.parametrize("square", [math.inf, math.nan])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_what_is_not_finite_is_not_a_factor(square: float, clip: float | None) -> None:
    assert gradient_factor(scalars(square, 4.0), 1.0, clip).isnan()
    assert gradient_factor(scalars(9.0, 4.0, loss=square), 1.0, clip).isnan()
    late = LateSums(CpuAccelerator())
    late.send(scalars(9.0, 4.0, loss=square))
    assert late.read().result(1.0).skipped


def test_sums_arrive_as_they_were_sent() -> None:
    late = LateSums(CpuAccelerator())
    late.send(scalars(9.0, 3.0))
    result = late.read().result(1.0)
    assert (result.gradient_norm, result.tokens, result.loss) == (1.0, 3, 7.0 / 3.0)
    assert (result.signals, result.skipped) == (1, False)
