"""A job's losses on answers: rows with what a reference model says of them, and KTO's baseline."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tutti.accelerator.reference.preference_losses import Answers
from tutti.models.objective import Objective
from tutti.nn.batch import Batch
from tutti.train.data.answer_rows import AnswerRows
from tutti.train.data.feeder import MakeAnswers
from tutti.train.data.order import DataPart, TrainingOrder, ValidationRows
from tutti.train.data.row import Row
from tutti.train.engine.engine import Batches, Engine

Key = tuple[int, int, bool]  # source, row, whether it is its `other_row`
Order = TrainingOrder | ValidationRows


def row_at(part: DataPart, row: int, *, other: bool) -> Row:
    """Return a row of answers, or the row that it is held against."""
    rows = part.rows
    assert isinstance(rows, AnswerRows)
    return rows.other_row(row) if other else rows.row(row)


@dataclass(frozen=True, slots=True)
class AnswerSamples:
    """The rows of an order with what the reference says of them; or those they are held against."""

    order: Order
    references: Mapping[Key, Sequence[float]]
    other: bool = False

    def row(self, sample: int) -> Row:
        """Return the row of a global sample."""
        if isinstance(self.order, ValidationRows) and sample >= self.order.num_rows:
            return self.order.blank
        part, row = self.order.part_and_row(sample)
        answer = row_at(part, row, other=self.other)
        known = self.references.get((part.number, row, self.other))
        return answer if known is None else replace(answer, references=tuple(known))


class AnswerLoss:
    """How a rank's batches of answers are made and, for KTO, held against others."""

    def __init__(self, objective: Objective, references: Mapping[Key, Sequence[float]]) -> None:
        self.objective, self._references = objective, references
        self.make: MakeAnswers = functools.partial(Answers.of, objective)
        self.sums: MakeAnswers = functools.partial(Answers.of, None)

    def samples(self, order: Order, *, other: bool = False) -> AnswerSamples:
        """Return an order's rows as they are trained on, or what they are held against."""
        return AnswerSamples(order, self._references, other)

    @property
    def has_baseline(self) -> bool:
        """Whether a step asks first how far the model is from the reference."""
        return self.objective.has_baseline

    def against(self, engine: Engine, batches: Batches, others: Batches) -> Batches:
        """Return batches that know the baseline: the mean of the others' ratios, 0 at least."""
        baseline = max(0.0, engine.evaluate(others).loss)

        def with_baseline(micro_batch: int) -> Batch:
            batch = batches(micro_batch)
            assert isinstance(batch.answers, Answers)
            return replace(batch, answers=replace(batch.answers, baseline=baseline))

        return with_baseline
