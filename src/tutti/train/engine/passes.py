"""Forward and backward of a rank's units, one micro-batch and one unit at a time.

Every unit's graph is its own: the stream between units is cut, so that the schedule may run any
range of units in one instruction, forward and backward cut differently. What lies between a unit's
forward and its weight pass is a `Live` entry; when it is gone, so are its activations. A block that
is captured (`graphs`) runs as a graph instead, with its activations in memory of its slot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tutti.accelerator.accelerator import Accelerator
from tutti.accelerator.gradients import SumOf, WeightGradients
from tutti.nn.batch import Batch
from tutti.nn.block import Block
from tutti.nn.build import Unit
from tutti.nn.embedding import Embedding
from tutti.nn.head import Head
from tutti.plan.plan import Replica, covers
from tutti.train.engine.activation_offload import SavedActivations
from tutti.train.engine.recompute import Again, SelectiveOperators
from tutti.train.graphs.block_graphs import BlockGraphs
from tutti.train.graphs.captured_blocks import Graphs

PREDICTION_WEIGHT = 0.3  # of the mean of the extra heads' losses (DeepSeek-V3 begins with 0.3)


@dataclass(slots=True)
class Live:
    """A unit's micro-batch between its forward and its weight pass."""

    x: Tensor | None = None  # what came in; a leaf; None for the embedding
    outputs: dict[str, Tensor] = field(default_factory=dict)  # "stream", "loss", …
    again: list[Again] = field(default_factory=list)
    saved: SavedActivations | None = None
    later: WeightGradients = field(default_factory=WeightGradients)
    captured: BlockGraphs | None = None  # runs as graphs: nothing else is here then


class Passes:
    """The units of one rank, and their micro-batches in flight."""

    def __init__(
        self,
        units: Mapping[int, Unit],
        replica: Replica,
        accelerator: Accelerator,
        selective: SelectiveOperators,
        graphs: Graphs,
        sum_of: SumOf,
    ) -> None:
        self.units, self._replica, self._accelerator = units, replica, accelerator
        self._sum_of = sum_of
        self._selective, self.graphs = selective, graphs
        self.live: dict[tuple[int, int], Live] = {}
        self.streams: dict[tuple[int, int], Tensor] = {}  # (unit entered, micro-batch)
        self.gradients: dict[tuple[int, int], Tensor] = {}  # (unit left upwards, micro-batch)
        self.totals: dict[str, Tensor] = {}  # sums of losses over the step's micro-batches
        self.logps: dict[int, Tensor] = {}  # of the answers of each micro-batch
        self.loss_scale = 1.0

    def begin_step(self, loss_scale: float) -> None:
        """Forget the losses of the step before; the next ones' gradients are so many times."""
        if self.live or self.streams or self.gradients:
            raise RuntimeError(f"a step left {len(self.live)} passes unfinished")
        self.totals.clear()
        self.logps.clear()
        self.loss_scale = loss_scale

    # --- forward ---------------------------------------------------------------------------

    def forward(self, start: int, stop: int, micro_batch: int, batch: Batch) -> None:
        """Run units upwards; their stream waits for the next unit, or to be sent."""
        for unit in range(start, stop):
            captured = self.graphs.of(unit, micro_batch, batch)
            live = self.live[unit, micro_batch] = Live(captured=captured)
            if captured is not None:
                stream = self.streams.pop((unit, micro_batch))
                self.streams[unit + 1, micro_batch] = captured.forward(stream)
                balance = captured.balance()
                if balance is not None:
                    self._count("balance", balance)
                continue
            module = self.units[unit]
            if not isinstance(module, Embedding):
                live.x = self.streams.pop((unit, micro_batch)).detach().requires_grad_()
            with self.graphs.watched(unit):
                self._forward_unit(unit, module, live, batch)
            for name, value in live.outputs.items():
                if name == "stream":
                    self.streams[unit + 1, micro_batch] = value
                elif name == "logps":
                    self.logps[micro_batch] = value.detach()
                else:
                    self._count(name, value)

    def _forward_unit(self, unit: int, module: Unit, live: Live, batch: Batch) -> None:
        recompute = self._replica.recompute
        if live.x is not None and covers(recompute.full, unit):
            names: list[str] = []
            later = live.later  # not `live`, which holds this function: they would not be let go

            def whole(x: Tensor) -> tuple[Tensor, ...]:
                outputs = self._run(module, x, batch, later)
                names[:] = outputs
                return tuple(outputs.values())

            again = Again(whole, (live.x,))
            live.again.append(again)
            results = again.first()
            live.outputs = dict(zip(names, results, strict=True))
            return
        with contextlib.ExitStack() as stack:
            if covers(self._replica.offload.activations, unit):
                kept = [*module.parameters(), *([] if live.x is None else [live.x])]
                live.saved = SavedActivations(self._accelerator, kept)
                stack.enter_context(live.saved.hooks())
            if covers(recompute.selective, unit):
                stack.enter_context(self._selective.recording(live.again))
            live.outputs = self._run(module, live.x, batch, live.later)

    def _run(
        self, module: Unit, x: Tensor | None, batch: Batch, later: WeightGradients
    ) -> dict[str, Tensor]:
        if isinstance(module, Embedding):
            return {"stream": module(batch, later)}
        if isinstance(module, Block):
            y, balance = module(x, batch, later)
            return {"stream": y} | ({} if balance is None else {"balance": balance})
        assert isinstance(module, Head)
        output = module(x, batch, later, gradient_scale=self.loss_scale, starts_backward=True)
        named = {
            "loss": output.loss,
            "predictions": output.predictions_n,
            "balance": output.balance,
            "figures": output.figures,
            "logps": output.logps_s,
        }
        return {name: value for name, value in named.items() if value is not None}

    def _count(self, name: str, value: Tensor) -> None:
        added = value.detach().float()
        self.totals[name] = self.totals[name] + added if name in self.totals else added

    def forget(self, units: range, micro_batch: int) -> None:
        """Drop a forward pass that no backward follows."""
        for unit in units:
            del self.live[unit, micro_batch]

    # --- backward --------------------------------------------------------------------------

    def recompute(self, start: int, stop: int, micro_batch: int) -> None:
        """Compute again what forward threw away."""
        for unit in range(start, stop):
            for again in self.live[unit, micro_batch].again:
                again.recompute()

    def backward_input(self, start: int, stop: int, micro_batch: int) -> None:
        """Run units downwards; weight gradients of linear layers are left for `backward_weight`."""
        for unit in reversed(range(start, stop)):
            live = self.live[unit, micro_batch]
            if live.captured is not None:
                gradient = self.gradients.pop((unit + 1, micro_batch))
                self.gradients[unit, micro_batch] = live.captured.backward_input(
                    gradient, self.loss_scale
                )
                continue
            outputs, gradients = [], []
            for name, value in live.outputs.items():
                if not value.requires_grad:
                    continue
                outputs.append(value)
                if name == "stream":
                    gradients.append(self.gradients.pop((unit + 1, micro_batch)))
                else:
                    gradients.append(self._weight(name, value))
            if not outputs:  # nothing of it is trained, and nobody waits for its gradient
                self.gradients.pop((unit + 1, micro_batch), None)
            else:
                with self.graphs.watched(unit):
                    torch.autograd.backward(outputs, gradients)
            if live.x is not None:
                assert live.x.grad is not None
                self.gradients[unit, micro_batch] = live.x.grad
            later = live.later
            if live.x is None:  # tables: cheap at once, while the gradient above them is here
                later.run(self._sum_of)
            self.live[unit, micro_batch] = Live(later=later)  # activations are gone from here

    def _weight(self, name: str, value: Tensor) -> Tensor:
        weight = self.loss_scale
        if name == "predictions":
            weight *= PREDICTION_WEIGHT / value.numel()
        return torch.full_like(value, weight)

    def backward_weight(self, start: int, stop: int, micro_batch: int) -> frozenset[int]:
        """Compute the weight gradients that were left, onto their sums where there are some.

        Return the units whose gradients the next micro-batch will overwrite.
        """
        lent = []
        for unit in reversed(range(start, stop)):
            live = self.live.pop((unit, micro_batch))
            if live.captured is not None:
                live.captured.backward_weight(self._sum_of)
                lent.append(unit)
                continue
            live.later.run(self._sum_of)
        return frozenset(lent if self.graphs.several else ())

    # --- activations on the host -----------------------------------------------------------

    def fetch_activations(self, units: range, micro_batch: int) -> None:
        """Bring back what was offloaded, before backward asks for it."""
        for saved in self._saved(units, micro_batch):
            saved.fetch()

    def offload_activations(self, units: range, micro_batch: int) -> None:
        """Let what forward saved wait on the host."""
        for saved in self._saved(units, micro_batch):
            saved.offload()

    def _saved(self, units: range, micro_batch: int) -> Iterator[SavedActivations]:
        kept = (self.live[unit, micro_batch].saved for unit in units)
        return (saved for saved in kept if saved is not None)
