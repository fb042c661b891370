"""A rank's share of parameters, gradients and optimizer state, as flat vectors per `Span`.

The parameters themselves live in the modules, in the dtype that is computed with. Gradients are
added up here, in the dtype that the Plan says; what the optimizer keeps is this rank's shard (all
of it at level 0).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.accelerator.accelerator import Accelerator, Event
from tutti.accelerator.operators import Operators
from tutti.accelerator.reference.optimizer import AdamSettings, put
from tutti.errors import InputError
from tutti.hardware.chip import Dtype
from tutti.nn.storage import Logical
from tutti.plan.job import Precision
from tutti.schedule.ownership import Block, Span
from tutti.train.state.host_vectors import HostCopy, HostSum
from tutti.train.state.optimizer_state import OptimizerState
from tutti.train.state.weight_decay import by_decay

TORCH_DTYPES: Mapping[Dtype, torch.dtype] = {
    Dtype.FP32: torch.float32,
    Dtype.BF16: torch.bfloat16,
    Dtype.FP16: torch.float16,
}


def compute_dtype(precision: Precision) -> torch.dtype:
    """Return the dtype of parameters and activations."""
    found = TORCH_DTYPES.get(precision.parameters)
    narrow = precision.compute is Dtype.FP8 and precision.parameters is Dtype.BF16
    if found is None or (precision.parameters != precision.compute and not narrow):
        raise InputError(
            f"precision: computing in {precision.compute} on parameters in {precision.parameters} "
            "is not trained here; let both be one of fp32, bf16, fp16, or compute in fp8 on bf16"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Away:
    """What of a span lives on the host."""

    optimizer: bool = False
    parameters: bool = False
    gradients: bool = False


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
        self.device = self.views[0].device
        self.kept = slice(0, span.size) if level == 0 else span.own(rank)
        self._dtypes = (
            TORCH_DTYPES[precision.gradients],
            None if precision.master is None else TORCH_DTYPES[precision.master],
            TORCH_DTYPES[precision.moments],
        )
        self.gradient: Tensor | None = None  # of the whole span, of this rank's micro-batches
        self.total: Tensor | None = None  # reduced, of the kept elements
        # Where nobody shares a span, its gradients stay as the modules made them, by block.
        self.loose: dict[int, Tensor] | None = None
        if len(span.members) == 1 and level == 0 and not away.gradients:
            self.loose = {}
        self._wholes: dict[int, Tensor] = {}  # loose sums of stored parameters, by first block
        self._accelerator, self._away = accelerator, away
        self.host_sum = HostSum(accelerator) if away.gradients else None
        self._sum_is_total = False  # what is on the host is reduced, of the kept elements
        self.optimizer = self._new_state(optimizer)
        self.home: HostCopy | None = None  # of the parameters, as far as this rank keeps them
        if away.parameters:
            self.home = HostCopy(accelerator, self.num_kept, self.views[0].dtype)
        self._shard: Tensor | None = None  # of the parameters, at level 3 without a master here

    @property
    def num_kept(self) -> int:
        """How many elements the optimizer keeps here."""
        return self.kept.stop - self.kept.start

    def _new_state(self, optimizer: str) -> OptimizerState:
        _, master, moments = self._dtypes
        if self.span.copied:  # its owner updates it
            master, optimizer = None, "none"

        dtypes: dict[str, torch.dtype | None] = {"master": master, "mean": None, "square": None}
        if self.level > 0 and master is None:  # the shard of the parameters themselves
            dtypes["master"] = self.views[0].dtype
        if optimizer == "adamw":
            dtypes |= {"mean": moments, "square": moments}
        found: dict[str, Tensor | None] = dict.fromkeys(dtypes)
        homes: dict[str, HostCopy] = {}
        for name, dtype in dtypes.items():
            if dtype is None:
                continue
            if self._away.optimizer and (name != "master" or master is not None):
                homes[name] = HostCopy(self._accelerator, self.num_kept, dtype)
                found[name] = homes[name].at_rest
            else:
                found[name] = torch.zeros(self.num_kept, dtype=dtype, device=self.device)
        return OptimizerState(**found, homes=homes)

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
        master = self.optimizer.master
        if master is None:
            return
        kept = self.read_parameters(self.kept.start, self.kept.stop)
        self.optimizer.settle()
        master.copy_(kept)
        if self.level > 0 or self.home is not None:
            self._follow(kept, at_rest=True)

    def follow_master(self) -> None:
        """Let what is computed with be what the optimizer has: after a checkpoint was loaded."""
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

    def _cut(self, flat: Tensor) -> list[Tensor]:
        sizes = [block.size for block in self.span.blocks]
        parts = flat.split(sizes)
        return [part.view(block.shape) for part, block in zip(parts, self.span.blocks, strict=True)]

    def like(self, *, weights: bool) -> Tensor:
        """Return a tensor of the dtype that weights compute in, or of the gradients."""
        dtype = self.views[0].dtype if weights else self._dtypes[0]
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

    # --- gradients -------------------------------------------------------------------------

    def add_gradients(self, units: range, lent: Container[int] = ()) -> None:
        """Move the modules' gradients of some units into the flat one; `lent` ones as copies."""
        chosen = [i for i, block in enumerate(self.span.blocks) if block.unit in units]
        found: list[tuple[int, Tensor]] = []
        for i in chosen:
            gradient = self._logical[i].gradient
            if gradient is not None:
                found.append((i, local_part(self.span.blocks[i], self._logical[i], gradient)))
        if self.loose is not None:
            self._add_loose(self.loose, found, lent)
            return
        gradient = self._flat_gradient()
        if found and self.adds:
            places = self._cut(gradient)
            torch._foreach_add_([places[i] for i, _ in found], [g for _, g in found])

    def _add_loose(
        self, loose: dict[int, Tensor], found: list[tuple[int, Tensor]], lent: Container[int]
    ) -> None:
        """Keep the first gradient of a step as it is; widen it when a second one comes."""
        for i, gradient in found:
            if i not in loose and self.span.blocks[i].unit in lent:
                loose[i] = gradient.to(self._dtypes[0], copy=True)  # a second one will come
            elif i not in loose:
                loose[i] = gradient
            elif loose[i].dtype is self._dtypes[0]:
                loose[i].add_(gradient)
            else:
                loose[i] = loose[i].to(self._dtypes[0]).add_(gradient)

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
            whole = torch.zeros(shape, dtype=self._dtypes[0], device=self.device)
            self._wholes[blocks[0]] = whole
            loose.update((i, self._logical[i].piece.seen(whole)) for i in blocks)
        return self._wholes.get(blocks[0])

    def _flat_gradient(self) -> Tensor:
        if self.gradient is None:
            self.gradient = torch.zeros(self.span.size, dtype=self._dtypes[0], device=self.device)
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
            gradient = torch.zeros(self.span.size, dtype=self._dtypes[0], device=self.device)
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
            return torch.cat([part.to(self._dtypes[0]).reshape(-1) for part in parts])
        found = self.total if self.host_sum is None else self.host_sum.total
        assert found is not None, "gradients are not whole before the step is closed"
        return found

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

    # --- the step --------------------------------------------------------------------------

    def _step_gradients(self, *, by_block: bool) -> list[Tensor]:
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
        state, master = self.optimizer, self.optimizer.master
        by_block = self.level == 0  # as the modules' parameters lie, which follow in one pass
        gradients = self._step_gradients(by_block=by_block)
        self.forget_gradients()
        weights = self.views if master is None else self._cut(master) if by_block else [master]
        copies = self.views if master is not None and by_block and self.home is None else None
        if state.mean is None or state.square is None:
            copies = None
        moments = [
            m if m is None else self._cut(m) if by_block else [m]
            for m in (state.mean, state.square)
        ]
        lists = [weights, gradients, *moments, copies]
        for own, parts in by_decay(
            lists, self.span.blocks, None if by_block else self.kept, settings
        ):
            moved, sums, means, squares, followers = parts
            assert moved is not None
            assert sums is not None
            if means is None or squares is None:
                _sgd(moved, sums, own, factor)
            else:
                operators.adamw(
                    moved, sums, means, squares, step=number, settings=own,
                    gradient_factor=factor, copies=followers,
                )  # fmt: skip
        if master is not None and copies is None:
            self._follow(master, at_rest=False)


@torch.no_grad()
def _sgd(
    weights: Sequence[Tensor], gradients: Sequence[Tensor], settings: AdamSettings, factor: Tensor
) -> None:
    for weight, gradient in zip(weights, gradients, strict=True):
        wide = torch.promote_types(weight.dtype, torch.float32)
        moved = weight.to(wide) * (1.0 - settings.learning_rate * settings.weight_decay)
        moved -= settings.learning_rate * factor * gradient.to(wide)
        put(weight, moved, ~factor.isnan())
