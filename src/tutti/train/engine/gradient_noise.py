"""The gradient's noise scale: the batch at which its noise is as large as the gradient itself.

AdamW's moments tell it without another pass. With G the mean gradient and σ² the variance of a
batch's, both added up over all elements, the mean square of gradients is G² + σ², and the square of
their mean over so many steps G² + c·σ², where c is what the mean leaves of the variance. Batches
much below σ²/G² · batch gain nearly all from being larger, those much above nearly nothing
(McCandlish et al. 2018, "B_simple"). What is measured lags behind by as many steps as the moments
remember, and takes the gradient for constant that long. Every plan adds up the same elements.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tutti.accelerator.accelerator import Accelerator
from tutti.train.state.state import SpanState
from tutti.train.sync.synchronise import NORM_ELEMENTS


def moment_sums(
    states: Iterable[SpanState], pipeline: int, accelerator: Accelerator
) -> dict[str, Tensor]:
    """Return the sums over this rank's elements of mean² and of squares, each element once.

    The sums are on the chip, wherever the moments are.
    """
    means = torch.zeros((), dtype=torch.float64, device=accelerator.device)
    squares = torch.zeros_like(means)
    for state in states:
        if state.span.copied or (state.level >= 2 and pipeline != 0):
            continue  # its owner, or the first pipeline, speaks for all
        wanted, first = state.span.own(state.rank), state.kept.start
        own = slice(wanted.start - first, wanted.stop - first)
        state.optimizer.settle()
        mean, square = state.optimizer.numbers("mean"), state.optimizer.numbers("square")
        assert mean is not None, "jobs of other optimizers are refused"
        assert square is not None
        for part in mean[own].split(NORM_ELEMENTS):
            means += part.double().square().sum().to(accelerator.device)
        for part in square[own].split(NORM_ELEMENTS):
            squares += part.double().sum().to(accelerator.device)
    return {"means": means, "squares": squares}


def noise_scale(
    means: float, squares: float, *, updates: int, beta1: float, beta2: float
) -> float | None:
    """Return σ²/G², in batches, from the moments' sums after so many updates.

    None where they do not tell: too few updates, or no gradient beside the noise.
    """
    if updates < 2 or not squares > 0:
        return None
    seen = 1.0 - beta1**updates
    left = (1.0 - beta1) * (1.0 + beta1**updates) / ((1.0 + beta1) * seen)
    mean, square = means / seen**2, squares / (1.0 - beta2**updates)
    gradient = (mean - left * square) / (1.0 - left)
    return (square - gradient) / gradient if gradient > 0 else None
