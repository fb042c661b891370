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

    loss: float  # mean over what is counted: the step's tokens, or its examples
    balance: float
    tokens: int  # with a loss
    count: int  # by which sums are divided: the tokens, or the examples of a loss on answers
    gradient_norm: float
    skipped: bool  # numbers overflowed: nothing was updated
    signals: int = 0  # ranks that asked for something, such as to stop
    margin: float = 0.0  # of answers: how far the chosen are ahead, in the mean
    right: float = 0.0  # the share of examples in which they are
    means: float = 0.0  # sums of the moments before the step, where they were asked for
    squares: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSums:
    """The sums of one rank, or of all: of squared gradients, tokens and losses."""

    square: float
    tokens: float
    count: float
    loss: float
    balance: float
    signals: float
    margin: float = 0.0
    right: float = 0.0
    means: float = 0.0
    squares: float = 0.0

    def result(self, loss_factor: float) -> StepResult:
        """Return the means, of gradients that were made for `loss_factor` times the loss."""
        count = max(self.count, 1.0)
        norm = math.sqrt(self.square) / (count * loss_factor)
        return StepResult(
            loss=self.loss / count,
            balance=self.balance / count,
            tokens=int(self.tokens),
            count=int(self.count),
            gradient_norm=norm,
            skipped=not math.isfinite(norm) or not math.isfinite(self.loss),
            signals=int(self.signals),
            margin=self.margin / count,
            right=self.right / count,
            means=self.means,
            squares=self.squares,
        )


_NAMES = tuple(f.name for f in fields(StepSums))


def counts_of(batch: Batch) -> dict[str, Tensor]:
    """Return how many tokens of a batch have a loss, and what its sums are divided by.

    That is the tokens, or the examples of a loss on answers. Both stay on the chip: nobody waits.
    """
    assert batch.targets_t is not None, "the batch of a last stage has targets"
    has_loss = batch.targets_t >= 0
    if batch.weights_t is not None:
        has_loss = has_loss & (batch.weights_t != 0)
    tokens = has_loss.sum()
    examples = batch.answers
    count = tokens if examples is None else torch.full_like(tokens, examples.count)
    return {"tokens": tokens, "count": count}


def joined(links: Links, num_ranks: int, parts: Mapping[str, Tensor]) -> Tensor:
    """Return the sums over all ranks of the parts, in the order of `Sums`, where the parts are."""
    zero = parts["square"].new_zeros(())
    scalars = torch.stack([parts.get(name, zero).double() for name in _NAMES])
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
    square, count = scalars[_NAMES.index("square")], scalars[_NAMES.index("count")]
    divisor = count.clamp_min(1.0) * loss_factor
    factor, norm = 1.0 / divisor, square.sqrt() / divisor
    if clip_norm is not None:
        factor = torch.where(norm > clip_norm, factor * clip_norm / norm, factor)
    finite = norm.isfinite() & scalars[_NAMES.index("loss")].isfinite()
    return torch.where(finite, factor, math.nan).float()
