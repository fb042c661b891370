"""Trains on the second device with and without graphs; prints what each scenario came to as JSON.

One process for all scenarios: the device is one per process, and starting it is what takes time.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.support import python_graphs
from tests.support.any_plan import FOUR, GPIPE, INTERLEAVED, PLAIN, ZERO, Draft
from tests.support.graph_passes import DEVICE, every_order, mistakes, on_device, orders
from tests.support.threads import ThreadLinks, World
from tests.support.training import engine_of, in_precision, settings
from tutti.accelerator import open_accelerator
from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.registry import Implementation, register, unregister
from tutti.nn.block import Block
from tutti.nn.norm import Norm
from tutti.plan.plan import Plan, Recompute
from tutti.schedule.instruction import Instruction, Lane
from tutti.train.engine.engine import Engine
from tutti.train.graphs.captured_blocks import CaptureSettings

STEPS = 3


class Outcome(dict[str, Any]):
    """What a training came to, in plain values."""


@contextmanager
def counted_replays() -> Iterator[list[int]]:
    count, replay = [0], python_graphs.Graph.replay

    def counting(self: python_graphs.Graph) -> None:
        count[0] += 1
        replay(self)

    python_graphs.Graph.replay = counting  # type: ignore[method-assign]
    try:
        yield count
    finally:
        python_graphs.Graph.replay = replay  # type: ignore[method-assign]


def train(
    plan: Plan,
    mode: str,
    *,
    packed: bool = False,
    between: Callable[[Engine, int], None] | None = None,
) -> Outcome:
    accelerator = open_accelerator(DEVICE)
    said: list[str] = []
    chosen = CaptureSettings(mode=mode, say=said.append)  # type: ignore[arg-type]

    def one(links: ThreadLinks) -> Outcome:
        engine = engine_of(plan, plan.model.spec, links, accelerator=accelerator, capture=chosen)
        gc.collect()  # engines of other scenarios
        accelerator.reset_peak()
        found: dict[str, Any] = {"losses": [], "norms": [], "balances": []}
        for step in range(STEPS):
            if between is not None:
                between(engine, step)
            batches = on_device(accelerator, engine, step, packed=packed)
            result = engine.step(batches, settings())
            found["losses"].append(result.loss)
            found["norms"].append(result.gradient_norm)
            found["balances"].append(result.balance)
        resting = accelerator.memory().allocated
        weights = [float(part.double().sum().cpu()) for _, _, part in engine.weights()]
        assert engine.graphs is not None
        return Outcome(
            **found,
            weights=weights,
            said=said,
            moving=accelerator.memory().peak - resting,
            held=engine.graphs.held_bytes,
            extra=engine.graphs.extra_bytes,
        )

    with counted_replays() as count:
        outcome: Outcome = World(1).run(one)[0]
    outcome["replays"] = count[0]
    return outcome


def plan_of(kind: Any, micro_batches: int, precision: str, **words: Any) -> Plan:
    draft = Draft(**words.pop("model", {}))
    line = draft.line((FOUR, [{"sequences": 2, **words}]), micro_batches=micro_batches)
    return in_precision(line.plan(kind), precision)


class _EveryExpert(torch.autograd.Function):
    """The products of all experts with all rows, of which each row takes its own."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, own_te: Tensor, later: WeightGradients
    ) -> Tensor:
        ctx.save_for_backward(x, own_te)
        ctx.weight, ctx.later = weight, later
        return torch.einsum("te,ti,eoi->to", own_te, x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x, own_te), weight, (gradient,) = ctx.saved_tensors, ctx.weight, gradients
        ctx.later.defer(weight, lambda: torch.einsum("te,to,ti->eoi", own_te, gradient, x))
        return torch.einsum("te,to,eoi->ti", own_te, gradient, weight), None, None, None


def without_host(
    x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None, *, later: Any = None
) -> Tensor:
    """Grouped products that read nothing on the host."""
    assert bias is None
    ends = counts.cumsum(0).unsqueeze(0)
    rows = (x.new_ones(x.shape[0], dtype=torch.long).cumsum(0) - 1).unsqueeze(1)
    own_te = ((rows < ends) & (rows >= ends - counts)).to(x.dtype)
    y: Tensor = _EveryExpert.apply(x, weight, own_te, later or WeightGradients())
    return y


@contextmanager
def _grouped_without_host() -> Iterator[None]:
    register(
        Implementation(
            operator="grouped_linear", name="all", function=without_host, devices=(DEVICE,), rank=9
        )
    )
    try:
        yield
    finally:
        unregister("grouped_linear", "all")


# --- trainings ---------------------------------------------------------------------------------


def same() -> dict[str, Any]:
    plans = {
        "one micro-batch": plan_of(PLAIN, 1, "pure_bf16"),
        "one after the other": plan_of(PLAIN, 3, "bf16"),
        "three in flight": plan_of(GPIPE, 3, "fp32"),
    }
    found = {name: {m: train(plan, m) for m in ("off", "on")} for name, plan in plans.items()}
    experts = {"experts_in": (0, 1), "balance_loss": 0.1}
    plans = {
        "experts": plan_of(PLAIN, 1, "fp32", model=experts),
        "experts in flight": plan_of(GPIPE, 3, "fp32", model=experts),
    }
    with _grouped_without_host():
        for name, plan in plans.items():
            found[name] = {m: train(plan, m) for m in ("off", "on")}
    return found


def refused() -> dict[str, Any]:
    first = Recompute(full=((1, 2),))
    plans = {
        "recomputed": plan_of(PLAIN, 2, "fp32", recompute=first),
        "experts": plan_of(PLAIN, 2, "fp32", model={"experts_in": (1,)}),
    }
    found = {name: {m: train(plan, m) for m in ("off", "on")} for name, plan in plans.items()}
    plan = plan_of(PLAIN, 2, "fp32")
    found["packed"] = {m: train(plan, m, packed=True) for m in ("off", "on")}
    return found


def host_read() -> dict[str, Any]:
    """A norm that looks at its numbers on the host cannot be captured."""
    plain = Norm.beside

    def looking(self: Norm, x: Tensor) -> tuple[Tensor, Tensor]:
        y, x = plain(self, x)
        return y if float(y.detach().sum()) > -1e30 else y + 0.0, x

    plan = plan_of(GPIPE, 2, "fp32")
    Norm.beside = looking  # type: ignore[method-assign]
    try:
        return {m: train(plan, m) for m in ("off", "on")}
    finally:
        Norm.beside = plain  # type: ignore[method-assign]


class _Looks(torch.autograd.Function):
    """Passes on what it gets; its backward looks at the numbers on the host."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        del ctx
        (gradient,) = gradients
        return gradient if float(gradient.sum()) > -1e30 else -gradient


def host_read_in_backward() -> dict[str, Any]:
    plain = Norm.beside

    def looking(self: Norm, x: Tensor) -> tuple[Tensor, Tensor]:
        y, x = plain(self, x)
        return _Looks.apply(y), x

    plan = plan_of(GPIPE, 2, "fp32")
    Norm.beside = looking  # type: ignore[method-assign]
    try:
        return {m: train(plan, m) for m in ("off", "on")}
    finally:
        Norm.beside = plain  # type: ignore[method-assign]


def parameters_move() -> dict[str, Any]:
    """Parameters that are put elsewhere between steps are read there."""

    def move(engine: Engine, step: int) -> None:
        if step == STEPS - 1:
            block = next(m for m in engine.model.modules() if isinstance(m, Block))
            for parameter in block.parameters():
                parameter.raw = parameter.raw.clone()  # type: ignore[attr-defined]

    plan = plan_of(PLAIN, 1, "fp32")
    return {m: train(plan, m, between=move) for m in ("off", "on")}


def evaluated() -> dict[str, Any]:
    """Losses between steps come from the parameters as they are, without graphs."""
    plan, seen = plan_of(GPIPE, 2, "fp32"), {"off": [], "on": []}
    found = {}
    for mode, losses in seen.items():

        def look(engine: Engine, step: int, losses: list[float] = losses) -> None:  # type: ignore[assignment]
            batches = on_device(engine.accelerator, engine, 7, packed=False)
            losses.append(engine.evaluate(batches).loss)

        found[mode] = train(plan, mode, between=look)
    return {**found, "seen": seen}


def stages() -> dict[str, Any]:
    """Two ranks of a pipeline: what leaves a chunk is on its way while graphs run anew."""
    two: Any = (((0, 3),), [{}]), (((3, 6),), [{}])
    apart: Any = (((0, 2), (3, 4)), [{}]), (((2, 3), (4, 6)), [{}])
    plans = {
        "zero bubble": Draft(4).line(*two, micro_batches=4).plan(ZERO),
        "interleaved": Draft(4).line(*apart, micro_batches=4).plan(INTERLEAVED),
    }
    return {
        name: {mode: _two_ranks(in_precision(plan, "fp32"), mode) for mode in ("off", "on")}
        for name, plan in plans.items()
    }


def _sends_late(links: ThreadLinks) -> None:
    """Let messages be read when they are received, as a network may: not when they are sent."""

    def exchange(sends: Any, receives: Any, channel: str) -> Any:
        handle = plain((), receives, channel)
        with links.world.lock:
            for peer, tensor in sends:
                links.world.mail[links.rank, peer, channel].append(tensor)
            links.world.lock.notify_all()
        return handle

    plain, links.exchange = links.exchange, exchange  # type: ignore[method-assign]


def _two_ranks(plan: Plan, mode: str) -> Outcome:
    accelerator, one_at_a_time = open_accelerator(DEVICE), threading.Lock()
    said: list[str] = []

    def one(links: ThreadLinks) -> tuple[list[Any], list[float]]:
        _sends_late(links)
        chosen = CaptureSettings(mode=mode, say=said.append)  # type: ignore[arg-type]
        engine = engine_of(plan, plan.model.spec, links, accelerator=accelerator, capture=chosen)
        start = engine.start

        def alone(entry: Instruction, handler: Any) -> Any:
            """Backward of all ranks runs in one thread of torch's: never two at once."""
            if entry.lane is not Lane.COMPUTE:
                return start(entry, handler)
            with one_at_a_time:
                return start(entry, handler)

        engine.start = alone  # type: ignore[method-assign]
        results = [
            engine.step(on_device(accelerator, engine, step, packed=False), settings())
            for step in range(STEPS)
        ]
        return results, [float(part.double().sum().cpu()) for _, _, part in engine.weights()]

    with counted_replays() as count:
        ranks = World(plan.num_ranks).run(one)
    return Outcome(
        losses=[r.loss for results, _ in ranks for r in results],
        norms=[r.gradient_norm for results, _ in ranks for r in results],
        weights=[weight for _, weights in ranks for weight in weights],
        said=said,
        replays=count[0],
    )


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    function.__name__: function
    for function in (
        same,
        refused,
        host_read,
        host_read_in_backward,
        parameters_move,
        stages,
        evaluated,
        orders,
        every_order,
        mistakes,
    )
}


def main(names: list[str]) -> None:
    gc.freeze()  # what was imported: every training collects what those before it left
    usual = [name for name in SCENARIOS if name != every_order.__name__]
    print(json.dumps({name: SCENARIOS[name]() for name in names or usual}))


if __name__ == "__main__":
    main(sys.argv[1:])
