"""Runs on chips that come, go and change their speed, beside what a uniform restart would do.

    python -m benchmarks.elastic_adapts lost    # a fast chip is drained, and comes back
    python -m benchmarks.elastic_adapts slow    # a fast chip slows 1.5 times, and recovers
    python -m benchmarks.elastic_adapts noise   # 500 steps whose compute times vary by 5 %
    python -m benchmarks.elastic_adapts wire    # a host's wire falls to half its rate, and recovers

Emulated chips of speeds 4:4:2:1, real arithmetic and real messages. Prints seconds per step as they
were, as the chips were due to take them (which a busy machine does not change), and as predicted;
what was decided; and how far the host fell behind. `wire` takes three hosts of one chip
each, in network namespaces: it needs root.
"""

from __future__ import annotations

import argparse
import bisect
import statistics
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from tests.support.timed_chips import (
    Emulation,
    Watched,
    emulation,
    job_of,
    run_beside,
    write,
)
from tests.support.wired_hosts import WiredHosts
from tutti.diagnose.slow import FIRST, PAST
from tutti.elastic.journal import Entry
from tutti.elastic.operator_requests import OperatorRequest, wish
from tutti.hardware.chip import LARGEST_OVERRUN
from tutti.launch.identity import used_chips
from tutti.plan.files import load_plan
from tutti.plan.plan import Plan
from tutti.search.planner import plan_uniform
from tutti.train.elastic.better_plan import find_better, parts_of, position_of
from tutti.train.run.planning import Job, prepared, problem_of
from tutti.train.run.trainer import run_local

FAST = "fast/0/1"  # the chip that things happen to
OTHERS = ("fast/0/0", "middle/0/0", "slow/0/0")
JOB = {"global_batch": 96, "sequence_length": 8, "precision": "fp32", "tp_max": 1, "max_stages": 1}
SLOWED, FACTOR = 18, 1.5


def predicted_s(job: Job, plan: Plan) -> float:
    """Return what the cost model says of a step under a plan."""
    return replace(job, plan=plan).predicted().step_seconds


def told(name: str, seen: Emulation, step_s: float, forecast_s: float) -> float:
    """Print a line; return the emulated seconds of a step."""
    print(
        f"{name}: {step_s:.3f} s a step, {seen.due_s:.3f} s due, predicted {forecast_s:.3f} s "
        f"({seen.due_s / forecast_s - 1:+.1%}); overrun {seen.overrun:.1%}",
        flush=True,
    )
    return seen.due_s


def decisions(entries: Iterable[Entry], first: int = 0) -> list[Entry]:
    """Print what was decided; return it."""
    kept = [entry for entry in entries if (entry.step or 0) >= first]
    for entry in kept:
        print(f"  step {entry.step}, generation {entry.generation}, {entry.phase}: {entry.why}")
    return kept


def plans_of(folder: Path) -> list[Plan]:
    """Return the plans of a run's generations, in their order."""
    names = [entry.plan for entry in Watched(folder).entries() if entry.phase == "entering"]
    return [load_plan(folder / name) for name in names]


def running(watched: Watched, ranks: int) -> bool:
    """Tell whether so many ranks train."""
    entries = watched.entries()
    sizes = [len(entry.ranks) for entry in entries if entry.phase == "entering"]
    return bool(entries) and entries[-1].phase == "running" and sizes[-1] == ranks


def trains(watched: Watched, *, with_fast: bool) -> bool:
    """Tell whether a generation trains that has the chip that things happen to, or has not."""
    entries = watched.entries()
    ranks = [entry.ranks for entry in entries if entry.phase == "entering"]
    return bool(ranks) and entries[-1].phase == "running" and (FAST in ranks[-1]) == with_fast


def lost(folder: Path, unit: int, steps: int) -> None:
    """Drain a fast chip and take it back; beside it the uniform plan of the three that are left."""
    write(folder, unit)
    job = job_of(folder, "run", elastic={}, job=JOB)
    watched = Watched(job.config.folder)
    run_beside(job, watched, [
        lambda: watched.until(lambda: len(watched.records()) > 3),
        lambda: watched.steps("before", steps),
        lambda: wish(watched.folder, OperatorRequest(kind="drain", place=FAST)),
        lambda: watched.decided("replanned", "stays", after=len(watched.entries())),
        lambda: watched.until(lambda: trains(watched, with_fast=False)),
        lambda: watched.steps("without", steps),
        lambda: wish(watched.folder, OperatorRequest(kind="add", place=FAST)),
        lambda: watched.until(lambda: trains(watched, with_fast=True)),
        lambda: watched.steps("back", steps),
    ])  # fmt: skip
    plans = plans_of(job.config.folder)
    adapted = [plan for plan in plans if position_of(FAST) not in used_chips(plan)][-1]
    due = {
        name: told(name, watched.emulation(name), watched.step_s(name), predicted_s(job, plan))
        for name, plan in (("before", plans[0]), ("without", adapted), ("back", plans[-1]))
    }
    parts = parts_of(job, {position_of(chip) for chip in OTHERS}, {})
    uniform = plan_uniform(problem_of(job.config, job.spec, parts.cluster))
    assert not isinstance(uniform, str), uniform
    plan = parts.to_real(uniform.plan)
    alike = prepared(job_of(folder, "uniform", steps=8, job=JOB).config, plan, job.spec)
    slow_s = run_local(alike).seconds_per_step
    restarted = emulation(Watched(alike.config.folder).records(), 2)
    uniform_s = told("uniform restart", restarted, slow_s, predicted_s(alike, plan))
    print(
        f"planned over a uniform restart: {uniform_s / due['without']:.2f} times as due, "
        f"{slow_s / watched.step_s('without'):.2f} by the clock (2.33 possible)"
    )
    records = watched.records()
    calm = prepared(job_of(folder, "calm", steps=len(records), job=JOB).config, plans[0], job.spec)
    losses = run_local(calm).losses
    worst = max(abs(r["loss"] - loss) / loss for r, loss in zip(records, losses, strict=True))
    print(f"losses of {len(records)} steps as in an undisturbed run: within {worst:.1e}")
    decisions(watched.entries())


def slow(folder: Path, unit: int, steps: int) -> None:
    """Slow a fast chip, and let it recover."""
    write(folder, unit)
    until = SLOWED + 10 + 6 * steps
    drill = {"fault": "slow", "chip": FAST, "step": SLOWED, "factor": FACTOR, "until": until}
    job = job_of(folder, "run", elastic={"drill": [drill]}, job=JOB)
    watched = Watched(job.config.folder)

    run_beside(job, watched, [
        lambda: watched.until(lambda: len(watched.records()) > 8),
        lambda: watched.steps("before", steps),
        lambda: watched.until(lambda: len(watched.records()) > SLOWED),
        lambda: watched.steps("slow", 4),
        lambda: watched.until(lambda: watched.noted("replanned") or watched.noted("stays")),
        lambda: watched.until(lambda: running(watched, 4)),
        lambda: watched.steps("shifted", steps),
        lambda: watched.until(lambda: watched.noted("well again")),
        lambda: watched.until(lambda: len(watched.noted("replanned")) > 1),
        lambda: watched.until(lambda: running(watched, 4)),
        lambda: watched.steps("back", steps),
    ])  # fmt: skip
    first, *_ = plans_of(job.config.folder)
    chips = [FAST, *OTHERS]
    for name in watched.marks:
        behind = watched.emulation(name).overrun
        print(f"{name}: {watched.step_s(name):.3f} s a step, overrun {behind:.1%}")
    better = find_better(job, first, chips, {FAST: FACTOR})
    assert better.staying_s is not None
    forecast = 1 - better.step_s / better.staying_s
    gain = 1 - watched.step_s("shifted") / watched.step_s("slow")
    print(f"gain {gain:.1%} of a step's time, forecast {forecast:.1%}: {gain / forecast:.0%} of it")
    seen = watched.noted("slow")[0].step or 0
    well = watched.noted("well again")[0].step or 0
    print(f"slow from step {SLOWED} on, named at {seen}; well from {until + 1} on, told at {well}")
    decisions(watched.entries(), first=SLOWED)


def wire(folder: Path, unit: int, steps: int) -> None:
    """Let a host's wire carry half of what it did, and recover."""
    hosts = WiredHosts(folder, 3, unit, rate=unit / 150)
    job = hosts.job("run", steps=400)
    watched, slowed, well_from = Watched(job.config.folder), list[int](), list[int]()

    def changed(rate: float, steps: list[int]) -> None:
        steps.append(len(watched.records()) + 1)
        hosts.wire(1, rate)

    try:
        hosts.start(job)
        watched.until(lambda: len(watched.records()) > FIRST + PAST - steps)
        watched.steps("before", steps)
        changed(hosts.rate / 2, slowed)
        watched.steps("slow", 4)
        watched.until(lambda: watched.noted("replanned", "stays"))
        watched.until(lambda: running(watched, 3))
        watched.steps("shifted", 10 + steps)
        changed(hosts.rate, well_from)
        watched.until(lambda: watched.noted("well again"))
        watched.until(lambda: len(watched.noted("replanned")) > 1)
        watched.until(lambda: running(watched, 3))
        watched.steps("back", steps)
        hosts.finish()
    finally:
        for name in watched.marks:
            behind = watched.emulation(name).overrun
            print(f"{name}: {watched.step_s(name):.3f} s a step, overrun {behind:.1%}")
        decisions(watched.entries())
        hosts.close()
    first, *_ = plans_of(job.config.folder)
    chips = [f"box/{host}/0" for host in range(3)]
    better = find_better(job, first, chips, {}, {("box/1",): 2.0})
    assert better.staying_s is not None
    forecast = 1 - better.step_s / better.staying_s
    gain = 1 - watched.step_s("shifted") / watched.step_s("slow")
    print(f"gain {gain:.1%} of a step's time, forecast {forecast:.1%}: {gain / forecast:.0%} of it")
    seen, well = (watched.noted(phase)[0].step for phase in ("slow", "well again"))
    print(
        f"half from step {slowed[0]} on, named at {seen}; whole from {well_from[0]}, told at {well}"
    )


def noise(folder: Path, unit: int, steps: int) -> None:
    """Let every chip's passes vary by 5 %."""
    write(folder, unit)
    drills = [
        {"fault": "slow", "chip": chip, "factor": 1.15, "spread": 0.05} for chip in (FAST, *OTHERS)
    ]
    job = job_of(folder, "run", elastic={"drill": drills}, job=JOB, steps=steps)
    watched = Watched(job.config.folder)
    run_local(job)
    records = watched.records()
    switches = sum(entry.phase == "entering" for entry in watched.entries()) - 1
    behind = sorted(
        emulation(records, number, number + 1).overrun
        for number, record in enumerate(records)
        if "pools" in record
    )
    kept_up = bisect.bisect_right(behind, LARGEST_OVERRUN)
    print(
        f"{len(records)} steps: {switches} switches, {len(watched.noted('slow'))} times a chip was "
        f"called slow; overrun {statistics.median(behind):.1%} median, {behind[-1]:.1%} worst, at "
        f"most {LARGEST_OVERRUN:.0%} in {kept_up} steps"
    )
    decisions(watched.entries())


def main() -> None:
    """Run one of them, and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["lost", "slow", "noise", "wire"])
    parser.add_argument("--unit", type=int, default=5_000, help="MFLOP/s of the slowest chip")
    parser.add_argument("--steps", type=int, help="of every part (6; noise: 500)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        {"lost": lost, "slow": slow, "noise": noise, "wire": wire}[given.what](
            Path(temporary), given.unit, given.steps or (500 if given.what == "noise" else 6)
        )


if __name__ == "__main__":
    main()
