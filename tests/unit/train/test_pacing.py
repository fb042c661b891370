"""Emulated chips under the engine: declared time, dilated time, and passes that only send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.support.any_plan import PLANS, Draft
from tests.support.every_other import every_other
from tests.support.threads import ThreadLinks, World
from tests.support.training import (
    batches_of,
    engine_of,
    in_precision,
    settings,
    train_threads,
    whole_tensors,
)
from tutti.accelerator.devices.emulated import EmulatedAccelerator
from tutti.errors import InputError
from tutti.plan.plan import Plan
from tutti.schedule.instruction import Instruction, Lane, Op

SECONDS = {
    Op.FORWARD: 1e-4,
    Op.RECOMPUTE: 1e-4,
    Op.BACKWARD_INPUT: 2e-4,
    Op.BACKWARD_WEIGHT: 1e-4,
    Op.STEP: 3e-4,
}


class Recorded:
    """Links that note every message and collective."""

    def __init__(self, links: ThreadLinks) -> None:
        self._links, self.rank, self.world = links, links.rank, links.world
        self.notes: Counter[Any] = Counter()

    def exchange(self, sends: Sequence[Any], receives: Sequence[Any], channel: str) -> Any:
        for way, pairs in (("send", sends), ("receive", receives)):
            self.notes.update((way, peer, x.shape, x.dtype, channel) for peer, x in pairs)
        return self._links.exchange(sends, receives, channel)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._links, name)
        if name == "group":  # what a block does inside is a part of its time
            return call  # type: ignore[no-any-return]

        def noted(ranks: Sequence[int], x: torch.Tensor, *more: Any, **words: Any) -> Any:
            self.notes[name, tuple(ranks), x.shape, x.dtype] += 1
            return call(ranks, x, *more, **words)

        return noted


def notes_of(plan: Plan, *, stub: bool) -> list[Counter[Any]]:
    spec = plan.model.spec
    assert spec is not None

    def one(links: ThreadLinks) -> Counter[Any]:
        recorded = Recorded(links)
        engine = engine_of(plan, spec, recorded, stub=stub)  # type: ignore[arg-type]
        before = [parameter.clone() for parameter in engine.model.parameters()]
        for step in range(2):
            engine.step(batches_of(engine, step), settings())
        if stub:
            for old, new in zip(before, engine.model.parameters(), strict=True):
                assert not new.untyped_storage().size() or torch.equal(old, new)
        return recorded.notes

    return World(plan.num_ranks).run(one)


@pytest.mark.parametrize("name", every_other(PLANS, first=1))
def test_a_stub_sends_what_the_engine_sends(name: str) -> None:
    plan = in_precision(PLANS[name], "bf16")
    assert notes_of(plan, stub=True) == notes_of(plan, stub=False)


def two_stages() -> Plan:
    plan = Draft().line((((0, 3),), [{}]), (((3, 4),), [{"pool": "slow"}]), micro_batches=4).plan()
    return in_precision(plan, "fp32")


@pytest.mark.parametrize("stub", [False, True])
def test_compute_takes_its_declared_time(stub: bool) -> None:
    plan = two_stages()
    spec = plan.model.spec
    assert spec is not None
    asked: list[Instruction] = []

    def durations(entry: Instruction) -> float:
        asked.append(entry)
        return SECONDS[entry.op]

    def one(links: ThreadLinks) -> tuple[float, float, Any]:
        chip = EmulatedAccelerator(chip="P800", mode="declared")
        engine = engine_of(plan, spec, links, accelerator=chip, durations=durations, stub=stub)
        engine.step(batches_of(engine, 0), settings())
        compute = [e for e in engine.instructions if e.lane is Lane.COMPUTE]
        return chip.overrun.due_s, sum(SECONDS[e.op] for e in compute), engine.weights()

    found = World(plan.num_ranks).run(one)
    for due, declared, _ in found:
        assert due == pytest.approx(declared)
    assert all(entry.lane is Lane.COMPUTE for entry in asked)
    if not stub:
        parts = [part for _, _, parts in found for part in parts]
        weights = whole_tensors(spec, parts, "weights")
        expected = train_threads(plan, spec, steps=1)
        assert all(torch.equal(weights[name], value) for name, value in expected.weights.items())


def test_dilated_time_needs_no_declaration() -> None:
    plan = two_stages()
    spec = plan.model.spec
    assert spec is not None

    def one(links: ThreadLinks) -> float:
        chip = EmulatedAccelerator(chip="P800", mode="dilated", factor=1.5)
        engine = engine_of(plan, spec, links, accelerator=chip)
        engine.step(batches_of(engine, 0), settings())
        return chip.overrun.due_s

    assert all(due > 0 for due in World(plan.num_ranks).run(one))


def test_a_declared_chip_wants_durations() -> None:
    plan = two_stages()
    spec = plan.model.spec
    assert spec is not None

    def one(links: ThreadLinks) -> None:
        chip = EmulatedAccelerator(chip="P800", mode="declared")
        engine = engine_of(plan, spec, links, accelerator=chip)
        engine.step(batches_of(engine, 0), settings())

    with pytest.raises(InputError, match="runs on declared time"):
        World(plan.num_ranks).run(one)
