"""A dense feed-forward layer."""

from __future__ import annotations

from torch import Tensor

from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.reference.narrow import NarrowRows
from tutti.models import Activation
from tutti.nn.linear import ColumnLinear, RowLinear
from tutti.nn.storage import Holder, Maker


class Mlp(Holder):
    """down(act(gate) · up) if gated, else down(act(up)); gate and up are one product."""

    def __init__(self, make: Maker, name: str, activation: Activation, *, gated: bool) -> None:
        super().__init__()
        self.operators = make.operators
        self.activation, self.gated = activation, gated
        names = (f"{name}.gate", f"{name}.up") if gated else (f"{name}.up",)
        self.up = ColumnLinear(make, *names)
        self.down = RowLinear(make, f"{name}.down")

    @property
    def takes_narrow(self) -> bool:
        """Whether its rows may come in 8 bits."""
        return self.up.takes_narrow

    def forward(
        self, x: Tensor | NarrowRows, num_tokens: int, later: WeightGradients | None = None
    ) -> Tensor:
        """Return the layer's output, of this rank's tokens."""
        return self.narrowed(self.widened(x, num_tokens, later), later)

    def widened(
        self, x: Tensor | NarrowRows, num_tokens: int, later: WeightGradients | None
    ) -> Tensor | NarrowRows:
        """Return what comes before the last product: the first half of the layer."""
        y: Tensor = self.up(x, num_tokens, later)
        if self.gated and self.down.takes_narrow:
            return self.operators.narrow_gated_activation(y, kind=self.activation)
        if self.gated:
            return self.operators.gated_activation(y, kind=self.activation)
        return self.operators.activation(y, kind=self.activation)

    def narrowed(self, x: Tensor | NarrowRows, later: WeightGradients | None) -> Tensor:
        """Return the layer's output: its second half."""
        y: Tensor = self.down(x, later)
        return y
