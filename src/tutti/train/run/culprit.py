"""Where numbers stopped being finite: all ranks look together, and name one place.

All ranks know that a step was not finite, for they share its sums. First each looks at its weights;
only if all of them are sound do all ranks run the step once more (it changed nothing) with every
module and every instruction watched. Each rank tells the first thing it saw; what came from others
counts less than what was made here. No rank takes a way through this that another does not.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tutti.ranks.links import Handle, Then
from tutti.schedule.instruction import Instruction, Op, What
from tutti.train.engine.engine import Engine
from tutti.train.state.state import SpanState

_INCOMING = frozenset({Op.RECEIVE, Op.REDUCE_GRADIENTS, Op.GATHER_PARAMETERS, Op.SYNC_TIED})
_OF_WEIGHTS = frozenset({Op.BACKWARD_WEIGHT, Op.CLIP_NORM, Op.FETCH, Op.OFFLOAD, *_INCOMING})


class Finding(NamedTuple):
    """What a rank saw first; the least of all ranks' is the culprit."""

    order: tuple[int, ...]
    text: str
    where: str


_LAST = sys.maxsize  # after all calls of a unit's modules


class _Sort:
    """Kinds of findings, the most telling first."""

    KEPT, WEIGHTS, FORWARD, BACKWARD, GRADIENT, CAME = range(6)


Gather = Callable[[Any], list[Any] | None]  # every rank's value, on every rank


def find_culprit(engine: Engine, step: int, again: Callable[[], None], gather: Gather) -> str:
    """Return where the numbers of a step stopped being finite. All ranks call it.

    `again` runs the step once more.
    """
    where = f"rank {engine.seat.rank} ({engine.seat.place.chip})"
    faults = _of_all(gather, _broken_weights(engine, where))
    if not faults:
        faults = _of_all(gather, _watched(engine, again, where))
    text = "no single module shows it when the step is repeated"
    if faults:
        first = [f for f in faults if f.order == faults[0].order]
        text = f"{first[0].text} on {' and '.join(f.where for f in first)}"
    return f"step {step + 1}: loss or gradients are not finite; {text}"


def _of_all(gather: Gather, own: Finding | None) -> list[Finding]:
    """Return the findings of all ranks, the most telling first; each rank comes by here."""
    told = gather(own) or []
    return sorted(Finding(tuple(f[0]), f[1], f[2]) for f in told if f is not None)


def _unit(name: str) -> int:
    digits = [part for part in name.split(".") if part.isdigit()]
    return int(digits[0]) if digits else 0


def _broken_weights(engine: Engine, where: str) -> Finding | None:
    """Look at what this rank's optimizer keeps, then at what its modules have."""
    for state in engine.parameters.all_states():
        kept = state.optimizer.tensors().get("master")
        if kept is not None and not _finite(kept):
            at = state.kept.start + int((~torch.isfinite(kept)).nonzero()[0])
            ends = itertools.accumulate(block.size for block in state.span.blocks)
            block = next(b for b, end in zip(state.span.blocks, ends, strict=True) if at < end)
            return _weights(_Sort.KEPT, f"{block.unit}.{block.name}", where)
    for name, parameter in engine.model.named_parameters():
        if parameter.untyped_storage().size() and not _finite(parameter):
            return _weights(_Sort.WEIGHTS, name.removeprefix("units."), where)
    return None


def _weights(sort: int, name: str, where: str) -> Finding:
    text = f"the weights of {name} were not finite before the step"
    return Finding((sort, _unit(name)), text, where)


def _watched(engine: Engine, again: Callable[[], None], where: str) -> Finding | None:
    """Run the step again and return what was not finite first."""
    watch = _Watch(engine, where)
    graphs = nullcontext() if engine.graphs is None else engine.graphs.suspended()
    with graphs, watch.on():
        again()
    return watch.first


class _Watch:
    """Looks at modules and instructions while a step runs; remembers the first that is wrong."""

    def __init__(self, engine: Engine, where: str) -> None:
        self._engine, self._where = engine, where
        self.first: Finding | None = None
        self._module: tuple[str, int] | None = None  # whose input was finite and its output not
        self._calls = 0
        self._under_way: set[int] = set()  # received tensors that have not come yet

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watch for as long as this lasts."""
        engine = self._engine
        hooks = [
            module.register_forward_hook(self._hook(name.removeprefix("units.")))
            for name, module in engine.model.named_modules()
            if not any(True for _ in module.children())
        ]
        engine.around = self._around
        try:
            yield
        finally:
            engine.around = None
            for hook in hooks:
                hook.remove()

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            del module
            self._calls += 1
            tensors = [output] if isinstance(output, Tensor) else output
            if self._module or not isinstance(tensors, (tuple, list)):
                return
            if not all(map(_finite, tensors)) and all(map(_finite, inputs)):
                self._module = (name, self._calls)

        return hook

    def _around(self, entry: Instruction, run: Callable[[], Handle]) -> Handle:
        self._look(entry, above=entry.start - 1)
        handle = run()
        if entry.op not in _INCOMING:
            self._look(entry, above=entry.stop - 1)
            return handle
        came: Tensor | None = None
        if entry.op is Op.RECEIVE:
            came = self._held(entry.what)[entry.start, entry.micro_batch]
            self._under_way.add(id(came))

        def arrived() -> None:
            self._under_way.discard(id(came))
            self._look(entry, above=entry.start, came=True)

        return Then([handle], arrived)

    def _held(self, what: What) -> dict[tuple[int, int], Tensor]:
        passes = self._engine.passes
        return passes.streams if what is What.ACTIVATIONS else passes.gradients

    def _look(self, entry: Instruction, *, above: int, came: bool = False) -> None:
        """Remember an instruction before or after which something is not finite, if it is first.

        Forward has come to above the unit `above` by now.
        """
        if self.first is not None:
            return
        passes = self._engine.passes
        held = [*passes.streams.values(), *passes.gradients.values(), *passes.totals.values()]
        broken = not all(_finite(t) for t in held if id(t) not in self._under_way)
        gradient = ""
        if not broken and entry.op in _OF_WEIGHTS:
            gradient = self._broken_gradient()
        if broken or gradient:
            self.first = self._finding(entry, gradient, above, came=came)

    def _broken_gradient(self) -> str:
        """Return the last unit's tensor whose gradient is not finite."""
        for state in reversed(self._engine.parameters.all_states()):
            if all(map(_finite, _gradients(state))):
                continue
            reduced = [block for block, part in state.gradient_parts() if not _finite(part)]
            block = (reduced or state.span.blocks)[-1]
            return f"{block.unit}.{block.name}"
        return ""

    def _sources(self, entry: Instruction) -> str:
        """Say from which ranks something came."""
        ranks: set[int] = set()
        if entry.op is Op.RECEIVE:
            ranks = set(self._engine.boundaries.sources(entry.start, entry.what))
        elif entry.op is not Op.SYNC_TIED:
            ranks = self._engine.parameters.holders(entry) - {self._engine.seat.rank}
        named = [f"rank {rank}" for rank in sorted(ranks)]
        return f" from {' or '.join(named)}" if named else ""

    def _finding(self, entry: Instruction, gradient: str, above: int, *, came: bool) -> Finding:
        if came:
            text = f"what came with '{entry}'{self._sources(entry)} was not finite"
            return Finding((_Sort.CAME, entry.start), text, self._where)
        if gradient:
            text = f"first in backward: the gradient of {gradient}"
            return Finding((_Sort.GRADIENT, -_unit(gradient)), text, self._where)
        if self._module is not None:
            name, call = self._module
            text = f"first in forward: module {name}"
            return Finding((_Sort.FORWARD, _unit(name), call), text, self._where)
        if entry.op is Op.FORWARD or entry.what is What.ACTIVATIONS:
            text = f"first in forward: at '{entry}'"
            return Finding((_Sort.FORWARD, above, _LAST), text, self._where)
        text = f"first in backward: at '{entry}'"
        return Finding((_Sort.BACKWARD, -entry.stop), text, self._where)


def _gradients(state: SpanState) -> list[Tensor | None]:
    """Return what there is of the step's gradients now, reduced or not, wherever it lies."""
    on_host = None if state.host_sum is None else state.host_sum.total
    return [state.gradient, state.total, on_host, *(state.loose or {}).values()]


def _finite(value: Any) -> bool:
    return (
        not isinstance(value, Tensor)
        or not value.is_floating_point()
        or bool(torch.isfinite(value).all())
    )
