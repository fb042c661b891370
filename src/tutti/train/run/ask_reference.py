"""What a reference model says of the answers that a job compares, asked once.

The reference is the model that the run begins with, so nothing is held twice: before the first step
its log-probabilities of every answer that will be trained on are computed under the job's own plan,
and kept in the run's folder. With adapters that model is the frozen base. Whoever goes on from a
checkpoint reads them; what is missing there is asked of the first weights again.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti import files
from tutti.accelerator.reference.preference_losses import Answers
from tutti.errors import InputError
from tutti.models.objective import Objective
from tutti.train.checkpoint.coordinator import Coordinator
from tutti.train.data.feeder import Feeder, MakeAnswers, Samples
from tutti.train.data.open_data import PackedData
from tutti.train.data.order import DataPart
from tutti.train.data.row import Row, blank_row
from tutti.train.engine.engine import Engine
from tutti.train.engine.samples import sample_indices
from tutti.train.run.answers import Key, Order, row_at
from tutti.train.run.build_rank import begin_reference
from tutti.train.run.rank_context import RankContext

REFERENCE_FILE = "reference.json"

Feed = Callable[[Samples, int, int, MakeAnswers], Feeder]
Wanted = Mapping[Key, tuple[DataPart, int, bool]]


@dataclass(frozen=True, slots=True)
class AskingRank:
    """One rank of those that ask the reference together."""

    context: RankContext
    engine: Engine
    coordinator: Coordinator
    feed: Feed

    def references(self, data: PackedData, objective: Objective) -> dict[Key, list[float]]:
        """Return the log-probabilities of all answers that the run will see, kept or asked for."""
        config, batch = self.context.config, self.context.plan.job.global_batch
        held = config.validation.steps * batch if config.validation.every else 0
        wanted = wanted_rows(data, objective, samples=config.steps * batch, held=held)
        file = config.folder / REFERENCE_FILE
        model = [config.model, config.start, config.seed, objective.reference]
        fingerprint = files.fingerprint([data.fingerprint, model])
        first = self.coordinator.rank == 0
        kept = _listed(read_references(file, fingerprint)) if first else None
        known = _keyed(self.coordinator.broadcast(kept))
        if set(wanted) <= set(known):
            return known
        begin_reference(self.context, self.engine)
        self.context.say(f"asking the reference model about {len(wanted):,} rows")
        logps = self._ask(wanted)
        if first:
            write_references(file, fingerprint, logps)
        return logps

    def _ask(self, wanted: Wanted) -> dict[Key, list[float]]:
        """Return what the weights, as they are, say of some rows."""
        listed = _Listed(list(wanted.values()), blank_row(self.engine.plan.job.sequence_length, 0))
        by_row = ask_rows(self.engine, self.feed, self.coordinator, listed, len(wanted))
        keys = list(wanted)
        return {keys[sample]: values for sample, values in by_row.items()}


def ask_rows(
    engine: Engine, feed: Feed, coordinator: Coordinator, rows: Samples, count: int
) -> dict[int, list[float]]:
    """Return the log-probabilities of the documents of so many rows, by the weights as they are.

    All ranks ask together, and all of them know; blank rows are to stand behind the last.
    """
    plan, seat = engine.plan, engine.seat
    steps = -(-count // plan.job.global_batch)
    speaks = engine.spec.head_unit in seat.units and not seat.tensor.rank and not seat.place.cp
    own: list[tuple[int, list[float]]] = []
    with feed(rows, 0, steps, functools.partial(Answers.of, None)) as feeder:
        for step in range(steps):
            engine.evaluate(feeder.step(step))
            for micro_batch, logps in sorted(engine.passes.logps.items()) if speaks else ():
                values = logps.tolist()
                for sample in sample_indices(plan, seat, step, micro_batch):
                    size = len(rows.row(sample).lengths)
                    if sample < count:
                        own.append((sample, values[:size]))
                    values = values[size:]
    told = coordinator.gather(own)
    joined = None if told is None else [pair for part in told for pair in part]
    return {sample: list(values) for sample, values in coordinator.broadcast(joined)}


@dataclass(frozen=True, slots=True)
class _Listed:
    """Some rows, and blank ones behind the last."""

    rows: Sequence[tuple[DataPart, int, bool]]
    blank: Row

    def row(self, sample: int) -> Row:
        """Return a row by its place in the list."""
        if sample >= len(self.rows):
            return self.blank
        part, row, other = self.rows[sample]
        return row_at(part, row, other=other)


def wanted_rows(data: PackedData, objective: Objective, *, samples: int, held: int) -> Wanted:
    """Return the rows that so many samples of training, and of what is held out, come to."""
    rows: dict[Key, tuple[DataPart, int, bool]] = {}
    sides = (False,) if objective.is_paired else (False, True)
    whole = sum(part.count for part in data.train.parts)
    orders: list[tuple[Order, int]] = [(data.train, samples)]
    if data.validation is not None:
        orders.append((data.validation, min(held, data.validation.num_rows)))
    for order, count in orders:
        for sample in range(count):
            part, row = order.part_and_row(sample)
            for other in sides:
                rows[part.number, row, other] = (part, row, other)
            if order is data.train and len(rows) == len(sides) * whole:
                break
    return dict(sorted(rows.items()))


def read_references(file: Path, fingerprint: str) -> dict[Key, list[float]]:
    """Return what an earlier process of the run kept; nothing of other data or another model."""
    if not file.is_file():
        return {}
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
        if held["of"] != fingerprint:
            return {}
        return _keyed(held["rows"])
    except (ValueError, KeyError, TypeError):
        raise InputError(
            f"{file}: is damaged; remove it, and the reference model is asked again"
        ) from None


def write_references(file: Path, fingerprint: str, logps: Mapping[Key, Sequence[float]]) -> None:
    """Keep what the reference says."""
    files.write_text(file, json.dumps({"of": fingerprint, "rows": _listed(logps)}) + "\n")


def _listed(logps: Mapping[Key, Sequence[float]]) -> list[tuple[int, int, bool, list[float]]]:
    return [(*key, list(values)) for key, values in logps.items()]


def _keyed(rows: Sequence[Sequence[Any]]) -> dict[Key, list[float]]:
    return {(a, b, bool(c)): list(values) for a, b, c, values in rows}
