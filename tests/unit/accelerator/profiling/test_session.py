"""A session against a clock of its own: budgets, resuming, Ctrl-C, refusals. No real timing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tutti.accelerator import open_accelerator
from tutti.accelerator.profiling import session as module
from tutti.accelerator.profiling.cases import Prepared, ProfileCase
from tutti.accelerator.profiling.session import MOST_SAMPLES, Session, measure_profile
from tutti.accelerator.profiling.timer import Timer
from tutti.cost.measured.forms import FORMS, row_name
from tutti.errors import InputError, StoppedError
from tutti.hardware.chip import Dtype
from tutti.hardware.profile import CollectiveTime, LinkFigure, Profile

CASES = [
    ProfileCase("linear", (64, 64, 64)),
    ProfileCase("rms_norm", (64, 64)),
    ProfileCase("add", (64,)),
    ProfileCase("linear", (64, 128, 64)),
]


READY_S = 14.1  # of the fake clock, before the first visit: the launch floor


class FakeTimer(Timer):
    """A call takes 10 ms of the fake clock."""

    least_sample_s = 1e-3
    issues = False
    clock = "a fake clock"

    def __init__(self, clock) -> None:
        self._clock = clock

    def sample(self, run, calls, samples, *, ahead=True):
        run()
        self._clock.now += 0.01 * calls
        self._clock.samples += 1
        samples.seconds.append(0.01 * (1.0 + 0.1 * (self._clock.samples % 3)))


class Clock:
    now = 0.0
    samples = 0


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(module, "timer_for", lambda _: FakeTimer(clock))
    monkeypatch.setattr(
        module,
        "device_links",
        lambda *_: [LinkFigure(kind="memory", latency_s=1e-6, bandwidth=1e10)],
    )
    monkeypatch.setattr("tutti.accelerator.profiling.workspace.HOST_ELEMENTS", 1 << 18)
    return clock


def session(budget_s=1000.0, cases=CASES, **options):
    return Session(
        accelerator=open_accelerator("cpu"),
        dtype=Dtype.FP32,
        cases=cases,
        budget_s=budget_s,
        origin="a test",
        **options,
    )


def names(profile):
    return {(row.operator, row.shape) for row in profile.operators}


def wanted(cases):
    return {
        (row_name(case.operator, d), case.shape)
        for case in cases
        for d in FORMS[case.operator].directions
    }


def test_everything_is_measured_and_valid(clock, tmp_path):
    told, saved = [], []
    found = measure_profile(session(report=told.append, save=saved.append))
    assert names(found) == wanted(CASES)
    assert found.chip == "CPU"
    assert found.links[0].kind == "memory"
    assert all(row.repeats >= MOST_SAMPLES for row in found.operators)
    assert {row.issue_s for row in found.operators} == {0.0}
    found.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == found
    assert told[0].doing == "linear 64×64×64"
    assert told[0].budget_s == 1000.0
    assert saved[-1] == found
    assert len(saved) >= 1


def test_what_was_finished_when_the_budget_ends_is_kept_in_order(clock):
    found = measure_profile(session(budget_s=READY_S + 0.1))
    assert names(found) >= wanted(CASES[:1])
    assert not names(found) & wanted(CASES[-1:])
    assert clock.now < READY_S + 1.0, "one visit late at most"


def test_a_budget_for_nothing_is_one_line(clock):
    with pytest.raises(InputError, match=r"--budget 0.01s: over before the first measurement"):
        measure_profile(session(budget_s=0.01))


def test_resuming_measures_the_rest_only(clock):
    tuned = CollectiveTime(
        operation="all_reduce", group="4", bytes=1.0, algorithm="ring", seconds=1.0
    )
    first = replace(measure_profile(session(cases=CASES[:2])), collectives=(tuned,))
    again = session(cases=CASES, resume=first)
    visited = []
    again.report = lambda progress: visited.append(progress.doing)
    found = measure_profile(again)
    assert names(found) == wanted(CASES)
    assert set(visited) == {str(case) for case in CASES[2:]}
    assert [row for row in found.operators if row.key in {r.key for r in first.operators}] == list(
        first.operators
    )
    assert found.links == first.links
    assert found.collectives == first.collectives
    nothing = measure_profile(session(cases=CASES, resume=found))
    assert nothing.operators == found.operators


def test_ctrl_c_keeps_what_was_measured(clock):
    def interrupt(progress):
        if progress.doing.startswith("add"):
            raise KeyboardInterrupt

    saved = []
    run = session(report=interrupt, save=saved.append)
    found = measure_profile(run)
    assert run.interrupted
    assert names(found) == wanted(CASES[:2])
    assert saved[-1] == found
    early = session(report=lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(StoppedError, match="stopped before the first measurement") as stopped:
        measure_profile(early)
    assert stopped.value.exit_code == 130


def test_a_kernel_that_fails_does_not_cost_the_others(clock, monkeypatch):
    real = module.prepare

    def broken(case, workspace, operators) -> Prepared:
        if case.operator == "rms_norm":
            raise RuntimeError("no such kernel\nand much more")
        return real(case, workspace, operators)

    monkeypatch.setattr(module, "prepare", broken)
    run = session()
    found = measure_profile(run)
    assert names(found) == wanted([case for case in CASES if case.operator != "rms_norm"])
    assert run.refused == {CASES[1]: "RuntimeError: no such kernel"}


def test_what_would_take_too_long_is_left_out(clock):
    """The fake chip does 2·512³ FLOP in 10 ms; 4,000 of a call must fit the budget."""
    large = ProfileCase("linear", (4096, 4096, 4096))
    found = measure_profile(session(budget_s=200.0, cases=[*CASES, large]))
    assert names(found) == wanted(CASES)


def test_a_format_that_torch_does_not_multiply_is_refused():
    with pytest.raises(InputError, match="--dtype fp8: cannot be measured yet; known: fp32"):
        measure_profile(
            Session(accelerator=open_accelerator("cpu"), dtype=Dtype.FP8, cases=[], budget_s=1.0,
                    origin="")
        )  # fmt: skip
