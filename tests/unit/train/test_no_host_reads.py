"""While a step is issued, no number is read on the host: on a chip the host would wait for it.

On the CPU nothing waits, so whatever a chip's host would wait for is caught as it is called:
numbers read out of tensors, and operators whose result has a shape that depends on numbers. Experts
are the exception that is known: how many rows each gets decides the size of messages and products.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.any_plan import PLANS
from tests.support.every_other import every_other
from tests.support.threads import ThreadLinks, World
from tests.support.training import batches_of, engine_of, in_precision, settings
from tests.unit.train.state.test_state_offload import PLANS as OFFLOADED
from tutti.plan.plan import Plan
from tutti.train.engine.engine import Engine

WAITS = ("_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive",
         "masked_select", "is_nonzero", "equal.default")  # fmt: skip
READS = ("tolist", "numpy", "cpu", "item")


class HostReadError(AssertionError):
    """A number was read where the host should only issue."""


class _Issuing(TorchDispatchMode):
    """Refuses operators that a chip's host would wait for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = str(func).removeprefix("aten.")
        if name.startswith(WAITS):
            raise HostReadError(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Refuse reading tensors inside of the context that this returns, in its thread."""
    issuing: set[int] = set()
    for name in READS:
        plain = getattr(torch.Tensor, name)

        def read(self: torch.Tensor, *args: Any, _name: str = name, _plain: Any = plain) -> Any:
            if threading.get_ident() in issuing:
                raise HostReadError(_name)
            return _plain(self, *args)

        monkeypatch.setattr(torch.Tensor, name, read)

    @contextmanager
    def context() -> Iterator[None]:
        issuing.add(threading.get_ident())
        try:
            with _Issuing():
                yield
        finally:
            issuing.discard(threading.get_ident())

    return context


def train(plan: Plan, refusing: Any, steps: int = 3) -> int:
    """Train as all ranks; return how many steps each issued under watch.

    The first step makes what is made once, such as who sends which rows.
    """

    def one(links: ThreadLinks) -> int:
        engine = engine_of(plan, plan.model.spec, links)
        issue, count = engine.issue, 0

        def watched() -> None:
            nonlocal count
            count += engine.step_number > 0
            with refusing() if engine.step_number else nullcontext():
                issue()

        engine.issue = watched  # type: ignore[method-assign]
        for step in range(steps):
            batches = batches_of(engine, step)
            made = {m: batches(m) for m in _micro_batches(engine)}
            engine.step(made.__getitem__, settings())
        return count

    (watched_steps,) = set(World(plan.num_ranks).run(one))
    return int(watched_steps)


def _micro_batches(engine: Engine) -> set[int]:
    return {entry.micro_batch for entry in engine.instructions if entry.micro_batch >= 0}


def is_dense(plan: Plan) -> bool:
    spec = plan.model.spec
    assert spec is not None
    return all(spec.block(unit).moe is None for unit in range(1, spec.head_unit))


DENSE = {name: plan for name, plan in PLANS.items() if is_dense(plan)}
DENSE |= {f"{name}, offloaded": plan for name, plan in OFFLOADED.items() if is_dense(plan)}
assert len(DENSE) > 15


@pytest.mark.parametrize("name", every_other(DENSE))
def test_nothing_is_read_while_a_step_is_issued(name: str, refusing: Any) -> None:
    assert train(DENSE[name], refusing) == 2


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_also_under_other_precisions(policy: str, refusing: Any) -> None:
    found = train(in_precision(PLANS["unequal shares on unlike chips"], policy), refusing, steps=4)
    assert found > 0  # steps that loss scaling skips are not counted


def test_experts_are_the_known_exception(refusing: Any) -> None:
    """It shows, too, that the check above can fail."""
    with pytest.raises(HostReadError, match="tolist"):
        train(PLANS["experts sliced with the rest"], refusing)
