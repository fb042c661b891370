"""Steps of a server, timed, beside what a profile predicts of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tutti.accelerator import Accelerator
from tutti.accelerator.profiling.cases import ProfileCase
from tutti.accelerator.profiling.served_cases import prepare_served
from tutti.accelerator.profiling.served_grid import served_model_cases
from tutti.accelerator.profiling.timer import Samples, Timer, timer_for
from tutti.accelerator.profiling.workspace import TORCH_DTYPES, Workspace
from tutti.bench.block_runs import Anchor, drift
from tutti.cost.measured.chip import MeasuredChip
from tutti.cost.measured.forms import row_name
from tutti.cost.serving.stage_prices import StagePrices
from tutti.cost.serving.step_load import StepLoad, decode_load, prefill_load, windows_of
from tutti.hardware.chip import Dtype
from tutti.hardware.local import local_cluster
from tutti.hardware.profile import Profile
from tutti.models.spec import ModelSpec
from tutti.nn import Model
from tutti.nn.initialize import initialize
from tutti.serve.inputs import Shape
from tutti.serve.loading import Sizes, prepare, settings_for
from tutti.serve.worker import Worker

ROUNDS = 9
ANCHORS = 4  # products of the profile that tell how fast the machine is just now


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizeAsked:
    """A step: rows of one token, or one chunk of a prompt."""

    rows: int = 0
    chunk: int = 0
    keys: int  # that each row, or the chunk's last token, sees

    @property
    def shape(self) -> Shape:
        """What the engine calls it."""
        if self.chunk:
            return Shape(self.chunk, 1, 1, self.chunk, self.keys, 1)
        return Shape(self.rows, self.rows, self.rows, 1, self.keys)

    def load(self, model: ModelSpec) -> StepLoad:
        """What the prices call it."""
        windows = windows_of(model)
        if self.chunk:
            return prefill_load([(self.keys - self.chunk, self.chunk)], windows)
        return decode_load(self.rows, self.keys, windows)

    def __str__(self) -> str:
        if not self.chunk:
            return f"{self.rows} × 1 token, {self.keys} keys"
        return f"{self.chunk} tokens behind {self.keys - self.chunk}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One step's measured and predicted time."""

    model: str
    step: StepSizeAsked
    measured_s: float
    spread: float
    predicted_s: float
    pace: float  # of the machine against the profile's: 1 is as then

    @property
    def error(self) -> float:
        """Of the prediction, at the pace of the moment."""
        return self.pace * self.predicted_s / self.measured_s - 1.0


def usual_steps(most_rows: int, longest: int) -> list[StepSizeAsked]:
    """Return steps of servers: few and many answers, short and long contexts, prompts."""
    rows = [n for n in (1, 3, 6, 16, 40, 64, 128, 200) if n <= most_rows]
    steps = [
        StepSizeAsked(rows=n, keys=keys)
        for n in rows
        for keys in (330, 1500)
        if keys <= longest and n * keys <= 200_000
    ]
    chunks = [(200, 0), (700, 0), (1800, 0), (300, 2500)]
    return steps + [StepSizeAsked(chunk=n, keys=n + b) for n, b in chunks if n + b <= longest]


def time_steps(
    name: str,
    spec: ModelSpec,
    accelerator: Accelerator,
    profile: Profile,
    dtype: Dtype,
    *,
    most_rows: int = 256,
    longest: int = 4096,
    hold_out: bool = True,
    report: Callable[[str], None] = lambda _: None,
) -> Iterator[TimedStep]:
    """Yield steps of a model with random weights; `hold_out`: its own shapes are not looked at."""
    worker = serving_worker(spec, accelerator, dtype, most_rows, longest)
    chip = MeasuredChip(profile, dtype)
    if hold_out:
        own = {(row_name(c.operator, "inference"), c.shape) for c in served_model_cases(spec)}
        chip = chip.without(own)
    cluster = local_cluster()
    pool = cluster.pools[0]
    prices = StagePrices(spec, (0, spec.num_units), cluster, pool, measured=chip)
    timer, warm = timer_for(accelerator), worker.warm_steps
    anchors = _anchors(profile, accelerator, dtype, timer)
    for asked in usual_steps(most_rows, longest):
        report(f"{name}: {asked}")
        run = warm.rehearse(asked.shape, asked.keys)
        run()
        samples, trial = Samples(), Samples()
        timer.sample(run, 1, trial, ahead=False)
        calls = timer.calls_for(min(trial.seconds))
        for _ in range(ROUNDS):
            timer.sample(run, calls, samples, ahead=False)
            for anchor in anchors:
                timer.sample(anchor.run, anchor.calls, anchor.samples)
        yield TimedStep(
            model=name,
            step=asked,
            measured_s=samples.median,
            spread=samples.spread,
            predicted_s=prices.seconds(asked.load(spec)),
            pace=drift(anchors, last=ROUNDS) if anchors else 1.0,
        )


def serving_worker(
    spec: ModelSpec, accelerator: Accelerator, dtype: Dtype, most_rows: int, longest: int
) -> Worker:
    """Return a worker of a model with random weights."""
    kind = TORCH_DTYPES[dtype]
    operators = accelerator.operators.as_serving()
    model = Model(spec, operators, dtype=kind, device=accelerator.device)
    initialize(model, on_device=True)
    model.eval().requires_grad_(False)
    prepare(model)
    sizes = Sizes(slots=most_rows, max_length=longest, pages=most_rows * 96 + longest // 16 + 1)
    settings = settings_for(spec, sizes, accelerator, kind, model)
    worker = Worker(model, accelerator, settings, dtype=kind)
    worker.sampler.send()
    return worker


def _anchors(
    profile: Profile, accelerator: Accelerator, dtype: Dtype, timer: Timer
) -> Sequence[Anchor]:
    rows = [r for r in profile.operators if r.operator == "linear.inference" and r.dtype is dtype]
    wanted = 1e-4 if timer.issues else 2e-3
    rows = sorted(rows, key=lambda r: (abs(math.log(r.seconds / wanted)), r.shape))[:ANCHORS]
    workspace = Workspace(accelerator, dtype)
    anchors = []
    for row in rows:
        case = ProfileCase("linear", row.shape, serves=True)
        made = prepare_served(case, workspace, accelerator)
        whole = row.seconds * made.calls
        anchors.append(
            Anchor(run=made.runs["inference"], calls=timer.calls_for(whole), profiled_s=whole)
        )
    for anchor in anchors:
        anchor.run()
    accelerator.synchronize()
    return anchors


def cut(spec: ModelSpec, layers: int | None) -> ModelSpec:
    """Return a model with its first layers alone."""
    if layers is None or layers >= spec.num_layers:
        return spec
    return replace(spec, num_layers=layers)
