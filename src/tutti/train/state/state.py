"""A rank's share of parameters, gradients and optimizer state, as flat vectors per `Span`.

The parameters themselves live in the modules, in the dtype that is computed with. Gradients are
added up here, in the dtype that the Plan says; what the optimizer keeps is this rank's shard (all
of it at level 0).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from tutti.accelerator.accelerator import Accelerator
from tutti.accelerator.operators import Operators
from tutti.accelerator.reference.moment_codes import code_dtype, num_scales
from tutti.accelerator.reference.optimizer import AdamSettings, lion, sgd
from tutti.errors import InputError
from tutti.hardware.chip import Dtype
from tutti.models.parameters import Parameter
from tutti.nn.storage import Logical
from tutti.ownership.ownership import Block, Span
from tutti.plan.job import CODE_BLOCK, EIGHT_BIT, MOMENTS, Precision
from tutti.train.state.host_vectors import HostCopy
from tutti.train.state.optimizer_state import OptimizerState
from tutti.train.state.span_gradients import Away, SpanGradients
from tutti.train.state.weight_decay import by_settings

TORCH_DTYPES: Mapping[Dtype, torch.dtype] = {
    Dtype.FP32: torch.float32,
    Dtype.BF16: torch.bfloat16,
    Dtype.FP16: torch.float16,
}

Directed = Callable[[list[Tensor], Tensor], list[Tensor]]


def compute_dtype(precision: Precision) -> torch.dtype:
    """Return the dtype of parameters and activations."""
    dtype = TORCH_DTYPES.get(precision.parameters)
    narrow = precision.compute is Dtype.FP8 and precision.parameters is Dtype.BF16
    if dtype is None or (precision.parameters != precision.compute and not narrow):
        raise InputError(
            f"precision: computing in {precision.compute} on parameters in {precision.parameters} "
            "is not trained here; let both be one of fp32, bf16, fp16, or compute in fp8 on bf16"
        )
    return dtype


def _without_versions(owners: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Write in place without telling autograd: a gathered parameter is the same parameter."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(owners))  # type: ignore[attr-defined]


class SpanState(SpanGradients):
    """One span on this rank."""

    def __init__(
        self,
        span: Span,
        rank: int,
        level: int,
        tensors: Mapping[tuple[int, str], Logical],
        precision: Precision,
        optimizer: str,
        accelerator: Accelerator,
        away: Away,
        *,
        shared: bool,
        average: bool = False,
    ) -> None:
        super().__init__(
            span, rank, level, tensors, TORCH_DTYPES[precision.gradients], accelerator, away,
            shared=shared,
        )  # fmt: skip
        self._accelerator, self._away = accelerator, away
        self._master = None if precision.master is None else TORCH_DTYPES[precision.master]
        self._moments = TORCH_DTYPES[precision.moments]
        self.rule = optimizer  # by which weights move
        self._averages = average and not span.copied
        self._matrices = {
            (block.unit, block.name)
            for block, parameter in zip(span.blocks, self.parameters, strict=True)
            if optimizer == "muon" and parameter.is_matrix
        }
        self.optimizer = self._new_state(optimizer)
        self.direction: Tensor | None = None  # of the kept elements, where matrices have one (Muon)
        self.directed: Directed | None = None  # makes steps of gradients (Adafactor)
        self.home: HostCopy | None = None  # of the parameters, as far as this rank keeps them
        if away.parameters:
            self.home = HostCopy(accelerator, self.num_kept, self.views[0].dtype)
        self._shard: Tensor | None = None  # of the parameters, at level 3 without a master here
        self._cuts: dict[str, tuple[Tensor, list[Tensor]]] = {}  # of the optimizer's vectors

    @property
    def num_kept(self) -> int:
        """How many elements the optimizer keeps here."""
        return self.kept.stop - self.kept.start

    def _new_state(self, optimizer: str) -> OptimizerState:
        master, moments = self._master, self._moments
        if self.span.copied:  # its owner updates it
            master, optimizer = None, "none"

        sizes: dict[str, tuple[int, torch.dtype]] = {}
        if master is not None:
            sizes["master"] = self.num_kept, master
        elif self.level > 0:  # the shard of the parameters themselves
            sizes["master"] = self.num_kept, self.views[0].dtype
        for name in MOMENTS.get(optimizer, ()):
            if optimizer in EIGHT_BIT:
                scales = num_scales(self.num_kept, CODE_BLOCK)
                sizes[f"{name}_scales"] = scales, torch.float32
            dtype = code_dtype(name) if optimizer in EIGHT_BIT else moments
            sizes[name] = self.num_kept, dtype
        if self._averages:
            sizes["average"] = self.num_kept, torch.float32
        tensors: dict[str, Any] = dict.fromkeys(("master", "mean", "square"))
        homes: dict[str, HostCopy] = {}
        for name, (size, dtype) in sizes.items():
            if self._away.optimizer and (name != "master" or master is not None):
                homes[name] = HostCopy(self._accelerator, size, dtype)
                tensors[name] = homes[name].at_rest
            else:
                tensors[name] = torch.zeros(size, dtype=dtype, device=self.device)
        return OptimizerState(**tensors, homes=homes)

    @property
    def _master_is_away(self) -> bool:
        return "master" in self.optimizer.homes

    @property
    def owners(self) -> list[torch.nn.Parameter]:
        """The stored parameters that parts of this span lie in."""
        return [logical.owner for logical in self._logical]

    # --- parameters ------------------------------------------------------------------------

    def shard(self) -> Tensor:
        """Return the kept elements in the dtype that is computed with."""
        if self.home is not None:
            return self.home.arrive()
        if not self._master_is_away:
            assert self.optimizer.master is not None, "level 0 has no shards"
            return self.optimizer.master.to(self.views[0].dtype)
        if self.level < 3:  # the modules have it
            return self.read_parameters(self.kept.start, self.kept.stop)
        assert self._shard is not None, "take_masters comes first"
        return self._shard

    def read_parameters(self, start: int, stop: int) -> Tensor:
        """Return a copy of some of the span's elements, as the modules have them."""
        parts = [view.reshape(-1)[low:high] for view, low, high in self._between(start, stop)]
        return torch.cat(parts) if parts else self.views[0].new_empty(0)

    @torch.no_grad()
    def write_parameters(self, start: int, flat: Tensor) -> None:
        """Write some of the span's elements into the modules; autograd need not know."""
        at = 0
        with _without_versions(self.owners):
            for view, low, high in self._between(start, start + len(flat)):
                whole = view.reshape(-1)  # a copy where the part is no single run of memory
                whole[low:high] = flat[at : at + high - low]
                if whole.data_ptr() != view.data_ptr():
                    view.copy_(whole.view_as(view))
                at += high - low

    def _between(self, start: int, stop: int) -> Iterator[tuple[Tensor, int, int]]:
        """Yield the parts of the modules with elements from `start` to `stop`, and which."""
        offset = 0
        for view, block in zip(self.views, self.span.blocks, strict=True):
            low, high = max(start - offset, 0), min(stop - offset, block.size)
            if low < high:
                yield view, low, high
            offset += block.size

    def take_masters(self) -> None:
        """Copy the parameters, as they are now, to what the optimizer moves."""
        master, average = self.optimizer.master, self.optimizer.average
        kept = self.read_parameters(self.kept.start, self.kept.stop)
        self.optimizer.settle()
        if average is not None:
            average.copy_(kept)
        if master is None:
            return
        master.copy_(kept)
        if self.level > 0 or self.home is not None:
            self._follow(kept, at_rest=True)

    def follow_master(self) -> None:
        """Let what is computed with be what the optimizer has: after a checkpoint was loaded."""
        self.optimizer.close()
        if self.optimizer.master is not None:
            self.optimizer.settle()
            self._follow(self.optimizer.master, at_rest=True)

    def _follow(self, kept: Tensor, *, at_rest: bool) -> None:
        """Let parameters be the kept weights, where no gather brings them out of the master."""
        dtype = self.views[0].dtype
        if self.home is not None:
            if at_rest:
                self.home.settle()
                self.home.at_rest.copy_(kept)
            else:
                self.home.put(kept.to(dtype, copy=True))
        elif self.level == 0:
            self.put_parameters(kept)
        elif self._master_is_away and self.level < 3:
            self.write_parameters(self.kept.start, kept.to(self.device, dtype))
        elif self._master_is_away:
            self._shard = kept.to(self.device, dtype, copy=True)

    def put_parameters(self, flat: Tensor) -> None:
        """Write the whole span into the modules; autograd need not know."""
        with torch.no_grad(), _without_versions(self.owners):
            torch._foreach_copy_(self.views, self._cut(flat))

    def bring_parameters(self) -> None:
        """Copy the whole span from the host into the modules (level 0)."""
        assert self.home is not None
        with torch.no_grad(), _without_versions(self.owners):
            torch._foreach_copy_(self.views, self._cut(self.home.home()), non_blocking=True)

    def like(self, *, weights: bool) -> Tensor:
        """Return a tensor of the dtype that weights compute in, or of the gradients."""
        dtype = self.views[0].dtype if weights else self.gradient_dtype
        return torch.empty(0, dtype=dtype, device=self.device)

    def read_kept(self, start: int, stop: int) -> Tensor:
        """Return some of the kept weights, as the optimizer has them, on the device."""
        self.optimizer.settle()
        master = self.optimizer.master
        if master is None:
            return self.read_parameters(start, stop)
        return master[start:stop].to(self.device)

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
        """Overwrite some of the kept weights; what no gather brings follows."""
        assert self.home is None, "tied weights stay on the device"
        self.optimizer.settle()
        if self.optimizer.master is not None:
            self.optimizer.master[start : start + len(part)] = part
        if self._shard is not None:
            self._shard[start : start + len(part)] = part
        elif self.level == 0 or self._master_is_away:
            self.write_parameters(self.kept.start + start, part.to(self.views[0].dtype))

    # --- the step --------------------------------------------------------------------------

    def _decoded(self) -> dict[str, Tensor]:
        """Return the moments that are kept as codes, as numbers for this step."""
        optimizer = self.optimizer
        if not optimizer.is_coded:
            return {}
        optimizer.close()
        return {name: optimizer.decoded(name) for name in ("mean", "square")}

    def kept_vector(
        self, name: str, by_block: bool, decoded: Tensor | None = None
    ) -> Sequence[Tensor] | None:
        """Return a vector of the optimizer, by block if asked; it is cut once if it stays here."""
        flat: Tensor | None = getattr(self.optimizer, name) if decoded is None else decoded
        if flat is None or not by_block:
            return None if flat is None else [flat]
        if name in self.optimizer.homes or decoded is not None:
            return self._cut(flat)
        held = self._cuts.get(name)
        if held is None or held[0] is not flat:
            held = self._cuts[name] = (flat, self._cut(flat))
        return held[1]

    def step_gradients(self, *, by_block: bool) -> list[Tensor]:
        """Return the step's gradients of the kept elements."""
        if self.loose is not None:
            return self._loose_parts(self.loose)
        assert self.total is not None
        return self._cut(self.total) if by_block else [self.total]

    def step(
        self, operators: Operators, *, number: int, settings: AdamSettings, factor: Tensor
    ) -> None:
        """Move the kept weights; at level 0 the modules' parameters follow."""
        assert self.has_gradients, "a step without gradients"
        if self.span.copied:
            self.forget_gradients()
            return
        master = self.optimizer.master
        by_block = self.level == 0  # as the modules' parameters lie, which follow in one pass
        gradients = self.step_gradients(by_block=by_block)
        self.forget_gradients()
        if self.directed is not None:
            gradients = self.directed(gradients, factor)
            factor = torch.where(factor.isnan(), factor, 1.0)
        weights = self.kept_vector("master", by_block) or self.views
        copies = self.views if master is not None and by_block and self.home is None else None
        if self.rule not in ("adamw", *EIGHT_BIT):
            copies = None
        decoded = self._decoded()
        moments = [
            self.kept_vector(name, by_block, decoded.get(name)) for name in ("mean", "square")
        ]
        directions = None
        if self.direction is not None:
            directions = self._cut(self.direction) if by_block else [self.direction]
            self.direction = None
        lists = [weights, gradients, *moments, copies, directions]
        kept = None if by_block else self.kept
        for own, matrix, parts in by_settings(
            lists, self.span.blocks, kept, settings, self._is_matrix
        ):
            self._move(operators, own, parts, matrix=matrix, number=number, factor=factor)
        for name, values in decoded.items():
            self.optimizer.encode(name, values)
        if master is not None and copies is None:
            self._follow(master, at_rest=False)
        if settings.average is not None and self.optimizer.average is not None:
            self._take_average(settings.average.taken(number), factor)

    def _take_average(self, stays: float | None, factor: Tensor) -> None:
        """Take the kept weights, as they are now, into their mean, unless the step is skipped."""
        average, weights = self.optimizer.average, self.optimizer.master
        assert average is not None
        if stays is None:
            return
        if weights is None:
            weights = self.read_parameters(self.kept.start, self.kept.stop)
        moved = torch.lerp(weights.float(), average, stays)
        average.copy_(torch.where(factor.isnan(), average, moved))

    def _is_matrix(self, block: Block) -> bool:
        """Tell whether a block moves by Muon's rule."""
        return (block.unit, block.name) in self._matrices

    @property
    def parameters(self) -> list[Parameter]:
        """The tensors that the blocks are parts of."""
        return [logical.piece.parameter for logical in self._logical]

    @functools.cached_property
    def matrix_elements(self) -> Tensor:
        """Which of the kept elements are of matrices that Muon moves."""
        flags = [
            torch.full((block.size,), self._is_matrix(block), device=self.device)
            for block in self.span.blocks
        ]
        return torch.cat(flags)[self.kept]

    def _move(
        self,
        operators: Operators,
        own: AdamSettings,
        parts: Sequence[Sequence[Tensor] | None],
        *,
        matrix: bool,
        number: int,
        factor: Tensor,
    ) -> None:
        """Move some weights by the job's rule."""
        weights, gradients, means, squares, copies, directions = parts
        assert weights is not None
        assert gradients is not None
        if matrix and directions is not None:
            one = torch.where(factor.isnan(), factor, 1.0)
            sgd(weights, directions, settings=own, gradient_factor=one)
        elif means is None:
            sgd(weights, gradients, settings=own, gradient_factor=factor)
        elif squares is None:
            lion(weights, gradients, means, settings=own, gradient_factor=factor)
        else:
            operators.adamw(
                weights, gradients, means, squares, step=number, settings=own,
                gradient_factor=factor, copies=copies,
            )  # fmt: skip
