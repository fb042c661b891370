"""Low-rank adapters that are trained: what they add to the products of one linear layer.

Of layers that are one product (query, key, value) the down factors stand one below the other and
are one product, too; each up factor is a parameter of its own. Under tensor parallelism a factor is
sliced as its weight is along the dimension that they share, so that no collective is added: what an
adapter adds goes through the layer's own. DoRA's lengths of rows are the exception: of a layer
whose inputs are sliced, the ranks sum their squares.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.operators import Operators
from tutti.accelerator.quantised import QuantisedWeight
from tutti.accelerator.reference.low_rank import UpFactor, add_low_rank, low_rank_linear
from tutti.models.tuning import DOWN, MAGNITUDE, UP, AdapterSpec
from tutti.nn.parallel.groups import Group
from tutti.nn.storage import Holder, Maker


class _Group(NamedTuple):
    """Layers with one down factor, as they stand in the layer's product."""

    up: str  # the attribute of their up factors, one below the other
    start: int  # of their outputs among all
    stop: int
    first: int  # of their rows of `down`
    last: int


class LowRank(Holder):
    """The adapters of one product: of a linear layer, or of all experts' one."""

    down: Tensor

    def __init__(self, make: Maker, layers: tuple[str, ...], adapter: AdapterSpec) -> None:
        """Make the factors of those of the layers that have some."""
        super().__init__()
        self.operators: Operators = make.operators
        self.scale, self.rank = adapter.scale, adapter.rank
        self.group: Group | None = None  # that slices the layer's inputs
        holders = tuple(name for name in layers if make.has(f"{name}.{DOWN}"))
        self.hold("down", make, *(f"{name}.{DOWN}" for name in holders))
        self.groups: list[_Group] = []
        self.widths: list[int] = []
        dim = 1 if self.pieces["down"][0].parameter.experts else 0
        members: dict[int, list[str]] = {}
        bounds: dict[int, tuple[int, int]] = {}
        start = 0
        for name in layers:
            stop = start + make.width(f"{name}.weight", dim)
            if make.has(f"{name}.{UP}"):
                own = len(members) - (name not in holders)  # of a group that has begun, or its next
                members.setdefault(own, []).append(name)
                bounds[own] = (bounds.get(own, (start, stop))[0], stop)
            start = stop
        self.width = start
        for own, names in members.items():
            self.hold(f"up_{own}", make, *(f"{name}.{UP}" for name in names))
            first = own * self.rank
            self.groups.append(_Group(f"up_{own}", *bounds[own], first, first + self.rank))
        self.magnitudes: list[tuple[str, int, int]] = []  # attribute, outputs
        if adapter.method == "dora":
            for own, names in members.items():
                self.hold(f"magnitude_{own}", make, *(f"{name}.{MAGNITUDE}" for name in names))
                self.magnitudes.append((f"magnitude_{own}", *bounds[own]))

    @classmethod
    def of(cls, make: Maker, layers: tuple[str, ...]) -> LowRank | None:
        """Return the adapters of a product; None where it has none."""
        if make.adapter is None or not any(make.has(f"{name}.{UP}") for name in layers):
            return None
        return cls(make, layers, make.adapter)

    @property
    def is_dora(self) -> bool:
        """Whether outputs are brought to trained magnitudes."""
        return bool(self.magnitudes)

    def product(
        self,
        x: Tensor,
        weight: Tensor | QuantisedWeight,
        later: WeightGradients | None,
        *,
        may_narrow: bool,
    ) -> Tensor:
        """Return a linear layer's output, without its bias, with what the adapters add."""
        operators = self.operators
        ups = [UpFactor(getattr(self, group.up), *group[1:]) for group in self.groups]
        y = None
        if isinstance(weight, Tensor) and not weight.requires_grad:
            narrow = may_narrow and operators.narrows("narrow_linear", x, weight, None)
            if not narrow:
                y = low_rank_linear(x, weight, self.down, ups, self.scale, later)
        if y is None:
            y = operators.linear(x, weight, later=later, may_narrow=may_narrow)
            y = add_low_rank(y, x, self.down, ups, self.scale, later)
        return y * self._factors(weight) if self.is_dora else y

    def added_by_experts(
        self, y: Tensor, rows: Tensor, counts: Tensor, later: WeightGradients | None
    ) -> Tensor:
        """Return the outputs of rows in the order of their experts, with what adapters add."""
        grouped = self.operators.grouped_linear
        low = grouped(rows, self.down, counts, later=later) * self.scale
        parts = [
            grouped(_rows(low, group), getattr(self, group.up), counts, later=later)
            for group in self.groups
        ]
        return y + self._spread(parts, y)

    def _spread(self, parts: list[Tensor], like: Tensor) -> Tensor:
        """Return the groups' outputs at their places among all, zero between them."""
        columns: list[Tensor] = []
        at = 0
        for group, part in zip(self.groups, parts, strict=True):
            if group.start > at:
                columns.append(like.new_zeros(like.shape[0], group.start - at))
            columns.append(part)
            at = group.stop
        if at < self.width:
            columns.append(like.new_zeros(like.shape[0], self.width - at))
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)

    # --- DoRA ------------------------------------------------------------------------------

    def _factors(self, weight: Tensor | QuantisedWeight) -> Tensor:
        """Return what each output is multiplied with: its magnitude ÷ the length of its row."""
        lengths = self.row_lengths(weight)
        parts: list[Tensor] = []
        at = 0
        for attribute, start, stop in self.magnitudes:
            if start > at:
                parts.append(lengths.new_ones(start - at))
            parts.append(getattr(self, attribute) / lengths[start:stop])
            at = stop
        if at < self.width:
            parts.append(lengths.new_ones(self.width - at))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @torch.no_grad()
    def row_lengths(
        self, weight: Tensor | QuantisedWeight, exact: torch.dtype = torch.float32
    ) -> Tensor:
        """Return the lengths of the rows of weight + adapters; no gradient follows from them."""
        wide = self.down.dtype
        whole = weight.dequantised(wide) if isinstance(weight, QuantisedWeight) else weight
        if not self.is_dora:
            raise ValueError("only DoRA's outputs have magnitudes")
        squares = torch.empty(self.width, dtype=exact, device=whole.device)
        at = 0
        for group in self.groups:
            squares[at : group.start] = 1.0
            up, down = getattr(self, group.up), self.down[group.first : group.last]
            rows = torch.addmm(whole[group.start : group.stop], up, down, alpha=self.scale)
            squares[group.start : group.stop] = rows.to(exact).square().sum(1)
            at = group.stop
        squares[at:] = 1.0
        if self.group is not None and self.group.size > 1:
            squares = self.group.all_reduce(squares)
        return squares.sqrt().to(wide)

    @torch.no_grad()
    def begin_magnitudes(self, weight: Tensor | QuantisedWeight) -> None:
        """Let outputs be as they are without an adapter.

        Sums of 64 bits come to the same 32, however many ranks slice the weight.
        """
        if not self.is_dora:
            return
        lengths = self.row_lengths(weight, torch.float64)
        for attribute, start, stop in self.magnitudes:
            getattr(self, attribute).copy_(lengths[start:stop])


def _rows(low: Tensor, group: _Group) -> Tensor:
    """Return a group's columns of what the down factors gave."""
    if group.first == 0 and group.last == low.shape[1]:
        return low
    return low[:, group.first : group.last]
