"""Whole training steps on one chip: the engine's, and those of peers that are installed."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
from typing import Any, NamedTuple

from tutti.accelerator import Accelerator, open_accelerator
from tutti.bench.training.breakdown import best_rates, kernel_seconds, parts
from tutti.bench.training.question import SETTINGS, WARM_UP, Say, SpeedQuestion, timed, tokens_of
from tutti.bench.training.titan_peer import titan_is_here, torchtitan_speed
from tutti.bench.training.transformers_peer import hugging_face_speed
from tutti.cost.plan.sources import Sources
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.hardware.local import local_cluster
from tutti.hardware.profile import shipped_profile
from tutti.models.lengths import length_refusal
from tutti.models.spec import ModelSpec
from tutti.nn.batch import Batch
from tutti.nn.initialize import initialize
from tutti.plan.plan import Plan
from tutti.ranks.single_rank import NoLinks
from tutti.simulate.estimate import estimate
from tutti.train.engine.engine import Engine
from tutti.train.graphs.captured_blocks import CaptureSettings
from tutti.train.state.state import TORCH_DTYPES
from tutti.units import bytes_text


class StepForecast(NamedTuple):
    """What the planner says of a step before it runs."""

    bytes: float  # does not depend on the chip
    step_s: float | None  # None: no profile of the chip ships


def predicted(plan: Plan, spec: ModelSpec, accelerator: Accelerator) -> StepForecast:
    """Return what a planner takes a step on this chip to need."""
    known = shipped_profile(accelerator.chip)
    pools = local_cluster().pools
    own = next((pool for pool in pools if pool.chip.name == accelerator.chip), pools[0])
    cluster = Cluster(name="here", pools=(dataclasses.replace(own, name="here"),))
    sources = Sources(profiles=() if known is None else (known,))
    estimated = estimate(plan, spec, cluster, sources)
    memory = estimated.memory[0]
    step_s = None if known is None else estimated.step_seconds
    return StepForecast(memory.total - memory.runtime, step_s)


def _require_room(asked: SpeedQuestion, need: float, accelerator: Accelerator) -> None:
    """Refuse what the device cannot hold: a host would take all memory, then end the process."""
    total = accelerator.memory().total
    if need > total:
        raise InputError(
            f"{asked.title}: takes about {bytes_text(need)}, but {accelerator.chip} has "
            f"{bytes_text(total)}; give --layers, --recompute, or a smaller --micro-batch or "
            "--sequence-length"
        )


def our_speed(asked: SpeedQuestion, say: Say, *, breakdown: bool = False) -> dict[str, Any]:
    """Time the engine."""
    say(f"{asked.title}: tutti")
    gc.collect()
    accelerator, spec = open_accelerator(asked.device), asked.spec()
    accelerator.empty_cache()
    if refusal := length_refusal(spec, asked.sequence_length):
        raise InputError(f"--sequence-length: {refusal}")
    plan = asked.plan(spec)
    expected = predicted(plan, spec, accelerator)
    _require_room(asked, expected.bytes, accelerator)
    accelerator.reset_peak()
    chosen = CaptureSettings(mode=asked.capture, say=say)
    engine = Engine(plan, spec, 0, accelerator, NoLinks(), clip_norm=None, capture=chosen)
    initialize(engine.model, on_device=True)
    engine.take_masters()
    batches = [tokens_of(asked, spec, accelerator, i) for i in range(WARM_UP + asked.steps)]
    lengths = [asked.sequence_length] * asked.micro_batch
    first = Batch.of(spec, batches[0][0].flatten(), lengths)

    def step(index: int) -> float:
        tokens, targets = (each.flatten() for each in batches[index])
        batch = Batch.of(spec, tokens, lengths, targets_t=targets, like=first)  # as a feeder does
        return engine.step(lambda _: batch, SETTINGS).loss

    row = timed("tutti", asked, spec, accelerator, step)
    row |= {"predicted_bytes": expected.bytes, "predicted_s": expected.step_s}
    if breakdown:
        step(0)
        accelerator.synchronize()
        row["breakdown"] = _where(engine)
        rates = best_rates(accelerator, TORCH_DTYPES[plan.job.precision.stream])
        spent = kernel_seconds(lambda: step(0), accelerator)
        row["parts"] = [dataclasses.asdict(part) for part in parts(spent, spec, plan.job, rates)]
    return row


def _where(engine: Engine) -> dict[str, float]:
    """Return seconds by kind of instruction and of unit."""
    spans = engine.recorder.spans()
    head = engine.spec.head_unit
    seconds: dict[str, float] = {}
    for i, entry in enumerate(engine.instructions):
        part = "embedding" if entry.start == 0 else "head" if entry.stop > head else "blocks"
        if entry.stop - entry.start > head:
            part = "all units"
        name = f"{entry.op.value} {part}" if entry.stop else entry.op.value
        seconds[name] = seconds.get(name, 0.0) + float(spans.end[i] - spans.start[i])
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def speeds(
    asked: SpeedQuestion, say: Say, *, peers: bool, breakdown: bool = False
) -> list[dict[str, Any]]:
    """Time the engine and, with `peers`, what is installed of transformers, Liger, torchtitan."""
    rows = [our_speed(asked, say, breakdown=breakdown)]
    if peers and asked.base == "wide":  # transformers rounds frozen weights by other packages
        rows.append(hugging_face_speed(asked, say))
        if importlib.util.find_spec("liger_kernel") is not None:
            rows.append(hugging_face_speed(asked, say, liger=True))
        if titan_is_here():
            rows.append(torchtitan_speed(asked, say))
    for row in rows[1:]:
        if "failed" not in row:
            row["slower"] = row["step_s"] / rows[0]["step_s"]
    return rows
