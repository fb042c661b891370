"""What a rank leaves of every step for `tutti align`: its part of reduced gradients and weights.

Each rank appends to a file of its own what no other rank has to say, straight from the shards, so
that nothing is gathered and no rank holds more than one span besides what it trains with. Rank 0
adds what was run. `step_dump` puts the pieces together, on any machine that sees the folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tutti.document import Count, Natural, plain
from tutti.files import unwritable
from tutti.huggingface.alignment_sides import versions
from tutti.models.spec import ModelSpec
from tutti.ownership.buckets import tied_apart
from tutti.ownership.ownership import Block, tied_ends
from tutti.train.engine.engine import Engine
from tutti.train.engine.step_totals import StepResult
from tutti.train.run.planning import STEPS_FILE
from tutti.train.state.state import SpanState

TOKENS = "tokens.npy"
START = 0  # the number of the "step" that the first weights are kept under


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPiece:
    """Where some numbers of a tensor lie in a rank's file, as float32."""

    step: Natural
    what: str  # "gradient" or "weight"
    name: str
    intervals: tuple[tuple[Natural, Natural], ...]  # the block of the tensor
    start: Natural  # the piece's first number in the block, which is laid out in rows
    count: Count
    offset: Natural  # of its first byte in the file


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """The numbers of a step that all ranks share."""

    step: Count
    loss: float | None  # none: not finite
    gradient_norm: float | None  # none: gradients overflowed and nothing was updated


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What was run, by rank 0."""

    model: str
    model_type: str
    model_hash: str
    dtype: str
    ranks: Count
    cluster: str
    global_batch: Count
    sequence_length: Count
    seed: Natural
    tensors: Mapping[str, tuple[Natural, ...]]  # shapes, in the order of the backward pass
    steps: tuple[StepFacts, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


def files_of_rank(folder: Path, rank: int) -> tuple[Path, Path]:
    """Return the numbers and the list of pieces of a rank."""
    return folder / f"rank-{rank}.bin", folder / f"rank-{rank}.jsonl"


def backward_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the trained tensors' shapes from the head to the embedding."""
    return {
        f"{unit}.{parameter.name}": parameter.shape
        for unit in reversed(range(spec.num_units))
        for parameter in reversed(spec.parameters(unit))
        if parameter.trainable and parameter.tied_to is None
    }


class StepTensors:
    """Writes a rank's pieces while it trains."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine, self._rank, self._folder = engine, engine.seat.rank, folder
        self._ends = tied_ends(engine.spec) if tied_apart(engine.plan) else ()
        self._steps: list[StepFacts] = []
        self._step = START
        try:
            folder.mkdir(parents=True, exist_ok=True)
            numbers, pieces = files_of_rank(folder, self._rank)
            self._numbers: IO[bytes] = numbers.open("wb")
            self._pieces: IO[str] = pieces.open("w", encoding="utf-8")
        except OSError as error:
            raise unwritable(folder, error) from None
        engine.watcher = self._gradients
        self._weights()

    def _gradients(self, result: StepResult, divisor: float) -> None:
        self._step += 1
        self._steps.append(
            StepFacts(
                step=self._step,
                loss=result.loss if math.isfinite(result.loss) else None,
                gradient_norm=None if result.skipped else result.gradient_norm,
            )
        )
        if result.skipped:
            return  # overflowed: they are thrown away
        for state in self._counted():
            own = _own(state)
            self._write("gradient", state, state.final_gradients()[own].float() / divisor)

    def _weights(self) -> None:
        for state in self._counted():
            own = _own(state)
            self._write("weight", state, state.read_kept(own.start, own.stop))

    def after_step(self) -> None:
        """Keep the weights that a step led to."""
        self._weights()

    def _counted(self) -> Iterator[SpanState]:
        """Yield the spans that this rank speaks for; at levels 2 and 3 the first pipeline does."""
        for state in self._engine.parameters.all_states():
            if state.level < 2 or self._engine.seat.place.pipeline == 0:
                yield state

    def _write(self, what: str, state: SpanState, numbers: Tensor) -> None:
        """Write this rank's own elements of a span, block by block."""
        flat: NDArray[np.float32] = numbers.detach().float().cpu().numpy()
        own, offset = state.span.own(state.rank), 0
        for block in state.span.blocks:
            low, high = max(offset, own.start), min(offset + block.size, own.stop)
            name = self._name(block)
            if low < high and name is not None:
                piece = StepPiece(
                    step=self._step,
                    what=what,
                    name=name,
                    intervals=block.intervals,
                    start=low - offset,
                    count=high - low,
                    offset=self._numbers.tell(),
                )
                flat[low - own.start : high - own.start].tofile(self._numbers)
                self._pieces.write(json.dumps(plain(piece)) + "\n")
            offset += block.size

    def _name(self, block: Block) -> str | None:
        """Return a block's tensor; of tied weights that lie apart only the owner's end has one."""
        end = (block.unit, block.name)
        if end not in self._ends:
            return f"{block.unit}.{block.name}"
        if block.unit != self._engine.plan.tied_owner:
            return None
        unit, name = self._ends[0]
        return f"{unit}.{name}"

    def close(self) -> None:
        """End the rank's files."""
        self._engine.watcher = None
        self._numbers.close()
        self._pieces.close()

    def write_facts(self, tokens: NDArray[np.int64], *, seed: int, cluster: str) -> None:
        """Write what was run; `tokens` are all that the steps were trained on. By one rank."""
        plan, spec = self._engine.plan, self._engine.spec
        facts = RunFacts(
            model=spec.name,
            model_type=spec.model_type,
            model_hash=spec.fingerprint,
            dtype=str(self._engine.dtype).removeprefix("torch."),
            ranks=plan.num_ranks,
            cluster=cluster,
            global_batch=plan.job.global_batch,
            sequence_length=plan.job.sequence_length,
            seed=seed,
            tensors=backward_tensors(spec),
            steps=tuple(self._steps),
            versions=versions(),
        )
        np.save(self._folder / TOKENS, tokens)
        (self._folder / STEPS_FILE).write_text(json.dumps(plain(facts)) + "\n", encoding="utf-8")


def _own(state: SpanState) -> slice:
    """Return which of the kept elements no other holder speaks for."""
    own, first = state.span.own(state.rank), state.kept.start
    return slice(own.start - first, own.stop - first)
