"""A rank's gradients of a `Span`: added up over micro-batches, reduced, kept for the optimizer.

Where nobody shares a span, its gradients stay as the modules made them; otherwise they are one flat
vector, on the device or on the host.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.accelerator.accelerator import Accelerator, Event
from tutti.nn.storage import Logical
from tutti.ownership.ownership import Block, Span
from tutti.train.state.host_vectors import HostSum


def local_part(block: Block, logical: Logical, of: Tensor) -> Tensor:
    """Return the view of a rank's slice of a tensor that is a block of the whole."""
    for dim, ((start, stop), own) in enumerate(zip(block.intervals, logical.slices, strict=True)):
        if start != own.start or stop != own.stop:
            of = of.narrow(dim, start - own.start, stop - start)
    return of


@dataclass(frozen=True, slots=True, kw_only=True)
class Away:
    """What of a span lives on the host."""

    optimizer: bool = False
    parameters: bool = False
    gradients: bool = False


class SpanGradients:
    """The gradients of one span on this rank."""

    def __init__(
        self,
        span: Span,
        rank: int,
        level: int,
        tensors: Mapping[tuple[int, str], Logical],
        dtype: torch.dtype,
        accelerator: Accelerator,
        away: Away,
        *,
        shared: bool,
    ) -> None:
        self.span, self.rank, self.level = span, rank, level
        # where nothing is reduced, a copy of a neighbour's gradient is as good as its own
        self.adds = span.is_added_by(rank) or not shared
        self._logical = [tensors[block.unit, block.name] for block in span.blocks]
        self.views = [
            local_part(block, logical, logical.view)
            for block, logical in zip(span.blocks, self._logical, strict=True)
        ]
        self._sizes = [block.size for block in span.blocks]
        self._shapes = [block.shape for block in span.blocks]
        self.device = self.views[0].device
        self.kept = slice(0, span.size) if level == 0 else span.own(rank)
        self.gradient_dtype = dtype
        self.gradient: Tensor | None = None  # of the whole span, of this rank's micro-batches
        self.total: Tensor | None = None  # reduced, of the kept elements
        self.loose: dict[int, Tensor] | None = None  # as the modules made them, by block
        if len(span.members) == 1 and level == 0 and not away.gradients:
            self.loose = {}
        self._wholes: dict[int, Tensor] = {}  # loose sums of stored parameters, by first block
        self.host_sum = HostSum(accelerator) if away.gradients else None
        self._sum_is_total = False  # what is on the host is reduced, of the kept elements

    def _cut(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split(self._sizes)
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def add_gradients(self, units: range, lent: Container[int] = ()) -> None:
        """Move the modules' gradients of some units into the flat one; `lent` ones as copies."""
        chosen = [i for i, block in enumerate(self.span.blocks) if block.unit in units]
        added: list[tuple[int, Tensor]] = []
        for i in chosen:
            gradient = self._logical[i].gradient
            if gradient is not None:
                added.append((i, local_part(self.span.blocks[i], self._logical[i], gradient)))
        if self.loose is not None:
            self._add_loose(self.loose, added, lent)
            return
        gradient = self._flat_gradient()
        if added and self.adds:
            places = self._cut(gradient)
            torch._foreach_add_([places[i] for i, _ in added], [g for _, g in added])

    def _add_loose(
        self, loose: dict[int, Tensor], added: list[tuple[int, Tensor]], lent: Container[int]
    ) -> None:
        """Keep the first gradient of a step as it is; widen it when a second one comes."""
        for i, gradient in added:
            if i not in loose and self.span.blocks[i].unit in lent:
                loose[i] = gradient.to(self.gradient_dtype, copy=True)  # a second one will come
            elif i not in loose:
                loose[i] = gradient
            elif loose[i].dtype is self.gradient_dtype:
                loose[i].add_(gradient)
            else:
                loose[i] = loose[i].to(self.gradient_dtype).add_(gradient)

    def whole(self, blocks: Sequence[int]) -> tuple[int, ...] | None:
        """Return blocks in the order in which they make up a stored parameter; None: they do not.

        One below the other, in the parameter as in the span.
        """
        ordered = sorted(blocks, key=lambda i: self._logical[i].piece.start)
        pieces = [self._logical[i].piece for i in ordered]
        owner = self._logical[ordered[0]].owner
        end = 0
        for i, piece in zip(ordered, pieces, strict=True):
            if piece.start != end or self.views[i].shape != self._logical[i].view.shape:
                return None
            end = piece.stop
        stacked = all(piece.dim == 0 for piece in pieces) or len(pieces) == 1
        follow = ordered == list(range(ordered[0], ordered[0] + len(ordered)))
        return tuple(ordered) if stacked and follow and end == owner.shape[pieces[0].dim] else None

    def sum_of(self, blocks: tuple[int, ...], shape: torch.Size) -> Tensor | None:
        """Return what the gradients of some blocks, together of that shape, are added to.

        None where they are not: a copy of them counts elsewhere.
        """
        if self.loose is not None:
            return self._loose_sum(self.loose, blocks, shape)
        if not self.adds:
            return None
        start = sum(block.size for block in self.span.blocks[: blocks[0]])
        return self._flat_gradient()[start : start + shape.numel()].view(shape)

    def _loose_sum(
        self, loose: dict[int, Tensor], blocks: tuple[int, ...], shape: torch.Size
    ) -> Tensor | None:
        if blocks[0] not in loose:
            whole = torch.zeros(shape, dtype=self.gradient_dtype, device=self.device)
            self._wholes[blocks[0]] = whole
            loose.update((i, self._logical[i].piece.seen(whole)) for i in blocks)
        return self._wholes.get(blocks[0])

    def _flat_gradient(self) -> Tensor:
        if self.gradient is None:
            self.gradient = torch.zeros(
                self.span.size, dtype=self.gradient_dtype, device=self.device
            )
        return self.gradient

    @property
    def has_gradients(self) -> bool:
        """Whether reduced gradients wait for the optimizer."""
        return bool(self.loose) or self.total is not None

    def forget_gradients(self) -> None:
        """Let go of the step's gradients."""
        self.total = None
        self._wholes.clear()
        if self.loose is not None:
            self.loose.clear()

    def make_flat(self) -> None:
        """Let gradients of this span lie in one vector from now on."""
        self.loose = None

    def taken_gradient(self) -> Tensor:
        """Return the flat gradient of this rank and forget it; zeros if it adds none."""
        gradient, self.gradient = self.gradient, None
        if gradient is None:
            gradient = torch.zeros(self.span.size, dtype=self.gradient_dtype, device=self.device)
        return gradient

    def add_total(self, part: Tensor) -> None:
        """Add reduced gradients of the kept elements."""
        self.total = part if self.total is None else self.total.add_(part)

    def offload_gradients(self) -> Event | None:
        """Add to the sum on the host what is on the device; return when it has left."""
        part = self.gradient if self.total is None else self.total
        if part is None:
            return None
        assert self.host_sum is not None
        self._sum_is_total = self.total is not None
        self.total = self.gradient = None
        return self.host_sum.add(part)

    def join_gradients(self, fetched: Tensor) -> None:
        """Go on with a sum that was on the host."""
        here = self.total if self._sum_is_total else self.gradient
        joined = fetched if here is None else fetched.add_(here)
        if self._sum_is_total:
            self.total = joined
        else:
            self.gradient = joined

    def close(self) -> None:
        """Take over gradients that nobody shares; what is shared was reduced by now."""
        if self.host_sum is not None:
            self.offload_gradients()
            if self.host_sum.total is None:
                self.host_sum.add(self.taken_gradient())
            self._sum_is_total = True
        elif self.total is None and self.loose is None:
            self.add_total(self.taken_gradient())

    def _loose_parts(self, loose: dict[int, Tensor]) -> list[Tensor]:
        """Return the gradients by block; zeros where a module has none."""
        return [
            loose[i] if i in loose else torch.zeros_like(view) for i, view in enumerate(self.views)
        ]

    def final_gradients(self) -> Tensor:
        """Return the step's gradients of the kept elements, wherever they are."""
        if self.loose is not None:
            parts = self._loose_parts(self.loose)
            return torch.cat([part.to(self.gradient_dtype).reshape(-1) for part in parts])
        total = self.total if self.host_sum is None else self.host_sum.total
        assert total is not None, "gradients are not whole before the step is closed"
        return total

    def final_gradient(self, index: int) -> Tensor:
        """Return those of one block, a vector."""
        if self.loose is not None:
            part = self.loose.get(index)
            return (torch.zeros_like(self.views[index]) if part is None else part).reshape(-1)
        start = sum(self._sizes[:index])
        low = max(start, self.kept.start) - self.kept.start
        high = min(start + self._sizes[index], self.kept.stop) - self.kept.start
        return self.final_gradients()[low : max(low, high)]

    def gradient_parts(self, *, counted: bool = False) -> Iterator[tuple[Block, Tensor]]:
        """Yield the reduced gradient of each block, as far as it is kept here.

        With `counted` only what no other rank yields, too.
        """
        if self.loose is not None:
            yield from ((self.span.blocks[i], part) for i, part in sorted(self.loose.items()))
            return
        total = self.total if self.host_sum is None else self.host_sum.total
        if total is None:
            return
        wanted = self.span.own(self.rank) if counted else self.kept
        offset = 0
        for block in self.span.blocks:
            low, high = max(offset, wanted.start), min(offset + block.size, wanted.stop)
            if low < high:
                yield block, total[low - self.kept.start : high - self.kept.start]
            offset += block.size
