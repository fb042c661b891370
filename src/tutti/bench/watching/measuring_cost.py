"""What timing every instruction costs: by itself, over many rounds, and in whole steps.

The share of a step is the recorder's own time, which a noisy host blurs least, over the step's;
steps with and without it, in turns, are shown beside it and differ by chance where it is small.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from tutti.accelerator import open_accelerator
from tutti.bench.training.question import SETTINGS, Say
from tutti.models import read_config
from tutti.models.load import catalog_config
from tutti.nn.batch import Batch
from tutti.nn.initialize import initialize
from tutti.plan.job import PRECISIONS
from tutti.ranks.single_rank import NoLinks, plan_alone
from tutti.train.engine.engine import Engine
from tutti.train.engine.recorder import Recorder
from tutti.units import many

LIMIT = 0.01  # of the step
_ROUNDS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuringQuestion:
    """What is timed."""

    model: str
    device: str | None
    layers: int
    micro_batches: int
    sequence_length: int
    steps: int

    @property
    def title(self) -> str:
        """What a table says of itself."""
        return (
            f"{self.model}, {many(self.layers, 'layer')}, "
            f"{many(self.micro_batches, 'micro-batch', 'micro-batches')} of "
            f"{self.sequence_length} tokens"
        )


class Silent(Recorder):
    """Takes no times."""

    def begin_step(self) -> None:
        """Do nothing."""

    def start(self, index: int) -> None:
        """Do nothing."""

    def issued(self, index: int) -> None:
        """Do nothing."""

    def waited(self, index: int, since: float) -> None:
        """Do nothing."""

    def end_step(self) -> None:
        """Do nothing."""


def measuring_cost(asked: MeasuringQuestion, say: Say) -> dict[str, Any]:
    """Return seconds and the share of a step."""
    say("building")
    engine = _engine(asked)
    accelerator = engine.accelerator
    loud: Recorder = engine.recorder
    silent = Silent(engine.instructions, accelerator)
    batch = _batch(asked, engine)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(asked.steps + 1):
        say(f"step {number} of {asked.steps}")
        for measured in (True, False):
            engine.recorder = loud if measured else silent
            accelerator.synchronize()
            begin = time.perf_counter()
            engine.step(lambda _: batch, SETTINGS)
            accelerator.synchronize()
            if number:  # the first warms up
                seconds[measured].append(time.perf_counter() - begin)
    say("the recorder alone")
    marks, closing = recorder_seconds(loud, len(engine.instructions))
    mute, _ = recorder_seconds(silent, len(engine.instructions))
    step = statistics.median(seconds[True])
    whole = max(0.0, marks - mute) + closing
    return {
        "title": asked.title,
        "instructions": len(engine.instructions),
        "per_instruction_s": max(0.0, marks - mute) / len(engine.instructions),
        "closing_s": closing,
        "per_step_s": whole,
        "step_s": step,
        "silent_step_s": statistics.median(seconds[False]),
        "spread": (max(seconds[True]) - min(seconds[True])) / step,
        "share": whole / step,
        "limit": LIMIT,
    }


def recorder_seconds(recorder: Recorder, count: int) -> tuple[float, float]:
    """Return the median seconds of a step's marks, and of drawing up its times."""
    marks, closings = [], []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        recorder.begin_step()
        for index in range(count):
            recorder.start(index)
            recorder.issued(index)
            recorder.waited(index, begin)
        recorder.end_step()
        middle = time.perf_counter()
        recorder.times()
        marks.append(middle - begin)
        closings.append(time.perf_counter() - middle)
    return statistics.median(marks), statistics.median(closings)


def _engine(asked: MeasuringQuestion) -> Engine:
    accelerator = open_accelerator(asked.device)
    config = dict(catalog_config(asked.model)) | {"num_hidden_layers": asked.layers}
    spec = read_config(config, asked.model)
    plan = plan_alone(
        spec,
        sequence_length=asked.sequence_length,
        micro_batch=1,
        micro_batches=asked.micro_batches,
        precision=PRECISIONS["fp32" if accelerator.device.type == "cpu" else "pure_bf16"],
    )
    engine = Engine(plan, spec, 0, accelerator, NoLinks(), clip_norm=1.0)
    initialize(engine.model)
    engine.take_masters()
    return engine


def _batch(asked: MeasuringQuestion, engine: Engine) -> Batch:
    spec = engine.spec
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(spec.vocab, (asked.sequence_length + 1,), generator=generator)
    tokens = tokens.to(engine.accelerator.device)
    return Batch.of(spec, tokens[:-1], [asked.sequence_length], targets_t=tokens[1:])
