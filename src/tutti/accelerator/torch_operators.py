"""torch's own fused operators where they keep to the reference's precision.

torch's own embedding and layer_norm sum gradients of half precision in float32 on some devices and
in half precision on others, the host among them: there only the wider dtypes go through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.products import HALF
from tutti.accelerator.reference import optimizer
from tutti.accelerator.reference.linear import later_embedding
from tutti.accelerator.reference.optimizer import AdamSettings
from tutti.accelerator.registry import Implementation, register

ROW = 64  # elements that torch's fused update takes alike
SUM_WIDE = ("cuda",)  # where gradients are known to be summed in float32


def _sums_wide(tensor: Tensor, dtype: torch.dtype) -> str | None:
    if dtype in HALF and tensor.device.type not in SUM_WIDE and torch.is_grad_enabled():
        name = str(dtype).removeprefix("torch.")
        return f"torch may sum gradients of {name} in {name} on {tensor.device.type}"
    return None


def embedding(tokens: Tensor, table: Tensor, *, later: WeightGradients | None = None) -> Tensor:
    """Look rows up as the reference does."""
    if later is not None and torch.is_grad_enabled():
        return later_embedding(tokens, table, later, _table_gradient)
    rows = functional.embedding(tokens.clamp_min(0), table)
    return rows.masked_fill((tokens < 0).unsqueeze(-1), 0.0)


def _table_gradient(tokens: Tensor, gradient: Tensor, table: Tensor) -> Tensor:
    """Return the whole gradient of a table, added up in the same order every time."""
    dense: Tensor = torch.ops.aten.embedding_dense_backward(
        gradient, tokens, table.shape[0], -1, False
    )
    return dense


def _supports_embedding(tokens: Tensor, table: Tensor, **_options: Any) -> str | None:
    return _sums_wide(tokens, table.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float) -> Tensor:
    """Normalize as the reference does."""
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor]:
    """Add and normalize as the reference does."""
    total = x if residual is None else x + residual
    return layer_norm(total, weight, bias, eps=eps), total


def _supports_layer_norm(x: Tensor, *_others: Any, **_options: Any) -> str | None:
    return _sums_wide(x, x.dtype)


@torch.no_grad()
def adamw(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    *,
    step: int,
    settings: AdamSettings,
    gradient_factor: Tensor | None = None,
    copies: Sequence[Tensor] | None = None,
) -> None:
    """Move the weights by torch's fused update, each element as any other.

    torch rounds the last few elements of a tensor otherwise than the rest, and ranks may cut it
    differently: so these go through the same path, in rows of their own that are filled up.
    """
    wide = [gradient.to(weights[0].dtype) for gradient in gradients]
    counts = skipped = None
    if gradient_factor is not None:
        wide = list(torch._foreach_mul(wide, gradient_factor))
        counts, skipped = ~gradient_factor.isnan(), gradient_factor.isnan().to(torch.float32)
    moved, by, *moments = (_Even(each) for each in (weights, wide, means, squares))
    steps = [torch.tensor(float(step))] * len(moved.parts)
    torch._fused_adamw_(
        moved.parts, by.parts, moments[0].parts, moments[1].parts, [], steps,
        lr=settings.learning_rate, beta1=settings.beta1, beta2=settings.beta2, eps=settings.eps,
        weight_decay=settings.weight_decay, amsgrad=False, maximize=False, found_inf=skipped,
    )  # fmt: skip
    for own in (moved, *moments):
        own.put_back()
    for copy, weight in zip(copies or (), weights, strict=copies is not None):
        optimizer.put(copy, weight, counts)


class _Even:
    """Tensors as flat parts of whole rows; what is left of each in a row that is filled up."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.flat = [tensor.reshape(-1) for tensor in tensors]  # a copy where it has to be
        self.rests: list[tuple[Tensor, Tensor]] = []  # with the row of each
        self.parts: list[Tensor] = []
        for flat in self.flat:
            size = flat.numel()
            left = size % ROW
            if left < size:
                self.parts.append(flat[: size - left] if left else flat)
            if left:
                rest = flat[size - left :]
                self.rests.append((rest, functional.pad(rest, (0, ROW - left))))
        self.parts += [row for _, row in self.rests]

    def put_back(self) -> None:
        """Let the tensors be what became of their parts."""
        for rest, row in self.rests:
            rest.copy_(row[: rest.numel()])
        for tensor, flat in zip(self.tensors, self.flat, strict=True):
            if tensor.data_ptr() != flat.data_ptr():
                tensor.copy_(flat.view(tensor.shape))


def _supports_adamw(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    **_options: Any,
) -> str | None:
    del gradients
    kinds = {tensor.dtype for tensor in (*weights, *means, *squares)}
    if kinds not in ({torch.float32}, {torch.float64}):
        return "weights and moments of float32, or of float64, only"
    return None


register(
    Implementation(
        operator="adamw",
        name="torch",
        function=adamw,
        devices=("cpu",),
        supports=_supports_adamw,
        rank=1,
    ),
    Implementation(
        operator="embedding", name="torch", function=embedding, supports=_supports_embedding, rank=1
    ),
    Implementation(
        operator="layer_norm",
        name="torch",
        function=layer_norm,
        supports=_supports_layer_norm,
        rank=1,
    ),
    Implementation(
        operator="add_layer_norm",
        name="torch",
        function=add_layer_norm,
        supports=_supports_layer_norm,
        rank=1,
    ),
)
