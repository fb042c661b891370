"""A job's teacher: beside the head in every step, or asked once before the first and kept.

What it told lies in the run's folder, a row after the other: its most probable tokens with their
log-probabilities. Whoever goes on from a checkpoint reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tutti import files
from tutti.errors import InputError
from tutti.huggingface import open_checkpoint
from tutti.models.distillation import Distillation, teacher_model
from tutti.nn.batch import Batch
from tutti.nn.load import load
from tutti.nn.parallel.rows import pieces_of
from tutti.train.checkpoint.coordinator import Coordinator
from tutti.train.data.feeder import Feeder, Samples
from tutti.train.data.open_data import PackedData
from tutti.train.data.order import DataPart
from tutti.train.data.row import Row, blank_row
from tutti.train.engine.engine import Batches, Engine
from tutti.train.engine.samples import sample_indices
from tutti.train.engine.teacher import StoredTaught, Teacher
from tutti.train.run.answers import Order
from tutti.train.run.rank_context import RankContext
from tutti.train.run.weights import model_folder

FOLDER = "teacher"
_TOLD, _TOKENS, _LOGPS = "told.json", "tokens.bin", "logps.bin"
Key = tuple[int, int]  # source, row
Feed = Callable[[Samples, int, int], Feeder]


@dataclass(frozen=True, slots=True)
class _Listed:
    """Some rows, and blank ones behind the last."""

    rows: list[tuple[DataPart, int]]
    blank: Row

    def row(self, sample: int) -> Row:
        if sample >= len(self.rows):
            return self.blank
        part, row = self.rows[sample]
        return part.rows.row(row)


class Teaching:
    """What a rank of a job has of its teacher."""

    def __init__(
        self,
        how: Distillation,
        context: RankContext,
        engine: Engine,
        coordinator: Coordinator,
        data: PackedData,
        feed: Feed,
    ) -> None:
        """Load the teacher where the head is; ask it at once if its answers are to be kept."""
        self.how, self._context, self._engine = how, context, engine
        self._at_head = engine.spec.head_unit in engine.seat.units
        self._places: dict[Key, int] = {}
        self._teacher: Teacher | None = None
        if how.stored:
            self._keep(coordinator, data, feed)
        elif self._at_head:
            self._teacher = self._loaded()

    def steps(self, order: Order, own: Callable[[int], Batches]) -> Callable[[int], Batches]:
        """Return the batches of an order's steps with what the teacher tells of them."""
        return lambda step: self._taught(order, step, own(step)) if self._at_head else own(step)

    def _taught(self, order: Order, step: int, batches: Batches) -> Batches:
        def with_teacher(micro_batch: int) -> Batch:
            batch = batches(micro_batch)
            if self._teacher is not None:
                return replace(batch, taught=self._teacher)
            plan, seat = self._context.plan, self._context.seat
            samples = sample_indices(plan, seat, step, micro_batch)
            return replace(batch, taught=self._told(order, samples, batch))

        return with_teacher

    def _loaded(self) -> Teacher:
        folder = model_folder(self.how.teacher)
        if folder is None or not any(folder.glob("*.safetensors")):
            raise InputError(
                f"distillation: {self.how.teacher} holds no .safetensors; name a model folder "
                "with weights"
            )
        engine = self._engine
        self._context.say(f"reading the teacher's weights of {folder}")
        made = Teacher(
            teacher_model(self.how, self._context.spec), self.how, engine.accelerator.operators,
            engine.context, dtype=engine.dtype, device=engine.accelerator.device,
        )  # fmt: skip
        load(made.model, open_checkpoint(folder))
        return made

    # --- what is kept ----------------------------------------------------------------------

    def _keep(self, coordinator: Coordinator, data: PackedData, feed: Feed) -> None:
        config, batch = self._context.config, self._context.plan.job.global_batch
        held = config.validation.steps * batch if config.validation.every else 0
        wanted = _wanted(data, samples=config.steps * batch, held=held)
        self._places = {key: place for place, key in enumerate(wanted)}
        length, top = self._context.plan.job.sequence_length, self.how.top_k or 0
        self._shapes = {_TOKENS: (len(wanted), length, top), _LOGPS: (len(wanted), length, top + 1)}
        facts = [data.fingerprint, self._facts(), [list(key) for key in wanted]]
        fingerprint = files.fingerprint(facts)
        self._folder = config.folder / FOLDER
        known = _read_told(self._folder) == fingerprint if coordinator.rank == 0 else None
        if coordinator.broadcast(known):
            return
        if coordinator.rank == 0:
            self._make_files()
        coordinator.broadcast(True if coordinator.rank == 0 else None)
        rows = _Listed(list(wanted.values()), blank_row(length, 0))
        self._context.say(f"asking the teacher about {len(wanted):,} rows")
        self._ask(rows, feed)
        coordinator.gather(True)
        if coordinator.rank == 0:
            files.write_text(self._folder / _TOLD, json.dumps({"of": fingerprint}) + "\n")
        coordinator.broadcast(True if coordinator.rank == 0 else None)

    def _facts(self) -> list[Any]:
        folder = model_folder(self.how.teacher)
        weights = sorted(folder.glob("*.safetensors")) if folder is not None else []
        about = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in weights]
        return [self.how.teacher, self.how.top_k, self.how.temperature, about]

    def _make_files(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / _TOLD).unlink(missing_ok=True)
        for name, shape in self._shapes.items():
            with (self._folder / name).open("wb") as file:
                file.truncate(4 * int(np.prod(shape)))

    def _file(self, name: str, mode: str) -> np.memmap[Any, Any]:
        dtype = np.int32 if name == _TOKENS else np.float32
        return np.memmap(self._folder / name, dtype, mode, shape=self._shapes[name])  # type: ignore[call-overload,no-any-return]

    def _ask(self, rows: _Listed, feed: Feed) -> None:
        """Let the ranks of the head write what the teacher tells of their samples."""
        if not self._at_head:
            return
        teacher, plan, seat = self._loaded(), self._context.plan, self._context.seat
        kept = {name: self._file(name, "r+") for name in self._shapes}
        steps = -(-len(rows.rows) // plan.job.global_batch)
        with feed(rows, 0, steps) as feeder:
            for step in range(steps):
                for micro_batch in range(plan.pipelines[seat.place.pipeline].micro_batches):
                    batch = feeder.batch(step, micro_batch)
                    told = teacher.told(batch)(slice(None))
                    if seat.tensor.rank:
                        continue
                    samples = sample_indices(plan, seat, step, micro_batch)
                    answers = {_TOKENS: told.tokens_tk, _LOGPS: told.logps_tk}
                    self._write(kept, answers, samples, self._own(batch), len(rows.rows))
        for file in kept.values():
            file.flush()

    def _write(
        self,
        kept: Mapping[str, Any],
        answers: Mapping[str, Any],
        samples: range,
        own: np.ndarray[Any, Any],
        count: int,
    ) -> None:
        length = self._shapes[_TOKENS][1]
        rows, columns = own // length + samples.start, own % length
        real = rows < count
        for name, told in answers.items():
            values = told.cpu().numpy().astype(kept[name].dtype)
            kept[name][rows[real], columns[real]] = values[real]

    def _own(self, batch: Batch) -> np.ndarray[Any, Any]:
        """Return which of a micro-batch's tokens this rank has."""
        ways, rank = self._context.seat.replica.cp, self._context.seat.place.cp
        if ways == 1:
            return np.arange(batch.num_tokens)
        pieces = pieces_of(batch.lengths, batch.rows, ways, rank)
        return np.concatenate([np.arange(piece.first, piece.last) for piece in pieces])

    def _told(self, order: Order, samples: range, batch: Batch) -> StoredTaught:
        own, length = self._own(batch), self._shapes[_TOKENS][1]
        places = np.zeros(len(samples), np.int64)  # a blank row has no loss: whatever is told of it
        for index, sample in enumerate(samples):
            known = sample < getattr(order, "num_rows", sample + 1)
            if known:
                part, row = order.part_and_row(sample)
                places[index] = self._places[part.number, row]
        rows, columns = places[own // length], own % length
        device = self._engine.accelerator.device
        tokens, logps = (
            torch.from_numpy(np.ascontiguousarray(self._file(name, "r")[rows, columns])).to(device)
            for name in (_TOKENS, _LOGPS)
        )
        return StoredTaught(self.how, tokens, logps)


def _wanted(data: PackedData, *, samples: int, held: int) -> dict[Key, tuple[DataPart, int]]:
    """Return the rows that so many samples of training, and of what is held out, come to."""
    rows: dict[Key, tuple[DataPart, int]] = {}
    orders: list[tuple[Order, int]] = [(data.train, samples)]
    if data.validation is not None:
        orders.append((data.validation, min(held, data.validation.num_rows)))
    for order, count in orders:
        for sample in range(count):
            part, row = order.part_and_row(sample)
            rows[part.number, row] = (part, row)
    return dict(sorted(rows.items(), key=lambda item: item[0]))


def _read_told(folder: Path) -> str:
    file = folder / _TOLD
    if not file.is_file():
        return ""
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["of"])
    except (ValueError, KeyError, TypeError):
        return ""
