"""Head and cross-entropy in chunks of tokens: one chunk's logits at a time, in the model's dtype.

Per chunk: one product makes the logits; a kernel reads each row for its largest logit and its sum
of exponentials and, while the row is still in the cache, replaces each logit by its gradient; two
products carry it to x and to the weight. Where the vocabulary is sliced, the ranks join the rows'
figures between two kernels. Each chunk but the first adds to the weight's gradient, which is as
large as the weight: few, large chunks are what makes it fast. Products of rows that are no multiple
of 16 bytes take several times as long: a vocabulary of an odd size is filled up with zeros, whose
logits and gradients nobody reads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tutti.accelerator.cuda.common import power_of_two, reason_against
from tutti.accelerator.reference.loss import Vocabulary
from tutti.accelerator.registry import Implementation
from tutti.models.operators import LOGIT_CHUNK_BYTES

TILE_ROWS = 256  # of the largest tiles that products are made of; fewer rows make them slow
BLOCK = 8192
AT_ONCE = tl.constexpr(4)  # logits that a lane takes
EVEN = 16  # entries of a vocabulary that is multiplied as it is


@triton.jit
def _shaped(logits, inverse_divisor, soft_cap, CAPPED: tl.constexpr):
    """Return the logits as the loss sees them: divided, and capped by a tanh."""
    values = logits * inverse_divisor
    if CAPPED:
        values = soft_cap * (2.0 * tl.sigmoid(2.0 * values / soft_cap) - 1.0)
    return values


@triton.jit
def _scan(base, vocab, inverse_divisor, soft_cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest logit of a row, and its sum of exponentials relative to that.

    A lane takes several logits at a time: its sum so far is brought to a new largest one only once
    for all of them.
    """
    LANES: tl.constexpr = BLOCK // AT_ONCE
    sums = tl.zeros((LANES,), tl.float32)
    tops = tl.full((LANES,), float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, AT_ONCE)[:, None] * LANES + tl.arange(0, LANES)[None, :]
        inside = columns < vocab
        values = tl.load(base + columns, mask=inside, other=float("-inf")).to(tl.float32)
        values = tl.where(inside, _shaped(values, inverse_divisor, soft_cap, CAPPED), float("-inf"))
        new = tl.maximum(tops, tl.max(values, 0))
        # a lane that has seen nothing yet keeps a sum of zero
        safe = tl.where(new == float("-inf"), 0.0, new)
        sums = sums * tl.exp(tops - safe) + tl.sum(tl.exp(values - safe[None, :]), 0)
        tops = new
    top = tl.max(tops, axis=0)
    return top, tl.sum(sums * tl.exp(tops - top), axis=0)


@triton.jit
def _chosen(base, own, vocab, inverse_divisor, soft_cap, CAPPED: tl.constexpr):
    """Return the target's logit; zero where the target is not in this part of the vocabulary."""
    here = (own >= 0) & (own < vocab)
    value = tl.load(base + own, mask=here, other=0.0).to(tl.float32)
    return tl.where(here, _shaped(value, inverse_divisor, soft_cap, CAPPED), 0.0)


@triton.jit
def _replace(
    base, columns, own, lse, share, vocab, inverse_divisor, soft_cap, CAPPED: tl.constexpr
):  # fmt: skip
    """Replace some logits of a row by their gradients."""
    inside = columns < vocab
    values = tl.load(base + columns, mask=inside, other=0.0).to(tl.float32)
    values = _shaped(values, inverse_divisor, soft_cap, CAPPED)
    gradient = (tl.exp(values - lse) - tl.where(columns == own, 1.0, 0.0)) * share
    if CAPPED:
        part = values / soft_cap
        gradient = gradient * (1.0 - part * part)
    tl.store(base + columns, gradient * inverse_divisor, mask=inside)


@triton.jit
def _whole_rows(
    logits, targets, losses, shares, row_stride, vocab, inverse_divisor, soft_cap,
    CAPPED: tl.constexpr, GRADIENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * row_stride
    own = tl.load(targets + row)
    top, whole = _scan(base, vocab, inverse_divisor, soft_cap, CAPPED, BLOCK)
    lse = top + tl.log(whole)
    value = _chosen(base, own, vocab, inverse_divisor, soft_cap, CAPPED)
    tl.store(losses + row, tl.where(own >= 0, lse - value, 0.0))
    if GRADIENTS:
        tl.debug_barrier()  # every thread has read the target's logit before it is replaced
        share = tl.load(shares + row)
        for start in range(0, vocab, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            _replace(base, columns, own, lse, share, vocab, inverse_divisor, soft_cap, CAPPED)


@triton.jit
def _statistics(
    logits, targets, largest, total, chosen, row_stride, vocab, first, inverse_divisor, soft_cap,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * row_stride
    top, whole = _scan(base, vocab, inverse_divisor, soft_cap, CAPPED, BLOCK)
    own = tl.load(targets + row) - first
    tl.store(largest + row, top)
    tl.store(total + row, whole)
    tl.store(chosen + row, _chosen(base, own, vocab, inverse_divisor, soft_cap, CAPPED))


@triton.jit
def _gradients(
    logits, targets, lse, shares, row_stride, vocab, first, inverse_divisor, soft_cap,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(targets + row) - first
    _replace(
        logits + row * row_stride, columns, own, tl.load(lse + row), tl.load(shares + row), vocab,
        inverse_divisor, soft_cap, CAPPED,
    )  # fmt: skip


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        token_weights: Tensor | None,
        divisor: float,
        soft_cap: float | None,
        vocabulary: Vocabulary | None,
        gradient_scale: float,
        starts_backward: bool,
        with_gradients: bool,
    ) -> tuple[Tensor, Tensor]:
        chunk = _Chunk(weight, bias, divisor, soft_cap, vocabulary)
        needs_x = with_gradients and x.requires_grad
        needs_weight = with_gradients and weight.requires_grad
        needs_bias = with_gradients and bias is not None and bias.requires_grad
        losses = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        shares = (targets >= 0).to(torch.float32) * gradient_scale
        if token_weights is not None:
            shares = shares * token_weights
        grad_x = torch.empty_like(x) if needs_x else None
        grad_weight: Tensor | None = None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None  # type: ignore[arg-type]
        rows = rows_per_chunk(x.shape[0], chunk.weight)
        for first in range(0, x.shape[0], rows):
            own = slice(first, first + rows)
            needed = needs_x or needs_weight or needs_bias
            logits = chunk.run(x[own], targets[own], losses[own], shares[own] if needed else None)
            if not needed:
                continue
            if grad_x is not None:
                torch.mm(logits, chunk.weight, out=grad_x[own])
            if needs_weight:
                if grad_weight is None:
                    grad_weight = logits.t() @ x[own]
                else:
                    grad_weight.addmm_(logits.t(), x[own])
            if grad_bias is not None:
                grad_bias += logits[:, : chunk.vocab].sum(0, dtype=torch.float32)
            del logits  # before the next chunk's are made
        ctx.gradients = (
            grad_x,
            None if grad_weight is None else grad_weight[: chunk.vocab],
            None if grad_bias is None else grad_bias.to(weight.dtype),
        )
        ctx.gradient_scale, ctx.starts_backward = gradient_scale, starts_backward
        ctx.mark_non_differentiable(losses)
        total = losses.sum() if token_weights is None else (losses * token_weights).sum()
        return total, losses

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        if ctx.starts_backward:  # once: the tensors themselves are handed on
            grads, ctx.gradients = ctx.gradients, (None, None, None)
        else:
            factor = gradients[0] / ctx.gradient_scale
            grads = tuple(
                None if gradient is None else gradient * factor.to(gradient.dtype)
                for gradient in ctx.gradients
            )
        return (*grads, *([None] * 8))


def rows_per_chunk(tokens: int, weight: Tensor) -> int:
    """Return how many tokens' logits are held at once: about equal chunks, of whole tiles.

    Products compute whole tiles: seven chunks of 1,176 rows would compute 1,280 each.
    """
    most = max(TILE_ROWS, LOGIT_CHUNK_BYTES // (weight.shape[0] * weight.element_size()))
    if tokens <= most:
        return tokens
    equal = -(-tokens // -(-tokens // most))
    return min(-(-equal // TILE_ROWS), most // TILE_ROWS) * TILE_ROWS


def _filled_up(weight: Tensor) -> Tensor:
    """Return a weight or bias with rows of zeros up to an even number."""
    missing = -weight.shape[0] % EVEN
    if not missing:
        return weight
    return torch.cat((weight, weight.new_zeros(missing, *weight.shape[1:])))


class _Chunk:
    """The loss of some rows, and the gradient of their logits."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        divisor: float,
        soft_cap: float | None,
        vocabulary: Vocabulary | None,
    ) -> None:
        self.vocab, self.vocabulary = weight.shape[0], vocabulary
        self.weight = _filled_up(weight)
        self.bias = None if bias is None else _filled_up(bias)
        self.options = (1.0 / divisor, 1.0 if soft_cap is None else soft_cap)
        self.capped = soft_cap is not None
        self.first = 0 if vocabulary is None else vocabulary.start
        self.block = max(AT_ONCE.value, min(BLOCK, power_of_two(weight.shape[0])))

    def run(self, x: Tensor, targets: Tensor, losses: Tensor, shares: Tensor | None) -> Tensor:
        """Write the rows' losses; return the gradient of their logits where shares are given."""
        if self.bias is None:
            logits = x @ self.weight.t()
        else:
            logits = torch.addmm(self.bias, x, self.weight.t())
        if self.vocabulary is not None:
            self._across_ranks(logits, targets, losses, shares, self.vocabulary)
            return logits
        _whole_rows[(logits.shape[0],)](
            logits, targets, losses, losses if shares is None else shares, logits.stride(0),
            self.vocab, *self.options, CAPPED=self.capped, GRADIENTS=shares is not None,
            BLOCK=self.block, num_warps=8,
        )  # fmt: skip
        return logits

    def _across_ranks(
        self,
        logits: Tensor,
        targets: Tensor,
        losses: Tensor,
        shares: Tensor | None,
        vocabulary: Vocabulary,
    ) -> None:
        count, vocab = logits.shape[0], self.vocab
        statistics = torch.empty((3, count), dtype=torch.float32, device=logits.device)
        _statistics[(count,)](
            logits, targets, *statistics, logits.stride(0), vocab, self.first, *self.options,
            CAPPED=self.capped, BLOCK=self.block, num_warps=8,
        )  # fmt: skip
        largest, total, chosen = statistics.unbind()
        own = largest.clone()
        vocabulary.maximum(largest)
        total *= torch.exp(own - largest)
        vocabulary.total(statistics[1:])
        lse = largest + torch.log(total)
        torch.mul(lse - chosen, targets >= 0, out=losses)
        if shares is None:
            return
        _gradients[(count, triton.cdiv(vocab, self.block))](
            logits, targets, lse, shares, logits.stride(0), vocab, self.first, *self.options,
            CAPPED=self.capped, BLOCK=self.block, num_warps=8,
        )  # fmt: skip


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    token_weights: Tensor | None = None,
    divisor: float = 1.0,
    soft_cap: float | None = None,
    vocabulary: Vocabulary | None = None,
    gradient_scale: float = 1.0,
    starts_backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return Σ weight·loss and each token's loss."""
    result: tuple[Tensor, Tensor] = _LinearCrossEntropy.apply(
        x, weight, bias, targets, token_weights, divisor, soft_cap, vocabulary, gradient_scale,
        starts_backward, torch.is_grad_enabled(),
    )  # fmt: skip
    return result


def _supports(x: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> str | None:
    del targets
    if x.dtype != weight.dtype:
        return "x and weight of different dtypes"
    return reason_against(x, weight, options.get("bias"))


IMPLEMENTATIONS = (
    Implementation(
        operator="linear_cross_entropy", name="triton", function=linear_cross_entropy,
        devices=("cuda",), supports=_supports, rank=20, needs="triton",
    ),
)  # fmt: skip
