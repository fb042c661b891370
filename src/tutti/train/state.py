"""A rank's share of parameters, gradients and optimizer state, as flat vectors per `Span`.

The parameters themselves live in the modules, in the dtype that is computed with. Gradients are
added up here, in the dtype that the Plan says; what the optimizer keeps is this rank's shard (all
of it at level 0).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.accelerator.operators import Operators
from tutti.accelerator.reference.optimizer import AdamSettings
from tutti.errors import InputError
from tutti.hardware.chip import Dtype
from tutti.nn.storage import Logical
from tutti.plan.job import Precision
from tutti.train.layout import Block, Span

TORCH_DTYPES: Mapping[Dtype, torch.dtype] = {
    Dtype.FP32: torch.float32,
    Dtype.BF16: torch.bfloat16,
    Dtype.FP16: torch.float16,
}


def compute_dtype(precision: Precision) -> torch.dtype:
    """Return the dtype of parameters and activations."""
    found = TORCH_DTYPES.get(precision.compute)
    if found is None or precision.parameters != precision.compute:
        raise InputError(
            f"precision: computing in {precision.compute} on parameters in {precision.parameters} "
            "is not trained here; let both be one of fp32, bf16, fp16"
        )
    return found


def local_part(block: Block, logical: Logical, of: Tensor) -> Tensor:
    """Return the view of a rank's slice of a tensor that is a block of the whole."""
    for dim, (interval, own) in enumerate(zip(block.intervals, logical.slices, strict=True)):
        of = of.narrow(dim, interval[0] - own.start, interval[1] - interval[0])
    return of


def _without_versions(owners: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Write in place without telling autograd: a gathered parameter is the same parameter."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(owners))  # type: ignore[attr-defined]


@dataclass(slots=True)
class OptimizerState:
    """What the optimizer keeps of the elements that are this rank's."""

    master: Tensor | None  # the weights in the master dtype; None: the parameters themselves
    mean: Tensor | None
    square: Tensor | None

    def tensors(self) -> dict[str, Tensor]:
        """Return what there is, by name."""
        named = {"master": self.master, "mean": self.mean, "square": self.square}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


class SpanState:
    """One span on this rank."""

    def __init__(
        self,
        span: Span,
        rank: int,
        level: int,
        tensors: Mapping[tuple[int, str], Logical],
        precision: Precision,
        optimizer: str,
        *,
        shared: bool,
    ) -> None:
        self.span, self.rank, self.level = span, rank, level
        # where nothing is reduced, a copy of a neighbour's gradient is as good as its own
        self.adds = rank in span.adders or not shared
        self._logical = [tensors[block.unit, block.name] for block in span.blocks]
        self.views = [
            local_part(block, logical, logical.view)
            for block, logical in zip(span.blocks, self._logical, strict=True)
        ]
        self.device = self.views[0].device
        self.kept = slice(0, span.size) if level == 0 else span.own(rank)
        self._dtypes = (
            TORCH_DTYPES[precision.gradients],
            None if precision.master is None else TORCH_DTYPES[precision.master],
            TORCH_DTYPES[precision.moments],
        )
        self.gradient: Tensor | None = None  # of the whole span, of this rank's micro-batches
        self.total: Tensor | None = None  # reduced, of the kept elements
        self.optimizer = self._new_state(optimizer)

    @property
    def num_kept(self) -> int:
        """How many elements the optimizer keeps here."""
        return self.kept.stop - self.kept.start

    def _new_state(self, optimizer: str) -> OptimizerState:
        _, master, moments = self._dtypes

        def zeros(dtype: torch.dtype) -> Tensor:
            return torch.zeros(self.num_kept, dtype=dtype, device=self.device)

        adam = optimizer == "adamw"
        sharded_without_master = self.level > 0 and master is None
        dtype = self.views[0].dtype if sharded_without_master else master
        return OptimizerState(
            master=None if dtype is None else zeros(dtype),
            mean=zeros(moments) if adam else None,
            square=zeros(moments) if adam else None,
        )

    @property
    def owners(self) -> list[torch.nn.Parameter]:
        """The stored parameters that parts of this span lie in."""
        return [logical.owner for logical in self._logical]

    # --- parameters ------------------------------------------------------------------------

    def shard(self) -> Tensor:
        """Return the kept elements in the dtype that is computed with."""
        assert self.optimizer.master is not None, "level 0 has no shards"
        return self.optimizer.master.to(self.views[0].dtype)

    def flat_parameters(self) -> Tensor:
        """Return a copy of the parameters as one vector."""
        return torch.cat([view.reshape(-1) for view in self.views])

    def take_masters(self) -> None:
        """Copy the parameters, as they are now, to what the optimizer moves."""
        if self.optimizer.master is not None:
            self.optimizer.master.copy_(self.flat_parameters()[self.kept])

    def put_parameters(self, flat: Tensor) -> None:
        """Write the whole span into the modules; autograd need not know."""
        with torch.no_grad(), _without_versions(self.owners):
            torch._foreach_copy_(self.views, self._cut(flat))

    def _cut(self, flat: Tensor) -> list[Tensor]:
        sizes = [block.size for block in self.span.blocks]
        parts = flat.split(sizes)
        return [part.view(block.shape) for part, block in zip(parts, self.span.blocks, strict=True)]

    def like(self, *, weights: bool) -> Tensor:
        """Return a tensor of the dtype of the kept weights, or of the gradients."""
        if not weights:
            return torch.empty(0, dtype=self._dtypes[0], device=self.device)
        master = self.optimizer.master
        return torch.empty(0, dtype=self.views[0].dtype if master is None else master.dtype,
                           device=self.device)  # fmt: skip

    def read_kept(self, start: int, stop: int) -> Tensor:
        """Return some of the kept weights, as the optimizer has them."""
        master = self.optimizer.master
        return (self.flat_parameters() if master is None else master)[start:stop]

    def kept_parts(self) -> list[tuple[str, tuple[slice, ...], Tensor]]:
        """Return the kept weights as parts of logical tensors; whole rows of the first dimension.

        Elements of a row that another rank keeps are NaN.
        """
        flat = torch.full((self.span.size,), float("nan"), device=self.device)
        flat[self.kept] = self.read_kept(0, self.num_kept).float()
        return [
            (
                f"{block.unit}.{block.name}",
                tuple(slice(*interval) for interval in block.intervals),
                part,
            )
            for block, part in zip(self.span.blocks, self._cut(flat), strict=True)
        ]

    def write_kept(self, start: int, part: Tensor) -> None:
        """Overwrite some of the kept weights; at level 0 the modules follow."""
        if self.optimizer.master is not None:
            self.optimizer.master[start : start + len(part)] = part
        if self.level == 0:
            flat = self.flat_parameters()
            flat[start : start + len(part)] = part.to(flat.dtype)
            self.put_parameters(flat)

    # --- gradients -------------------------------------------------------------------------

    def add_gradients(self, units: range) -> None:
        """Move the modules' gradients of some units into the flat one."""
        chosen = [i for i, block in enumerate(self.span.blocks) if block.unit in units]
        found: list[tuple[int, Tensor]] = []
        for i in chosen:
            gradient = self._logical[i].gradient
            if gradient is not None:
                found.append((i, local_part(self.span.blocks[i], self._logical[i], gradient)))
        if self.gradient is None:
            self.gradient = torch.zeros(self.span.size, dtype=self._dtypes[0], device=self.device)
        if found and self.adds:
            places = self._cut(self.gradient)
            torch._foreach_add_([places[i] for i, _ in found], [g for _, g in found])

    def taken_gradient(self) -> Tensor:
        """Return the flat gradient of this rank and forget it; zeros if it adds none."""
        gradient, self.gradient = self.gradient, None
        if gradient is None:
            gradient = torch.zeros(self.span.size, dtype=self._dtypes[0], device=self.device)
        return gradient

    def add_total(self, part: Tensor) -> None:
        """Add reduced gradients of the kept elements."""
        self.total = part if self.total is None else self.total.add_(part)

    def gradient_parts(self) -> Iterator[tuple[Block, Tensor]]:
        """Yield the reduced gradient of each block, as far as it is kept here."""
        if self.total is None:
            return
        offset = 0
        for block in self.span.blocks:
            low, high = max(offset, self.kept.start), min(offset + block.size, self.kept.stop)
            if low < high:
                yield block, self.total[low - self.kept.start : high - self.kept.start]
            offset += block.size

    # --- the step --------------------------------------------------------------------------

    def step(
        self, operators: Operators, *, number: int, settings: AdamSettings, factor: Tensor
    ) -> None:
        """Move the kept weights; at level 0 the modules' parameters follow."""
        assert self.total is not None, "a step without gradients"
        state, gradient = self.optimizer, self.total
        self.total = None
        if state.master is None:  # level 0 without masters: the parameters themselves
            weights: Sequence[Tensor] = self.views
            gradients: Sequence[Tensor] = self._cut(gradient)
        else:
            weights, gradients = [state.master], [gradient]
        if state.mean is None or state.square is None:
            _sgd(weights, gradients, settings, factor)
        else:
            moments = [
                self._cut(m) if state.master is None else [m] for m in (state.mean, state.square)
            ]
            operators.adamw(
                weights, gradients, *moments, step=number, settings=settings,
                gradient_factor=factor,
            )  # fmt: skip
        if self.level == 0 and state.master is not None:
            self.put_parameters(state.master)


@torch.no_grad()
def _sgd(
    weights: Sequence[Tensor], gradients: Sequence[Tensor], settings: AdamSettings, factor: Tensor
) -> None:
    for weight, gradient in zip(weights, gradients, strict=True):
        wide = torch.promote_types(weight.dtype, torch.float32)
        moved = weight.to(wide) * (1.0 - settings.learning_rate * settings.weight_decay)
        moved -= settings.learning_rate * factor * gradient.to(wide)
        weight.copy_(moved)
