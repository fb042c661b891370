"""What a step takes between its operators: a block's time less what its operators take alone.

On a host it is what runs around them, on a chip the way from one kernel to the next of another
kind. It hangs little on sizes, so it is measured on one small model.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tutti.accelerator import Accelerator
from tutti.accelerator.profiling.cases import ProfileCase
from tutti.accelerator.profiling.served_cases import prepare_served
from tutti.accelerator.profiling.timer import Samples, Timer, timer_for
from tutti.accelerator.profiling.workspace import Workspace
from tutti.bench.serving_steps import cut, serving_worker
from tutti.cost.arrays import Strategy
from tutti.cost.measured.calls import block_calls
from tutti.hardware.chip import Dtype
from tutti.hardware.profile import Profile
from tutti.models.load import load_model
from tutti.models.spec import ModelSpec
from tutti.serve.inputs import Shape

HOST_MODEL, DEVICE_MODEL = "smollm2-135m", "llama-3.2-1b"
FEW_LAYERS, MORE_LAYERS = 1, 4
ROWS, KEYS = (1, 16), 256
ROUNDS = 7


def with_served_gap(profile: Profile, accelerator: Accelerator, dtype: Dtype) -> Profile:
    """Return the profile with the time between operators of a server's step."""
    name = HOST_MODEL if accelerator.device.type == "cpu" else DEVICE_MODEL
    spec, timer = load_model(name), timer_for(accelerator)
    steps: dict[tuple[int, int], Callable[[], None]] = {}
    gaps = []
    for rows in ROWS:
        asked = Shape(rows, rows, rows, 1, KEYS)
        for layers in (FEW_LAYERS, MORE_LAYERS):
            worker = serving_worker(cut(spec, layers), accelerator, dtype, max(ROWS), 2 * KEYS)
            steps[rows, layers] = worker.warm_steps.rehearse(asked, KEYS)
        few, more = (steps[rows, layers] for layers in (FEW_LAYERS, MORE_LAYERS))
        parts = operators_of_block(spec, rows)
        alone = _alone(parts, accelerator, dtype, timer)
        block = _difference(few, more, timer) / (MORE_LAYERS - FEW_LAYERS)
        gaps.append((block - alone) / len(parts))
    accelerator.empty_cache()
    return replace(profile, served_gap_s=float(f"{max(0.0, statistics.mean(gaps)):.4g}"))


def operators_of_block(spec: ModelSpec, rows: int) -> list[ProfileCase]:
    """Return what a block of a step of single tokens runs, its attention included."""
    strategy = Strategy.filled(sequence_length=1.0, sequences=float(rows), tp=1.0)
    cases = []
    for call in block_calls(spec, spec.blocks[0], strategy, serves=True):
        if np.any(call.times):
            shape = tuple(max(1, round(float(np.asarray(d)))) for d in call.dims)
            cases.append(ProfileCase(call.operator, shape, serves=True))
    part = spec.blocks[0].attention
    shape = (rows, KEYS, part.heads, part.kv_heads, part.head_dim, part.value_dim)
    return [*cases, ProfileCase("decode_attention", shape, serves=True)]


def _alone(cases: list[ProfileCase], accelerator: Accelerator, dtype: Dtype, timer: Timer) -> float:
    """Return the sum of what operators take by themselves."""
    space, total = Workspace(accelerator, dtype), 0.0
    for case in cases:
        made = prepare_served(case, space, accelerator)
        total += _median(made.runs["inference"], timer) / made.calls
    return total


def _difference(few: Callable[[], None], more: Callable[[], None], timer: Timer) -> float:
    """Return how much longer one run takes than another, in turns."""
    samples = (Samples(), Samples())
    counts = [_calls(run, timer) for run in (few, more)]
    for _ in range(ROUNDS):
        for run, calls, own in zip((few, more), counts, samples, strict=True):
            timer.sample(run, calls, own)
    return samples[1].median - samples[0].median


def _median(run: Callable[[], object], timer: Timer) -> float:
    samples, calls = Samples(), _calls(run, timer)
    for _ in range(ROUNDS):
        timer.sample(run, calls, samples)
    return samples.median


def _calls(run: Callable[[], object], timer: Timer) -> int:
    trial = Samples()
    run()
    timer.sample(run, 1, trial)
    return timer.calls_for(trial.median)
