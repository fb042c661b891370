"""Nothing with a cost happens outside the instruction list, which is what the simulator prices.

Around whole steps every operator, every message, every collective and every copy between host and
device is caught as it is called, and must fall between the start and the end of an instruction of
the lane that it is priced on, or into the wait for one. That does not hang on any clock; the last
test says the same of a single rank by torch's own profiler, in seconds.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.any_plan import PLANS, Draft
from tests.support.every_other import every_other
from tests.support.threads import ThreadLinks, World
from tests.support.training import batches_of, engine_of, in_precision, settings
from tests.unit.train.state.test_state_offload import PLANS as OFFLOADED
from tutti.accelerator.devices.cpu import CpuAccelerator
from tutti.plan.plan import Plan
from tutti.schedule.instruction import COLLECTIVES, LANES, Lane, Op
from tutti.train.engine.engine import Engine
from tutti.train.state.host_vectors import COPY_IN, COPY_OUT

COMPUTE = frozenset(op for op, lane in LANES.items() if lane is Lane.COMPUTE)
COPIES = frozenset(op for op, lane in LANES.items() if lane is Lane.COPY)
WANTED: dict[str, frozenset[Op]] = {  # where a call may be
    "exchange": frozenset({Op.SEND, Op.RECEIVE, Op.SYNC_TIED}),
    "collective": COLLECTIVES,
    "block": COMPUTE | {Op.RECEIVE},  # inside a block of the model; joining slices that arrived
    "copy": COPIES,
}
SHARE = 0.99  # of the operators' time that must be inside, by the profiler


class Watch:
    """What was called, and in which instruction; None is outside of all."""

    def __init__(self) -> None:
        self.op: Op | None = None
        self.active = False
        self.seen: dict[str, Counter[Op | None]] = defaultdict(Counter)
        self.operators: Counter[str] = Counter()  # outside
        self.inside_s = self.outside_s = 0.0

    def note(self, kind: str) -> None:
        if self.active:
            self.seen[kind][self.op] += 1

    def follow(self, engine: Engine) -> None:
        """Learn from an engine which instruction is under way."""
        recorder, wait = engine.recorder, engine._wait
        start, issued = recorder.start, recorder.issued

        def started(index: int) -> None:
            start(index)
            self.op = engine.instructions[index].op

        def ended(index: int) -> None:
            self.op = None
            issued(index)

        def waiting(handles: Any, index: int) -> None:
            self.op = engine.instructions[index].op
            wait(handles, index)
            self.op = None

        recorder.start, recorder.issued = started, ended  # type: ignore[method-assign]
        engine._wait = waiting  # type: ignore[method-assign]

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        self.active = True
        with _Operators(self):
            yield
        self.active = False


class _Operators(TorchDispatchMode):
    """Every aten operator that a thread runs, with its time."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        begin = time.perf_counter()
        found = func(*args, **(kwargs or {}))
        spent = time.perf_counter() - begin
        if self._watch.op is None:
            self._watch.operators[str(func)] += 1
            self._watch.outside_s += spent
        else:
            self._watch.inside_s += spent
        return found


class WatchedLinks:
    """Links, and groups made by them, that note when they are called."""

    def __init__(self, links: ThreadLinks, watch: Watch) -> None:
        self._links, self._watch = links, watch
        self.rank, self.world = links.rank, links.world

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._links, name)
        kind = "exchange" if name == "exchange" else "collective"

        def noted(*args: Any, **words: Any) -> Any:
            self._watch.note(kind)
            return call(*args, **words)

        return noted

    def group(self, ranks: Any, *, use: str = "block") -> Any:
        return _WatchedGroup(self._links.group(ranks, use=use), self._watch)


class _WatchedGroup:
    def __init__(self, group: Any, watch: Watch) -> None:
        self._group, self._watch = group, watch
        self.size, self.rank = group.size, group.rank

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._group, name)

        def noted(*args: Any, **words: Any) -> Any:
            self._watch.note("block")
            return call(*args, **words)

        return noted


class WatchedChip(CpuAccelerator):
    """A chip that notes what goes to the host or comes from there."""

    watch: Watch

    def lane(self, name: str) -> contextlib.AbstractContextManager[None]:
        if name in (COPY_IN, COPY_OUT):
            self.watch.note("copy")
        return super().lane(name)

    def to_host(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        self.watch.note("copy")
        return super().to_host(tensor, into)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        self.watch.note("copy")
        return super().to_device(tensor)


def watched(plan: Plan, steps: int = 2) -> list[Watch]:
    """Train as all ranks of a plan; the first step makes what is made once."""

    def one(links: ThreadLinks) -> Watch:
        watch, chip = Watch(), WatchedChip()
        chip.watch = watch
        own = WatchedLinks(links, watch)
        engine = engine_of(plan, plan.model.spec, own, accelerator=chip)
        watch.follow(engine)
        for step in range(steps):
            batches = batches_of(engine, step)
            with watch.step():
                engine.step(batches, settings())
        return watch

    return World(plan.num_ranks).run(one)


CASES: dict[str, tuple[Plan, set[str]]] = {
    **{name: (plan, set()) for name, plan in PLANS.items()},
    **{f"{name}, offloaded": (plan, {"copy"}) for name, plan in OFFLOADED.items()},
}


@pytest.mark.parametrize("name", every_other(CASES))
def test_every_call_is_in_an_instruction_of_its_lane(name):
    plan, expected = CASES[name]
    seen: dict[str, Counter[Op | None]] = defaultdict(Counter)
    for rank, watch in enumerate(watched(plan)):
        assert not watch.operators, f"rank {rank}: outside of every instruction"
        assert watch.inside_s > 0
        for kind, where in watch.seen.items():
            seen[kind] += where
    for kind, where in seen.items():
        assert set(where) <= WANTED[kind], kind
    assert expected <= seen.keys()
    assert "copy" not in expected or set(seen["copy"]) == COPIES, "both ways"
    assert plan.num_ranks == 1 or seen.keys() & {"exchange", "collective"}


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_also_under_other_precisions(policy):
    for watch in watched(in_precision(PLANS["unequal shares on unlike chips"], policy)):
        assert not watch.operators


def test_what_is_outside_is_noticed():
    """The checks above must be able to fail."""
    plan = PLANS["unequal shares on unlike chips"]

    def one(links: ThreadLinks) -> Watch:
        watch = Watch()
        own = WatchedLinks(links, watch)
        engine = engine_of(plan, plan.model.spec, own)
        watch.follow(engine)
        with watch.step():
            torch.ones(3).add_(1)
            own.all_reduce(range(plan.num_ranks), torch.ones(1)).wait()
            engine.step(batches_of(engine, 0), settings())
        return watch

    for watch in World(plan.num_ranks).run(one):
        assert "aten.add_.Tensor" in watch.operators
        assert watch.seen["collective"][None] == 1


def test_a_single_rank_by_the_profiler():
    """At least 99 % of the operators' time lies under an instruction's annotation."""
    plan = Draft(experts_in=(1,)).line((((0, 4),), [{}]), micro_batches=3).plan()

    def one(links: ThreadLinks) -> Engine:
        return engine_of(plan, plan.model.spec, links)

    engine = World(1).run(one)[0]
    _annotate(engine)
    engine.step(batches_of(engine, 0), settings())
    with profile(activities=[ProfilerActivity.CPU]) as found, record_function("whole step"):
        engine.step(batches_of(engine, 1), settings())
    inside = outside = 0.0
    for event in found.events():
        if not event.name.startswith("aten::"):
            continue
        parent, under = event.cpu_parent, False
        nested = False
        while parent is not None:
            nested = nested or parent.name.startswith("aten::")
            under = under or parent.name.startswith("instruction ")
            parent = parent.cpu_parent
        if nested:
            continue  # counted with the operator that it is a part of
        spent = event.time_range.elapsed_us()
        inside, outside = inside + spent * under, outside + spent * (not under)
    assert inside > 0
    assert inside >= SHARE * (inside + outside)


def _annotate(engine: Engine) -> None:
    """Name each instruction, and each wait for one, to the profiler."""
    recorder, wait = engine.recorder, engine._wait
    start, issued = recorder.start, recorder.issued
    under_way: list[Any] = []

    def started(index: int) -> None:
        start(index)
        under_way.append(record_function(f"instruction {engine.instructions[index]}"))
        under_way[-1].__enter__()

    def ended(index: int) -> None:
        under_way.pop().__exit__(None, None, None)
        issued(index)

    def waiting(handles: Any, index: int) -> None:
        with record_function(f"instruction {engine.instructions[index]}, waited for"):
            wait(handles, index)

    recorder.start, recorder.issued = started, ended  # type: ignore[method-assign]
    engine._wait = waiting  # type: ignore[method-assign]
