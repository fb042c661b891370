"""Passes of blocks as graphs on the second device, in any order that a schedule may have.

What comes of mistakes about lifetimes is here, too: it must show.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.support import python_graphs
from tests.support.any_plan import Draft
from tests.support.threads import ThreadLinks, World
from tests.support.training import batches_of, engine_of, in_precision
from tutti.accelerator import Accelerator, open_accelerator
from tutti.accelerator.gradients import SumOf
from tutti.nn.batch import Batch
from tutti.schedule.instruction import Instruction, Op
from tutti.train.engine.engine import Batches, Engine
from tutti.train.engine.passes import Passes
from tutti.train.graphs.block_graphs import BlockGraphs, Slot
from tutti.train.graphs.captured_blocks import CaptureSettings, Graphs

DEVICE = "slate"


def on_device(accelerator: Accelerator, engine: Engine, step: int, *, packed: bool) -> Batches:
    inner = batches_of(engine, step, packed=packed)

    def moved(micro_batch: int) -> Batch:
        host = inner(micro_batch)
        assert host.targets_t is not None
        return Batch.of(
            engine.spec,
            accelerator.to_device(host.tokens_t),
            host.lengths,
            targets_t=accelerator.to_device(host.targets_t),
            row_length=engine.plan.job.sequence_length,
        )

    return moved


def any_order(seed: int, units: int, micro_batches: int, most: int) -> list[Instruction]:
    """Passes in a random order that respects what depends on what, at most so many in flight."""
    pick = random.Random(seed)
    up = dict.fromkeys(range(micro_batches), 0)  # units that went forward
    down = dict.fromkeys(range(micro_batches), units)  # the lowest that came back
    weighed: dict[int, set[int]] = {m: set() for m in range(micro_batches)}
    found = []
    while any(len(done) < units for done in weighed.values()):
        flying = [m for m in up if up[m] and len(weighed[m]) < units]
        able: list[tuple[Op, int, int]] = []
        for m in up:
            if 0 < up[m] < units or (up[m] == 0 and len(flying) < most):
                able.append((Op.FORWARD, m, up[m]))
            if up[m] == units and down[m]:
                able.append((Op.BACKWARD_INPUT, m, down[m] - 1))
            waiting = set(range(down[m], units)) - weighed[m]
            able += [(Op.BACKWARD_WEIGHT, m, unit) for unit in waiting]
        op, m, unit = pick.choice(able)
        found.append(Instruction(op, m, unit, unit + 1))
        if op is Op.FORWARD:
            up[m] += 1
        elif op is Op.BACKWARD_INPUT:
            down[m] -= 1
        else:
            weighed[m].add(unit)
    return found


def gradients(
    order: list[Instruction], micro_batches: int, mode: str, *, summed: bool = False
) -> list[float]:
    """Sums of the gradients of three rounds of passes, per parameter and round.

    With `summed` passes add to them by themselves, as far as they can.
    """
    accelerator = open_accelerator(DEVICE)
    draft = Draft(3).line((((0, 5),), [{"sequences": 1}]), micro_batches=micro_batches)
    plan = in_precision(draft.plan(), "fp32")

    def one(links: ThreadLinks) -> list[float]:
        engine = engine_of(plan, plan.model.spec, links, accelerator=accelerator)
        units = engine.model.by_number()
        graphs = Graphs(
            units, engine.seat, engine.parameters, order, accelerator,
            CaptureSettings(mode=mode), token_bytes=4,  # type: ignore[arg-type]
        )  # fmt: skip
        selective: Any = engine.accelerator.operators
        totals: dict[int, Tensor] = {}

        def sum_of(weight: Tensor) -> Tensor | None:
            if not summed or weight.dim() == 1:
                return None
            return totals.setdefault(id(weight), torch.zeros_like(weight, requires_grad=False))

        passes = Passes(units, engine.seat.replica, accelerator, selective, graphs, sum_of)
        found: list[float] = []
        for step in range(3):
            totals.clear()
            graphs.begin_step()
            passes.begin_step(1.0)
            batches = on_device(accelerator, engine, step, packed=False)
            found += _round(passes, order, [batches(m) for m in range(micro_batches)], totals)
        return found

    result: list[float] = World(1).run(one)[0]
    return result


def _round(
    passes: Passes, order: list[Instruction], batches: list[Batch], totals: dict[int, Tensor]
) -> list[float]:
    sums: dict[tuple[int, str], Tensor] = {}
    for op, m, start, stop, *_ in order:
        if op is Op.FORWARD:
            passes.forward(start, stop, m, batches[m])
        elif op is Op.BACKWARD_INPUT:
            passes.backward_input(start, stop, m)
        else:
            passes.backward_weight(start, stop, m)
            for name, parameter in passes.units[start].named_parameters():
                if parameter.grad is not None:
                    known = sums.get((start, name))
                    own = parameter.grad.detach().clone()
                    sums[start, name] = own if known is None else known + own
                    parameter.grad = None
    for unit, module in passes.units.items():
        for name, parameter in module.named_parameters():
            if id(parameter) in totals:
                known = sums.get((unit, name))
                own = totals[id(parameter)]
                sums[unit, name] = own if known is None else known + own
    passes.gradients.clear()
    return [float(total.double().norm().cpu()) for _, total in sorted(sums.items(), key=_key)]


def _key(item: tuple[tuple[int, str], Tensor]) -> tuple[int, str]:
    return item[0]


def orders() -> dict[str, Any]:
    """Three orders, of which passes add up one by themselves."""
    return {f"{seed} {summed}": _both(seed, summed) for seed, summed in enumerate((0, 1, 0))}


def every_order() -> dict[str, Any]:
    return {f"{seed} {summed}": _both(seed, summed) for seed in range(3) for summed in (0, 1)}


def _both(seed: int, summed: int) -> dict[str, list[float]]:
    order = any_order(seed, 5, 5, 2 + seed % 2)
    return {mode: gradients(order, 5, mode, summed=bool(summed)) for mode in ("off", "on")}


def mistakes() -> dict[str, Any]:
    """What happens when lifetimes are not what they must be: it must show."""
    order = any_order(0, 5, 6, 3)
    found = {"right": gradients(order, 6, "on")}
    with _one_pool():
        found["one pool for all slots"] = gradients(order, 6, "on")
    with _nothing_held():
        found["weight passes hold nothing"] = gradients(order, 6, "on")
    return found


@contextmanager
def _one_pool() -> Iterator[None]:
    plain, pool = Slot.__init__, python_graphs.Pool()

    def shared(self: Slot, own: object) -> None:
        plain(self, pool)

    Slot.__init__ = shared  # type: ignore[method-assign]
    try:
        yield
    finally:
        Slot.__init__ = plain  # type: ignore[method-assign]


def _gone() -> Tensor:
    raise AssertionError("a graph has it by now")


@contextmanager
def _nothing_held() -> Iterator[None]:
    plain = BlockGraphs.backward_weight

    def forgetting(self: BlockGraphs, sum_of: SumOf) -> None:
        plain(self, sum_of)
        self._held = [d._replace(compute=_gone, write=None, add=None) for d in self._held]
        self._apart = self._held

    BlockGraphs.backward_weight = forgetting  # type: ignore[method-assign]
    try:
        yield
    finally:
        BlockGraphs.backward_weight = plain  # type: ignore[method-assign]
