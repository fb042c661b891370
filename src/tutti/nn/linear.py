"""Linear layers: one product for all tensors that are multiplied with the same input."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.operators import Operators
from tutti.accelerator.quantised import QuantisedWeight
from tutti.accelerator.reference.narrow import NarrowRows
from tutti.nn.low_rank import LowRank
from tutti.nn.parallel.collectives import enter, leave
from tutti.nn.parallel.overlap import Beside, Layer, column_products, row_product
from tutti.nn.storage import Holder, Maker


class Adapting(Protocol):
    """What adapters add to a layer (`nn.adapters`)."""

    down: Tensor
    up: Tensor

    def added(self, operators: Operators, y: Tensor, x: Tensor) -> Tensor:
        """Return the layer's output with it."""


class Linear(Holder):
    """x·Wᵀ + b of one or several logical layers, whose outputs stand side by side."""

    weight: Tensor  # or a `QuantisedWeight`, where it was loaded as one
    bias: Tensor | None
    may_narrow = True  # to products of 8 bits
    quantisable: tuple[str, ...] = ("weight",)
    adaptable = True
    adapted: Adapting | None = None

    def __init__(self, make: Maker, *names: str) -> None:
        super().__init__()
        self.operators = make.operators
        self.hold("weight", make, *(f"{name}.weight" for name in names))
        self.hold("bias", make, *(f"{name}.bias" for name in names))
        self.widths = [piece.stop - piece.start for piece in self.pieces["weight"]]
        self.low_rank = LowRank.of(make, names)

    def forward(self, x: Tensor | NarrowRows, later: WeightGradients | None = None) -> Tensor:
        """Return the outputs of all layers."""
        if self.low_rank is not None:
            y = self._tuned(x, self.low_rank, later)
            return y if self.bias is None else y + self.bias
        y = self.operators.linear(
            x, self.weight, self.bias, later=later, may_narrow=self.may_narrow
        )
        if self.adapted is None:
            return y
        assert isinstance(x, Tensor)
        return self.adapted.added(self.operators, y, x)

    def _tuned(
        self, x: Tensor | NarrowRows, low_rank: LowRank, later: WeightGradients | None
    ) -> Tensor:
        """Return the outputs without the bias, with what trained adapters add."""
        assert isinstance(x, Tensor)
        return low_rank.product(x, self.weight, later, may_narrow=self.may_narrow)

    @property
    def takes_narrow(self) -> bool:
        """Whether rows may come in 8 bits, rounded by whoever makes them: it would round them."""
        weight: object = self.weight
        adapted = self.adapted is not None or self.low_rank is not None
        if not isinstance(weight, QuantisedWeight) or adapted:
            return False
        return weight.narrow_inputs and weight.order is None

    @property
    def narrow_weights(self) -> list[Tensor]:
        """The weight, if it is multiplied in 8 bits wherever it is used."""
        row = self.weight.new_empty(1, self.weight.shape[1])
        operators = self.operators
        narrow = self.may_narrow and operators.narrows("narrow_linear", row, self.weight, self.bias)
        return [self.weight] if narrow and not self._in_pieces else []

    @property
    def _in_pieces(self) -> bool:
        """Whether products run piece by piece beside collectives: those are not narrow."""
        return False

    @property
    def layer(self) -> Layer:
        """The product, as several of one input are run together."""
        return Layer(self.weight.shape[1], self.weight, self.bias)


class _SlicedLinear(Linear):
    """A layer of which each tensor-parallel rank has a part."""

    def __init__(self, make: Maker, *names: str) -> None:
        super().__init__(make, *names)
        self.parallel = make.parallel

    @property
    def takes_narrow(self) -> bool:
        """Whether rows may come in 8 bits: not where they travel between ranks."""
        return self.parallel.tensor.size == 1 and super().takes_narrow

    @property
    def _in_pieces(self) -> bool:
        weight: object = self.weight
        if self.low_rank is not None or isinstance(weight, QuantisedWeight):
            return False  # beside an adapter, products run as a whole
        return self.parallel.tensor.size > 1 and self.parallel.overlap_chunks > 1


class ColumnLinear(_SlicedLinear):
    """A layer whose outputs are sliced: it sees all tokens, of which a rank may have its own."""

    def forward(  # type: ignore[override]  # the ranks' own tokens do not tell how many there are
        self, x: Tensor | NarrowRows, num_tokens: int, later: WeightGradients | None = None
    ) -> Tensor:
        """Return the outputs of all tokens."""
        if isinstance(x, NarrowRows):
            return super().forward(x, later)
        if not self._in_pieces:
            return super().forward(enter(x, self.parallel, num_tokens), later)
        beside = Beside.of(self.parallel, self.operators, num_tokens, later)
        return column_products(x, [self.layer], beside)[0]


class RowLinear(_SlicedLinear):
    """A layer whose inputs are sliced: the ranks' products are summed, the bias added once."""

    def __init__(self, make: Maker, name: str) -> None:
        super().__init__(make, name)
        if self.low_rank is not None:
            self.low_rank.group = self.parallel.tensor

    def forward(self, x: Tensor | NarrowRows, later: WeightGradients | None = None) -> Tensor:
        """Return the whole output, of this rank's tokens."""
        if self.parallel.tensor.size == 1 or isinstance(x, NarrowRows):
            return super().forward(x, later)
        if self._in_pieces:
            beside = Beside.of(self.parallel, self.operators, x.shape[0], later)
            y = row_product(x, self.weight, beside)
        elif self.low_rank is not None:
            y = leave(self._tuned(x, self.low_rank, later), self.parallel)
        else:
            y = self.operators.linear(x, self.weight, later=later, may_narrow=self.may_narrow)
            y = y if self.adapted is None else self.adapted.added(self.operators, y, x)
            y = leave(y, self.parallel)
        return y if self.bias is None else y + self.bias
