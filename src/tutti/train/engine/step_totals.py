"""What a step came to: losses, tokens and the gradients' norm, joined over all ranks at once.

This is the one reduction that crosses all ranks (the ClipNorm instruction). Everybody then knows
the same numbers: the divisor of the gradients, whether they are clipped, and whether they are not
finite, so that nobody updates. The chip knows them in time for the optimizer; the host reads them
once, when it has nothing left to issue.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tutti.accelerator.accelerator import Accelerator, Event
from tutti.nn.batch import Batch
from tutti.ranks.links import Links


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step came to, the same on every rank."""

    loss: float  # mean over the step's tokens
    balance: float
    tokens: int
    gradient_norm: float
    skipped: bool  # numbers overflowed: nothing was updated
    signals: int = 0  # ranks that asked for something, such as to stop


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSums:
    """The sums of one rank, or of all: of squared gradients, tokens and losses."""

    square: float
    tokens: float
    loss: float
    balance: float
    signals: float

    def result(self, loss_factor: float) -> StepResult:
        """Return the means, of gradients that were made for `loss_factor` times the loss."""
        count = max(self.tokens, 1.0)
        norm = math.sqrt(self.square) / (count * loss_factor)
        return StepResult(
            loss=self.loss / count,
            balance=self.balance / count,
            tokens=int(self.tokens),
            gradient_norm=norm,
            skipped=not math.isfinite(norm) or not math.isfinite(self.loss),
            signals=int(self.signals),
        )


_NAMES = tuple(f.name for f in fields(StepSums))


def counted_tokens(batch: Batch) -> Tensor:
    """Return how many tokens of a batch have a loss."""
    assert batch.targets_t is not None, "the batch of a last stage has targets"
    counted = batch.targets_t >= 0
    if batch.weights_t is not None:
        counted = counted & (batch.weights_t != 0)
    return counted.sum()  # stays on the chip: nobody waits for it


def joined(links: Links, num_ranks: int, parts: Mapping[str, Tensor]) -> Tensor:
    """Return the sums over all ranks of the parts, in the order of `Sums`, where the parts are."""
    scalars = torch.stack([parts[name].double() for name in _NAMES])
    if num_ranks > 1:
        links.all_reduce(tuple(range(num_ranks)), scalars, use="scalars").wait()
    return scalars


class LateSums:
    """Sums on their way to the host, which asks for them as late as it can."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._host = accelerator.pinned((len(_NAMES),), torch.float64)
        self._copied: Event | None = None

    def send(self, scalars: Tensor) -> None:
        """Begin to copy what `joined` returned."""
        self._host.copy_(scalars, non_blocking=self._host.is_pinned())
        self._copied = self._accelerator.event()
        self._copied.record()

    def read(self) -> StepSums:
        """Wait for the copy."""
        assert self._copied is not None, "nothing was sent"
        self._copied.synchronize()
        return StepSums(**dict(zip(_NAMES, self._host.tolist(), strict=True)))


def gradient_factor(scalars: Tensor, loss_factor: float, clip_norm: float | None) -> Tensor:
    """Return what gradients are multiplied by on their way into the optimizer, on their device.

    It is not a number where loss or norm is not finite: then nothing is to be updated.
    """
    square, tokens = scalars[_NAMES.index("square")], scalars[_NAMES.index("tokens")]
    divisor = tokens.clamp_min(1.0) * loss_factor
    factor, norm = 1.0 / divisor, square.sqrt() / divisor
    if clip_norm is not None:
        factor = torch.where(norm > clip_norm, factor * clip_norm / norm, factor)
    finite = norm.isfinite() & scalars[_NAMES.index("loss")].isfinite()
    return torch.where(finite, factor, math.nan).float()
