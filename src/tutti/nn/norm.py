"""Norms on the residual stream, and on queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.accelerator.reference.narrow import NarrowRows
from tutti.models import NormSpec, QkNormSpec
from tutti.nn.parallel.collectives import total
from tutti.nn.storage import Holder, Maker


class Norm(Holder):
    """RMSNorm or LayerNorm over the last dimension."""

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, make: Maker, name: str, spec: NormSpec) -> None:
        super().__init__()
        self.operators, self.spec = make.operators, spec
        self.hold("weight", make, f"{name}.weight")
        self.hold("bias", make, f"{name}.bias")

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x."""
        spec = self.spec
        if spec.kind == "rms":
            return self.operators.rms_norm(
                x, self.weight, eps=spec.eps, unit_offset=spec.unit_offset
            )
        return self.operators.layer_norm(x, self.factor, self.bias, eps=spec.eps)

    @property
    def factor(self) -> Tensor | None:
        """What a layer norm multiplies by."""
        if self.weight is None or not self.spec.unit_offset:
            return self.weight
        return self.weight + 1.0

    def beside(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of x, and x: their gradients are added on the norm's way back."""
        spec = self.spec
        if spec.kind == "rms":
            return self.operators.add_rms_norm(
                x, None, self.weight, eps=spec.eps, unit_offset=spec.unit_offset
            )
        return self.operators.add_layer_norm(x, None, self.factor, self.bias, eps=spec.eps)

    def after(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and the sum."""
        spec = self.spec
        if spec.kind == "rms":
            return self.operators.add_rms_norm(
                x, residual, self.weight, eps=spec.eps, unit_offset=spec.unit_offset
            )
        return self.operators.add_layer_norm(x, residual, self.factor, self.bias, eps=spec.eps)

    def narrow(self, x: Tensor, added: Tensor | None) -> tuple[NarrowRows, Tensor]:
        """Return the norm of the stream with what is added to it, in 8 bits, and the sum."""
        spec = self.spec
        residual, own = (None, x) if added is None else (x, added)
        return self.operators.narrow_rms_norm(
            own, residual, self.weight, eps=spec.eps, unit_offset=spec.unit_offset
        )

    def on_stream(self, x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the norm of the stream with what is added to it, and the sum."""
        return self.beside(x) if added is None else self.after(added, x)


class HeadNorm(Holder):
    """A norm on queries or keys (T, H, D): each head alone, or across the heads of all ranks."""

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, make: Maker, name: str, spec: QkNormSpec, heads: int) -> None:
        super().__init__()
        self.operators, self.spec, self.parallel = make.operators, spec, make.parallel
        self.heads = heads  # of all ranks together, each counted once
        self.hold("weight", make, f"{name}.weight")
        self.hold("bias", make, f"{name}.bias")

    def forward(self, x_thd: Tensor) -> Tensor:
        """Return the normed heads."""
        span = self.spec.span
        if span == "head":
            return self._normed(x_thd, self.weight, self.bias)
        if span == "heads":
            normed = self._normed(x_thd, None, None)
            if self.weight is not None:
                normed = normed * self.weight.view(x_thd.shape[1:])
            return normed if self.bias is None else normed + self.bias.view(x_thd.shape[1:])
        if self.parallel.tensor.size > 1:
            return self._across_ranks(x_thd)
        normed = self._normed(x_thd.flatten(1), self.weight, self.bias)
        return normed.view(x_thd.shape)

    def _normed(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        norm = self.spec.norm
        if norm.kind == "rms":
            return self.operators.rms_norm(x, weight, eps=norm.eps, unit_offset=norm.unit_offset)
        return self.operators.layer_norm(x, weight, bias, eps=norm.eps)

    def _across_ranks(self, x_thd: Tensor) -> Tensor:
        """Return RMSNorm over the heads of all ranks; only the sums of squares travel."""
        norm, group = self.spec.norm, self.parallel.tensor
        if norm.kind != "rms":
            raise NotImplementedError("a layer norm across heads has no tensor-parallel form")
        copies = group.size * x_thd.shape[1] / self.heads  # ranks that hold the same head
        wide = x_thd.to(torch.promote_types(x_thd.dtype, torch.float32))
        squares = total(wide.square().sum((1, 2), keepdim=True), group)
        mean = squares / (copies * self.heads * x_thd.shape[2])
        normed = (wide * torch.rsqrt(mean + norm.eps)).to(x_thd.dtype)
        if self.weight is None:
            return normed
        weight = self.weight.view(x_thd.shape[1:])
        return normed * (1.0 + weight if norm.unit_offset else weight)
