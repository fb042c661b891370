"""Which blocks are captured, and when: decided by times and memory that a test can set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.support.any_plan import FOUR, FULL, OFF, PLANS, Draft, level
from tests.support.threads import ThreadLinks, World
from tests.support.training import batches_of, engine_of, in_fp32, settings
from tutti.accelerator.devices.cpu import CpuAccelerator
from tutti.plan.job import ScheduleKind
from tutti.plan.plan import Offload, Plan
from tutti.train.engine.engine import Engine
from tutti.train.graphs.captured_blocks import CaptureMode, CaptureSettings
from tutti.train.graphs.launch_gaps import ChipWaits, LaunchWatch

ALONE = Draft().line((FOUR, [{"sequences": 2}])).plan()


class Graphless(CpuAccelerator):
    """A chip that says it has graphs, and cannot capture: whatever is tried is seen."""

    tried = 0

    def graph_pool(self) -> object:
        return object()

    def capture(
        self, function: Callable[[], Any], *, pool: object | None = None, warm_ups: int = 3
    ) -> Callable[[], Any] | None:
        del function, pool
        assert warm_ups == 0
        self.tried += 1
        raise RuntimeError("no graph today\nand more")


def engines(plan: Plan, mode: CaptureMode, **words: Any) -> list[tuple[Engine, list[str]]]:
    def one(links: ThreadLinks) -> tuple[Engine, list[str]]:
        said: list[str] = []
        chosen = CaptureSettings(mode=mode, say=said.append, **words)
        chip = Graphless()
        engine = engine_of(plan, plan.model.spec, links, accelerator=chip, capture=chosen)
        return engine, said

    return World(plan.num_ranks).run(one)


def steps(engine: Engine, count: int) -> None:
    for step in range(count):
        engine.step(batches_of(engine, step), settings())


@pytest.mark.parametrize(
    ("waits", "room", "line"),
    [
        (
            ChipWaits(6, 8),
            None,
            "capture: 2 blocks run as graphs: the chip waited for the host in 6 of 8 passes",
        ),
        (
            ChipWaits(1, 8),
            None,
            "capture: blocks run as they are: the chip waited for the host in 1 of 8 passes",
        ),
        (
            ChipWaits(8, 8),
            1000,
            "capture: blocks run as they are: the plan leaves 1000 B of memory free, graphs hold ",
        ),
    ],
)
def test_the_third_step_decides(
    waits: ChipWaits, room: int | None, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LaunchWatch, "waits", lambda self: waits)
    [(engine, said)] = engines(ALONE, "auto", room_bytes=room)
    chip, own = engine.accelerator, engine.graphs
    assert own is not None
    assert isinstance(chip, Graphless)
    steps(engine, 2)
    assert (said, chip.tried) == ([], 0)
    steps(engine, 1)
    assert said[0].startswith(line), said
    assert chip.tried == ("run as graphs" in line)
    assert own.extra_bytes > 1000
    if chip.tried:
        assert said[1:] == ["capture: blocks run as they are: RuntimeError: no graph today"]
        steps(engine, 1)
        assert chip.tried == 1, "a capture that failed is not tried again"
        assert not own.active


def test_only_the_second_step_is_watched() -> None:
    [(engine, said)] = engines(ALONE, "auto")
    assert engine.graphs is not None
    steps(engine, 1)
    assert engine.graphs.watch is None
    steps(engine, 1)
    assert engine.graphs.watch is not None
    passes, blocks, micro_batches = 2, 2, 2  # forward and backward: weight passes are no graphs
    found = engine.graphs.watch.waits()
    assert found is not None
    assert found.passes == passes * blocks * micro_batches
    steps(engine, 1)
    assert engine.graphs.watch is None
    assert said[0].endswith(f"the chip waited for the host in {found.waited} of 8 passes")


class _Reached:
    """Marks that the chip has reached, or not, by the time that is asked."""

    def __init__(self, reached: list[bool]) -> None:
        self._reached = reached

    def record(self) -> None:
        pass

    def passed(self) -> bool:
        return self._reached.pop(0)


@pytest.mark.parametrize(
    ("reached", "pay"),
    [
        ([True, True, True, True], True),
        ([True, False, False, False], False),  # the host is ahead from the second pass on
        ([True, False, True, False], True),
    ],
)
def test_a_chip_on_the_hosts_heels_waits_for_it(reached: list[bool], pay: bool) -> None:
    chip: Any = CpuAccelerator()
    moments = list(reached)
    chip.event = lambda: _Reached(moments)
    watch = LaunchWatch(chip)
    assert watch.waits() is None
    for _ in reached:
        with watch.seen():
            pass
    assert watch.waits() == ChipWaits(sum(reached), 4)
    assert ChipWaits(sum(reached), 4).graphs_pay is pay


REFUSED: dict[str, tuple[Plan, str]] = {
    "tensor parallel": (
        Draft().line((FOUR, [{"tp": 2}])).plan(), "ranks talk to each other inside of the block"),
    "context parallel": (
        Draft().line((FOUR, [{"cp": 2}])).plan(), "ranks talk to each other inside of the block"),
    "recomputed": (
        Draft().line((FOUR, [{"recompute": FULL}])).plan(), "activations are recomputed"),
    "activations away": (
        Draft().line((FOUR, [{"offload": OFF}])).plan(), "activations wait on the host"),
    "level 3": (
        Draft().line((FOUR, [{"count": 2}])).plan(ScheduleKind.ONE_F_ONE_B, level(3)),
        "parameters are brought for each pass, to other addresses"),
    "parameters away": (
        in_fp32(Draft().line((FOUR, [{"offload": Offload(parameters=((1, 3),))}])).plan(), "adamw"),
        "parameters are brought for each pass, to other addresses"),
    "experts": (
        Draft(experts_in=(0, 1)).line((FOUR, [{}])).plan(),
        "the host reads how many rows each expert gets"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_blocks_that_cannot_be_captured(name: str) -> None:
    plan, reason = REFUSED[name]
    for engine, said in engines(plan, "on"):
        assert said == [f"capture: 2 blocks run as they are: {reason}"]
        assert engine.graphs is not None
        assert not engine.graphs.active


def test_shards_that_stay_are_no_reason() -> None:
    plan = Draft().line((FOUR, [{"count": 2}])).plan(ScheduleKind.ONE_F_ONE_B, level(2))
    assert all(said == [] for _, said in engines(plan, "on"))


def test_a_chip_without_graphs() -> None:
    def one(links: ThreadLinks) -> list[str]:
        said: list[str] = []
        for mode in ("auto", "on", "off"):
            chosen = CaptureSettings(mode=mode, say=said.append)  # type: ignore[arg-type]
            engine_of(ALONE, ALONE.model.spec, links, capture=chosen)
        return said

    assert World(1).run(one) == [["capture: CPU has no graphs; blocks run as they are"]]


def test_without_graphs_while_modules_are_watched() -> None:
    [(engine, said)] = engines(ALONE, "on")
    assert engine.graphs is not None
    steps(engine, 1)
    with engine.graphs.suspended():
        steps(engine, 2)
    assert said == []
    assert isinstance(engine.accelerator, Graphless)
    assert engine.accelerator.tried == 0


def test_a_rank_without_blocks_says_nothing() -> None:
    found = engines(PLANS["three stages, unlike widths"], "on")
    ends = [said for engine, said in found if set(engine.seat.units) <= {0, 3}]
    assert ends
    assert all(said == [] for said in ends)
