"""Measures cases within a time budget; whatever was finished when it ends is a valid profile.

First every case is visited once, in the order given; what time is left goes into further visits in
the same order, so that repeats of one case lie far apart. Medians over all of them are kept.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from tutti.accelerator.accelerator import Accelerator, DeviceMemoryError
from tutti.accelerator.arithmetic import Product, wrong_product
from tutti.accelerator.products import product
from tutti.accelerator.profiling.cases import Prepared, ProfileCase, prepare
from tutti.accelerator.profiling.links import device_links
from tutti.accelerator.profiling.served_cases import prepare_served
from tutti.accelerator.profiling.timer import Run, Samples, Timer, describe, timer_for
from tutti.accelerator.profiling.workspace import TORCH_DTYPES, Workspace
from tutti.cost.measured.forms import FORMS, Direction, row_name
from tutti.errors import InputError, StoppedError, TuttiError
from tutti.hardware.chip import Dtype
from tutti.hardware.profile import LinkFigure, OperatorTime, Profile

SMALL_ERROR = 0.007  # of the median, at which a visit stops
LEAST_SAMPLES, MOST_SAMPLES = 3, 7  # of a visit
SHARE_OF_VISIT = 1 / 200  # of the budget that one visit may take
# Of the budget beyond which a call is not tried; what only moves bytes is told by smaller ones.
SHARE_OF_CALL = {"gemm": 1 / 4000, "attention": 1 / 8000, "elementwise": 1 / 10000}
SHARE_OF_MEMORY = 0.2
MOST_VISITS = 5
CHECKED_PRODUCTS = 6  # of the first shapes
FIRST_SIDE, LAST_SIDE = 512, 8192  # of the product that tells roughly how fast the chip is
ENOUGH_S = 1e-3
SAVE_EVERY_S = 5.0
# Products after each other: how many different ones, how long until the chip has warmed to its
# power limit, and how long it is timed then.
SUSTAINED_CASES, WARM_S, TIMED_S = 6, 1.5, 1.0
Save = Callable[[Profile], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a session is."""

    used_s: float
    budget_s: float
    measured: int
    cases: int
    visit: int
    doing: str


@dataclass(slots=True, kw_only=True)
class Session:
    """One run of `tutti profile` on one device."""

    accelerator: Accelerator
    dtype: Dtype
    cases: Sequence[ProfileCase]
    budget_s: float
    origin: str
    resume: Profile | None = None
    links: list[LinkFigure] = field(default_factory=list)
    save: Save = lambda _: None
    report: Callable[[Progress], None] = lambda _: None
    interrupted: bool = field(default=False, init=False)
    visits: int = field(default=0, init=False)
    _samples: dict[tuple[ProfileCase, Direction], Samples] = field(default_factory=dict, init=False)
    _kernels: dict[ProfileCase, str] = field(default_factory=dict, init=False)
    _refused: dict[ProfileCase, str] = field(default_factory=dict, init=False)
    _floor_s: float = field(default=0.0, init=False)
    _sustained: float = field(default=0.0, init=False)  # 0: yet to be measured
    _rates: dict[str, float] = field(default_factory=dict, init=False)
    _timer: Timer = field(init=False)
    _workspace: Workspace = field(init=False)
    _start: float = field(default=0.0, init=False)
    _saved: float = field(default=0.0, init=False)

    def run(self) -> Profile:
        """Measure until the budget is used, everything is settled, or Ctrl-C."""
        self._start = self._saved = time.perf_counter()
        known = {(r.operator, r.shape) for r in self._kept_rows() if r.dtype is self.dtype}
        kind, device = TORCH_DTYPES[self.dtype], self.accelerator.device
        emulated = self.accelerator.operators.emulated(kind, device)
        wanted = [
            case
            for case in self.cases
            if case.operator not in emulated
            and any((row_name(case.operator, d), case.shape) not in known
                    for d in case.directions)
        ]  # fmt: skip
        try:
            self._begin()
            for visit in range(MOST_VISITS):
                more = self._round(wanted, visit)
                if not self._sustained:
                    self._sustained = self._measure_sustained()
                if not more:
                    break
        except KeyboardInterrupt:
            self.interrupted = True
        if not self._samples and not known:
            if self.interrupted:
                raise StoppedError("stopped before the first measurement; nothing was written")
            raise InputError(
                f"--budget {self.budget_s:g}s: over before the first measurement; getting ready "
                f"took {self._used:.1f} s, give at least {math.ceil(2 * self._used + 5)}s"
            )
        profile = self.profile()
        self.save(profile)
        return profile

    @property
    def issues(self) -> bool:
        """Whether the host issues work that the device does later."""
        return self._timer.issues

    # --- the order of things -----------------------------------------------------------------

    @property
    def _used(self) -> float:
        return time.perf_counter() - self._start

    def _begin(self) -> None:
        self._timer = timer_for(self.accelerator)
        self._workspace = Workspace(self.accelerator, self.dtype)
        self._check_arithmetic()
        self._floor_s = self._measure_floor()
        kept = self.resume.links if self.resume is not None else ()
        own = {link.kind for link in self.links}
        self.links += [link for link in kept if link.kind not in own]
        if "memory" not in {link.kind for link in self.links} and self._used < self.budget_s:
            self.links += device_links(self.accelerator, self._timer)
        self._first_rates()

    def _check_arithmetic(self) -> None:
        """Refuse to measure a device that multiplies wrongly."""
        products = (c for c in self.cases if c.operator == "linear" and not c.serves)
        shapes = [case.shape for case in products][:CHECKED_PRODUCTS]
        checked = [Product(tokens, wide, out) for tokens, out, wide in shapes]
        wrong = wrong_product(self.accelerator, checked, TORCH_DTYPES[self.dtype])
        if wrong:
            raise TuttiError(f"{self.accelerator.chip} multiplies wrongly: {wrong}")

    def _first_rates(self) -> None:
        """Find out roughly how fast the chip is, so that no case takes most of the budget."""
        self._rates = {"elements": 1e9}
        for link in self.links:
            if link.kind == "memory":
                self._rates["elements"] = link.bandwidth / self.dtype.num_bytes
        side = FIRST_SIDE
        while True:
            a = self._workspace.take(side, side, gradient=False)
            samples = Samples()
            for _ in range(3):
                self._timer.sample(lambda a=a: product(a, a), 1, samples)  # type: ignore[misc]
            self._rates["flops"] = 2.0 * side**3 / min(samples.seconds)
            if min(samples.seconds) > ENOUGH_S or side >= LAST_SIDE:
                return
            side *= 2

    def _round(self, wanted: Sequence[ProfileCase], visit: int) -> bool:
        """Visit every case once; tell whether there is time for more."""
        for case in wanted:
            if self._used >= self.budget_s:
                return False
            if case in self._refused or self._too_large(case) or (visit and self._settled(case)):
                continue
            self._tell(case, visit)
            try:
                self._visit(case)
            except Exception as error:  # a kernel that fails must not cost the others
                first = str(error).strip().partition("\n")[0]
                named = isinstance(error, (TuttiError, DeviceMemoryError))
                self._refuse(case, first if named else f"{type(error).__name__}: {first}")
            self.visits += 1
            if time.perf_counter() - self._saved > SAVE_EVERY_S:
                self.save(self.profile())
                self._saved = time.perf_counter()
        return bool(wanted)

    def _refuse(self, case: ProfileCase, reason: str) -> None:
        self._refused[case] = reason
        for direction in case.directions:
            self._samples.pop((case, direction), None)
        self.accelerator.empty_cache()

    def _tell(self, case: ProfileCase, visit: int) -> None:
        self.report(
            Progress(
                used_s=self._used,
                budget_s=self.budget_s,
                measured=len(self._kernels),
                cases=len(self.cases),
                visit=visit + 1,
                doing=str(case),
            )
        )

    def _settled(self, case: ProfileCase) -> bool:
        """Whether more repeats would not move the median any more."""
        samples = [s for (c, _), s in self._samples.items() if c is case]
        return bool(samples) and all(
            len(s.seconds) >= MOST_SAMPLES and s.error < SMALL_ERROR for s in samples
        )

    def _too_large(self, case: ProfileCase) -> bool:
        """Whether a case would not fit, or one call of it take too much of the budget."""
        need = 4.0 * case.elements * self.dtype.num_bytes
        if need > SHARE_OF_MEMORY * self._workspace.total_bytes:
            return True
        compute = case.flops / self._rates["flops"]
        memory = case.elements / self._rates["elements"]
        return max(compute, memory) > SHARE_OF_CALL[FORMS[case.operator].part] * self.budget_s

    # --- one visit ---------------------------------------------------------------------------

    def _measure_floor(self) -> float:
        tiny = torch.zeros(1, device=self.accelerator.device)
        samples = Samples()
        tiny.add_(1)
        for _ in range(2 * MOST_SAMPLES):
            self._timer.sample(lambda: tiny.add_(1), 100, samples)
        return samples.median

    def _measure_sustained(self) -> float:
        """Return how much longer products take for seconds on end than in short samples."""
        measured = [
            case
            for case in self._kernels
            if case.operator == "linear" and not case.serves and case not in self._refused
            and self._samples[case, "forward"].seconds
        ]  # fmt: skip
        largest = sorted(measured, key=lambda case: -case.flops)[:SUSTAINED_CASES]
        if not largest or not self._timer.issues:
            return self.resume.sustained if self.resume is not None else 1.0
        runs: list[Run] = []
        alone_s = 0.0
        for case in largest:
            prepared = prepare(case, self._workspace, self.accelerator.operators)
            runs += prepared.runs.values()
            alone_s += sum(self._samples[case, direction].median for direction in prepared.runs)
        self._turns(runs, max(1, math.ceil(WARM_S / alone_s)))
        turns = max(1, math.ceil(TIMED_S / alone_s))
        return max(1.0, self._turns(runs, turns) / (turns * alone_s))

    def _turns(self, runs: Sequence[Run], turns: int) -> float:
        """Run all of them so many times after each other; return the device's seconds."""
        start, end = (self.accelerator.event(timed=True) for _ in range(2))
        start.record()
        for _ in range(turns):
            for run in runs:
                run()
        end.record()
        end.synchronize()
        return end.seconds_since(start)

    def _visit(self, case: ProfileCase) -> None:
        prepared = self._prepared(case)
        self._kernels[case] = prepared.kernel
        started = time.perf_counter()
        deadline = started + SHARE_OF_VISIT * self.budget_s
        plans = [self._warm(case, direction, prepared) for direction in prepared.runs]
        for count in range(MOST_SAMPLES):
            enough = count >= LEAST_SAMPLES and (
                time.perf_counter() > deadline or all(s.error < SMALL_ERROR for _, _, s in plans)
            )
            if enough:
                break
            for run, calls, samples in plans:
                self._sample(run, calls, samples, prepared.calls)
        self._learn(case)

    def _prepared(self, case: ProfileCase) -> Prepared:
        if case.serves:
            return prepare_served(case, self._workspace, self.accelerator)
        return prepare(case, self._workspace, self.accelerator.operators)

    def _sample(self, run: Run, runs: int, samples: Samples, each: int) -> None:
        """Take a sample of so many runs, each of so many calls."""
        own = Samples(issue_s=samples.issue_s * each)
        self._timer.sample(run, runs, own)
        samples.seconds += [seconds / each for seconds in own.seconds]
        samples.issue_s = own.issue_s / each

    def _warm(
        self, case: ProfileCase, direction: Direction, prepared: Prepared
    ) -> tuple[Run, int, Samples]:
        """Run twice (the first time may compile), and tell how many calls a sample needs."""
        run, samples = (
            prepared.runs[direction],
            self._samples.setdefault((case, direction), Samples()),
        )
        run()
        trial, each = Samples(), prepared.calls
        self._sample(run, 1, trial, each)
        if trial.median * each < self._timer.least_sample_s / 4:
            self._sample(run, 4, trial, each)
        samples.issue_s = min(samples.issue_s, trial.issue_s)
        calls = self._timer.calls_for(min(trial.seconds) * each)
        if calls == 1:  # as good as any that follows
            samples.seconds += trial.seconds
        return run, calls, samples

    def _learn(self, case: ProfileCase) -> None:
        """Remember the best rates: what they say of a case's time is a lower bound of it."""
        forward = self._samples[case, case.directions[0]].median
        for name, work in (("flops", case.flops), ("elements", case.elements)):
            self._rates[name] = max(self._rates.get(name, 1.0), work / forward)

    # --- the result --------------------------------------------------------------------------

    def _kept_rows(self) -> tuple[OperatorTime, ...]:
        return self.resume.operators if self.resume is not None else ()

    def profile(self) -> Profile:
        """Return what was measured so far."""
        rows = {row.key: row for row in self._kept_rows()}
        for (case, direction), samples in self._samples.items():
            if not samples.seconds:
                continue
            row = OperatorTime(
                operator=row_name(case.operator, direction),
                dtype=self.dtype,
                shape=case.shape,
                seconds=_rounded(samples.median),
                spread=round(samples.spread, 4),
                repeats=len(samples.seconds),
                issue_s=_rounded(samples.issue_s) if self._timer.issues else 0.0,
                kernel=self._kernels[case],
            )
            rows[row.key] = row
        return Profile(
            chip=self.accelerator.chip,
            stack=describe(self.accelerator),
            date=datetime.date.today().isoformat(),
            origin=self.origin,
            launch_floor_s=_rounded(self._floor_s),
            sustained=round(self._sustained or (self.resume.sustained if self.resume else 1.0), 4),
            served_graphs=any(row.operator.endswith(".inference") for row in rows.values())
            and self.accelerator.graph_pool() is not None,
            served_gap_s=self.resume.served_gap_s if self.resume is not None else 0.0,
            operators=tuple(rows.values()),
            links=tuple(self.links),
            collectives=self.resume.collectives if self.resume is not None else (),
        )

    @property
    def refused(self) -> dict[ProfileCase, str]:
        """Cases that could not run, and why."""
        return dict(self._refused)


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.5g}")


def measure_profile(session: Session) -> Profile:
    """Run a session; a number format that cannot be measured is refused."""
    if session.dtype not in TORCH_DTYPES:
        known = ", ".join(d.value for d in TORCH_DTYPES)
        raise InputError(f"--dtype {session.dtype.value}: cannot be measured yet; known: {known}")
    return session.run()
