"""One block in one slot as graphs: forward, backward and weight pass, each captured at first use.

Lifetimes are what makes it right, so they are few and fixed. A slot serves one micro-batch after
the other, and within each the passes of its blocks run upwards, then downwards: the graphs of
forward and backward share the slot's pool, for they are replayed in the order of their capture.
Weight passes may come at any time after their backward: they write into memory of their own, and
what they read is held. A gradient that cannot be written into given memory, such as that of
grouped products, is made beside the graph: a copy would cost more than its launch. Parameters are
read where they lie, through leaves made for these graphs alone, so that backward meets no stream
but the capture's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tutti.accelerator.gradients import Deferred, SumOf, WeightGradients
from tutti.nn.batch import Batch
from tutti.nn.block import Block


class Capture(Protocol):
    """Turns work into a graph; what it returns has its numbers after a replay."""

    def __call__(self, work: Callable[[], Any], pool: object) -> Callable[[], Any] | None:
        """Return the replay; None if it cannot be captured: the work is then done as it is."""


class Slot:
    """The memory of the graphs of one micro-batch in flight, and the tensors between them."""

    def __init__(self, pool: object) -> None:
        self.pool = pool
        self._between: dict[int, Tensor] = {}

    def keep(self, tensor: Tensor) -> Tensor:
        """Let a tensor stay where it is: the next block reads it there."""
        self._between[id(tensor)] = tensor
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        """Tell whether a tensor lies where graphs of this slot write it."""
        return self._between.get(id(tensor)) is tensor


class Input:
    """A tensor that a graph reads: where its maker writes it, or a copy in a fixed place."""

    def __init__(self, first: Tensor, slot: Slot) -> None:
        self._comes_as = first if slot.holds(first) else None
        self.tensor = first.detach() if self._comes_as is not None else torch.empty_like(first)
        self.take(first)

    def take(self, value: Tensor) -> None:
        """Let the graph see a value."""
        if value is not self._comes_as:
            self.tensor.copy_(value.detach())


class BlockGraphs:
    """The passes of one block for the micro-batches of one slot.

    `gradients` are the block's weight gradients, by name, shared by its slots: the next weight pass
    overwrites them. What leaves the chunk is copied, for a message may still be on its way when the
    next micro-batch comes.
    """

    def __init__(
        self,
        block: Block,
        batch: Batch,
        slot: Slot,
        capture: Capture,
        gradients: dict[str, Tensor],
        weights_pool: object,
        *,
        is_lowest: bool,
        is_highest: bool,
    ) -> None:
        self._block, self._batch, self._slot, self._capture = block, batch, slot, capture
        self._gradients, self._weights_pool = gradients, weights_pool
        self._is_lowest, self._is_highest = is_lowest, is_highest
        self._owners: dict[str, nn.Parameter] = dict(block.named_parameters())
        self._leaves = {
            name: owner.detach().requires_grad_(owner.requires_grad)
            for name, owner in self._owners.items()
        }
        self._names = {id(leaf): name for name, leaf in self._leaves.items()}
        self._later = WeightGradients()
        self._held: list[Deferred] = []  # keeps what the weight pass reads from being used anew
        self._apart: list[Deferred] = []  # those of them that go onto no sum
        self._unplaced: set[str] = set()  # parameters whose gradients choose their own memory
        self._small: dict[str, Tensor] = {}  # gradients that backward itself makes
        self._made: dict[str, Tensor] = {}  # all gradients, after a weight pass
        self._x: Input | None = None
        self._gradient: Input | None = None
        self._leaf: Tensor | None = None
        self._y: Tensor | None = None  # with its way back, until backward is captured
        self._balance: Tensor | None = None  # the router's loss, likewise
        self._out: Tensor | None = None
        self._loss: Tensor | None = None
        self._loss_gradient: Tensor | None = None
        self._loss_scale: float | None = None  # what that holds
        self._back: Tensor | None = None
        self._replays: dict[str, Callable[[], Any]] = {}

    def _run(
        self, work: Callable[[], None], pool: object, prepare: Callable[[], None] | None = None
    ) -> bool:
        """Replay work, captured if it is new; tell whether it was new.

        Work keeps what it makes in this object: a replay that held it would hold activations. If it
        cannot be captured, it is done as it is, after what a failed capture may have spent.
        """
        name = work.__name__
        if name in self._replays:
            self._replays[name]()
            return False
        replay = self._capture(work, pool)
        if replay is None:
            if prepare is not None:
                prepare()
            work()
        else:
            self._replays[name] = replay
            replay()
        return True

    # --- passes ----------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream above the block."""
        if self._x is None:
            self._x = Input(x, self._slot)
            self._leaf = self._x.tensor.detach().requires_grad_()
        else:
            self._x.take(x)
        if self._run(self._go_up, self._slot.pool):
            assert self._y is not None
            self._out = self._slot.keep(self._y.detach())
            if self._balance is not None:
                self._loss = self._balance.detach()
                self._loss_gradient = torch.empty_like(self._loss)
        assert self._out is not None
        return self._out.clone() if self._is_highest else self._out

    def balance(self) -> Tensor | None:
        """Return the router's loss of the last forward, if any."""
        return None if self._loss is None else self._loss.clone()

    def _go_up(self) -> None:
        arguments = (self._leaf, self._batch, self._later)
        with torch.enable_grad():
            self._y, self._balance = functional_call(self._block, self._leaves, arguments)

    def backward_input(self, gradient: Tensor, loss_scale: float = 1.0) -> Tensor:
        """Return the gradient below the block; that of the router's loss is `loss_scale`."""
        if self._loss_gradient is not None and self._loss_scale != loss_scale:
            self._loss_gradient.fill_(loss_scale)
            self._loss_scale = loss_scale
        if self._gradient is None:
            self._gradient = Input(gradient, self._slot)
        else:
            self._gradient.take(gradient)
        if self._run(self._go_down, self._slot.pool, prepare=self._go_up):
            assert self._back is not None
            self._slot.keep(self._back)
            # activations are gone from here; what the weight pass reads is held
            self._y = self._balance = None
            self._held = self._later.take()
            self._unplaced = {
                self._names[id(deferred.weight)] for deferred in self._held if not deferred.write
            }
        assert self._back is not None
        return self._back.clone() if self._is_lowest else self._back

    def _go_down(self) -> None:
        assert self._y is not None
        assert self._leaf is not None
        assert self._gradient is not None
        self._later.take()  # of a capture that failed
        outputs, gradients = [self._y], [self._gradient.tensor]
        if self._balance is not None and self._loss_gradient is not None:
            outputs.append(self._balance)
            gradients.append(self._loss_gradient)
        trained = {name: leaf for name, leaf in self._leaves.items() if leaf.requires_grad}
        self._back, *rest = torch.autograd.grad(
            outputs, [self._leaf, *trained.values()], gradients, allow_unused=True
        )
        of_trained: list[Tensor | None] = list(rest)  # an unused leaf has none
        self._small = {n: g for n, g in zip(trained, of_trained, strict=True) if g is not None}

    def backward_weight(self, sum_of: SumOf) -> None:
        """Add to the sums of the block's parameters, or leave gradients with them.

        Those are lent: the next weight pass of the block overwrites them. Sums lie elsewhere in
        each step, so products that go straight onto them are no graph.
        """
        apart = self._add(sum_of)
        self._leave(self._fresh(apart))
        apart = [d for d in apart if self._names[id(d.weight)] not in self._unplaced]
        if not apart:
            self._leave(self._small)
            return
        self._apart = apart
        for name in {self._names[id(deferred.weight)] for deferred in apart}:
            if name not in self._gradients:
                self._gradients[name] = torch.empty_like(self._leaves[name], requires_grad=False)
        self._run(self._weigh, self._weights_pool)
        self._leave(self._made)

    def _leave(self, gradients: dict[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            self._owners[name].grad = gradient

    @torch.no_grad()
    def _add(self, sum_of: SumOf) -> list[Deferred]:
        """Add gradients to their sums; return those that have none, the same in every pass."""
        apart = []
        for deferred in self._held:
            total = sum_of(self._owners[self._names[id(deferred.weight)]])
            if total is None:
                apart.append(deferred)
            else:
                deferred.onto(total)
        return apart

    @torch.no_grad()
    def _fresh(self, apart: list[Deferred]) -> dict[str, Tensor]:
        """Return the gradients that no graph makes."""
        gradients: dict[str, Tensor] = {}
        for deferred in apart:
            name = self._names[id(deferred.weight)]
            if name in self._unplaced:
                made = deferred.compute().reshape(deferred.weight.shape)
                gradients[name] = gradients[name].add_(made) if name in gradients else made
        return gradients

    @torch.no_grad()
    def _weigh(self) -> None:
        self._made = dict(self._small)
        for deferred in self._apart:
            name = self._names[id(deferred.weight)]
            if name in self._made:
                known = self._made[name]
                known.add_(deferred.compute().reshape(known.shape))
            else:
                self._made[name] = self._gradients[name]
                deferred.into(self._made[name])
