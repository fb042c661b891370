"""Sampled answers as the rows of a step: packed, weighed, and cut up as a plan has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tutti.accelerator.reference.sampled_answers import SampledAnswers
from tutti.models.objective import Objective
from tutti.nn.batch import Batch
from tutti.train.data.feeder import to_batch
from tutti.train.data.packing import best_fit
from tutti.train.data.row import NO_TARGET
from tutti.train.engine.engine import Batches, Engine
from tutti.train.engine.samples import sequences_before

Floats = NDArray[np.float32]


class Answered(NamedTuple):
    """A prompt and one answer to it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class SampledRow(NamedTuple):
    """A row of answers, filled up with a document without a loss."""

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    lengths: tuple[int, ...]
    members: tuple[int, ...]  # the answers in it, one document each


def pack(answered: Sequence[Answered], *, rows: int, length: int, pad: int) -> list[SampledRow]:
    """Return all answers in so many rows, some of which may be blank."""
    sizes = np.asarray([len(one.prompt) + len(one.answer) for one in answered], np.int64)
    groups = best_fit(sizes, length) if len(answered) else []
    assert len(groups) <= rows, "prompts of a batch are counted so that all answers fit"
    packed = [_row(answered, tuple(members), length, pad) for members in groups]
    return packed + [_row(answered, (), length, pad)] * (rows - len(groups))


def _row(
    answered: Sequence[Answered], members: tuple[int, ...], length: int, pad: int
) -> SampledRow:
    tokens = np.full(length, pad, np.int64)
    targets = np.full(length, NO_TARGET, np.int64)
    lengths: list[int] = []
    at = 0
    for member in members:
        prompt, answer = answered[member]
        stop = at + len(prompt) + len(answer)
        tokens[at:stop] = (*prompt, *answer)
        first = at + len(prompt) - 1
        targets[first : stop - 1] = answer
        lengths.append(stop - at)
        at = stop
    if at < length:
        lengths.append(length - at)
    return SampledRow(tokens, targets, tuple(lengths), members)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledBatch:
    """The rows of a batch, and what of each answer and token the loss asks for."""

    rows: list[SampledRow]
    advantages: Floats  # of the answers
    counted: NDArray[np.bool_]  # those of groups that have rewards
    temperature: float
    old: Tensor | None = None  # (rows, tokens): log-probabilities when they were sampled
    reference: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return len(self.rows[0].tokens)

    def sums(self, logps: Tensor) -> Floats:
        """Return the log-probability of each answer, from those of all tokens."""
        sums = np.zeros(len(self.advantages), np.float32)
        for number, row in enumerate(self.rows):
            own = np.where(row.targets >= 0, logps[number].numpy(), 0.0)
            at = 0
            for member, size in zip(row.members, row.lengths, strict=False):
                sums[member] = own[at : at + size].sum()
                at += size
        return sums

    def placed(self, logps: Sequence[Sequence[float]]) -> Tensor:
        """Return each answer's log-probabilities where its tokens are predicted."""
        placed = np.zeros((len(self.rows), self.length), np.float32)
        for number, row in enumerate(self.rows):
            at = 0
            for member, size in zip(row.members, row.lengths, strict=False):
                own = logps[member]
                stop = at + size - 1
                placed[number, stop - len(own) : stop] = own
                at += size
        return torch.from_numpy(placed)

    def weighed(
        self, advantages: Floats, old: Tensor | None, reference: Tensor | None
    ) -> SampledBatch:
        """Return the batch with all that its loss needs."""
        return replace(self, advantages=advantages, old=old, reference=reference)

    def batches(self, engine: Engine, objective: Objective | None) -> Batches:
        """Return this rank's micro-batches; without an objective only to ask about tokens."""
        plan, seat = engine.plan, engine.seat
        old_sums = None
        if objective is not None and self.old is not None:
            old_sums = self.sums(self.old)

        def batch(micro_batch: int) -> Batch:
            first = sequences_before(plan, seat, micro_batch)
            return self._batch(
                engine, range(first, first + seat.replica.sequences), objective, old_sums
            )

        return batch

    def _batch(
        self, engine: Engine, own: range, objective: Objective | None, old_sums: Floats | None
    ) -> Batch:
        rows, seat = [self.rows[i] for i in own], engine.seat
        both = torch.from_numpy(
            np.stack(
                [np.concatenate([row.tokens for row in rows]),
                 np.concatenate([row.targets for row in rows])]
            )
        )  # fmt: skip
        weights: list[tuple[float, bool, float]] = []  # advantage, counted, old, of each document
        for row in rows:
            for place in range(len(row.lengths)):
                if place >= len(row.members):
                    weights.append((0.0, False, 0.0))
                    continue
                member = row.members[place]
                old = 0.0 if old_sums is None else float(old_sums[member])
                counted = bool(self.counted[member])
                weights.append((float(self.advantages[member]) * counted, counted, old))
        needs = objective is not None
        answers = SampledAnswers.of(
            objective,
            [one[0] for one in weights],
            [one[1] for one in weights],
            tokens=both.shape[1],
            device=engine.accelerator.device,
            old=_flat(self.old, own) if needs else None,
            old_sums=[one[2] for one in weights] if old_sums is not None else None,
            reference=_flat(self.reference, own) if needs else None,
            temperature=self.temperature,
        )
        return to_batch(
            engine.spec,
            engine.accelerator,
            both,
            [row.lengths for row in rows],
            (seat.replica.cp, seat.place.cp),
            answers=answers,
        )


def _flat(values: Tensor | None, own: range) -> Tensor | None:
    return None if values is None else values[own.start : own.stop].reshape(-1)


def token_logps(engine: Engine, batch: SampledBatch) -> Tensor:
    """Return what the weights, as they are, say of every target: (rows, tokens), on every rank."""
    plan, seat, device = engine.plan, engine.seat, engine.accelerator.device
    made, places = batch.batches(engine, None), {}

    def batches(micro_batch: int) -> Batch:
        batch = made(micro_batch)
        assert isinstance(batch.answers, SampledAnswers)
        places[micro_batch] = batch.answers.place_t
        return batch

    engine.evaluate(batches)
    flat = torch.zeros(len(batch.rows) * batch.length, device=device)
    if engine.spec.head_unit in seat.units and seat.tensor.rank == 0:
        for micro_batch, logps in engine.passes.logps.items():
            first = sequences_before(plan, seat, micro_batch) * batch.length
            flat[first + places[micro_batch]] = logps.float()
    if engine.seats.num_ranks > 1:
        everybody = tuple(range(engine.seats.num_ranks))
        engine.links.all_reduce(everybody, flat, use="scalars").wait()
    return flat.view(len(batch.rows), batch.length).cpu()
