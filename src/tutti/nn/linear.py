"""Linear layers: one product for all tensors that are multiplied with the same input."""

from __future__ import annotations

from torch import Tensor

from tutti.accelerator.gradients import WeightGradients
from tutti.nn.collectives import leave
from tutti.nn.storage import Holder, Maker, Sees


class Linear(Holder):
    """x·Wᵀ + b of one or several logical layers, whose outputs stand side by side."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, make: Maker, *names: str, sees: Sees = "own") -> None:
        super().__init__()
        self.operators = make.operators
        self.hold("weight", make, *(f"{name}.weight" for name in names), sees=sees)
        self.hold("bias", make, *(f"{name}.bias" for name in names), sees=sees)
        self.widths = [piece.stop - piece.start for piece in self.pieces["weight"]]

    def forward(self, x: Tensor, later: WeightGradients | None = None) -> Tensor:
        """Return the outputs of all layers."""
        return self.operators.linear(x, self.weight, self.bias, later=later)


class RowLinear(Linear):
    """A layer whose inputs are sliced: the ranks' products are summed, the bias added once."""

    def __init__(self, make: Maker, name: str) -> None:
        super().__init__(make, name)
        self.parallel = make.parallel

    def forward(self, x: Tensor, later: WeightGradients | None = None) -> Tensor:
        """Return the whole output, of this rank's tokens."""
        if self.parallel.tensor.size == 1:
            return super().forward(x, later)
        y = leave(self.operators.linear(x, self.weight, later=later), self.parallel)
        return y if self.bias is None else y + self.bias
