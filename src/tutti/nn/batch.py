"""`Batch`: packed tokens, which of them see which, and what all layers share.

A batch is T tokens of one or several sequences, one after the other. Everything that does not
depend on activations is made here, once: rotary tables, key biases, the shifted tokens of extra
prediction heads. Packed training data has several sequences (documents) in each row of a fixed
length. With context parallelism a rank's batch holds two chunks of every row (`rows`), cut into
pieces of documents; keys and values are put together in the whole batch's order by `key_order`, or
travel around as `ring` says.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from tutti.accelerator.host_to_device import moved
from tutti.accelerator.paged_segments import PagedSegments
from tutti.accelerator.reference.distilled import Told
from tutti.accelerator.reference.preference_losses import Answers
from tutti.accelerator.reference.sampled_answers import SampledAnswers
from tutti.accelerator.segments import Segments
from tutti.errors import InputError
from tutti.models import ModelSpec
from tutti.models.distillation import Distillation
from tutti.nn.alibi import alibi_specs, key_bias
from tutti.nn.cache import Cache, PagedCache
from tutti.nn.parallel.ring import RingStep, ring_steps
from tutti.nn.parallel.rows import pieces_of, rows_of
from tutti.nn.rotary import Table, rotary_specs, stretch, table, table_at

NO_TARGET = -100


class Taught(Protocol):
    """What a teacher tells of a batch's tokens; `train.engine.teacher` has it."""

    @property
    def how(self) -> Distillation:
        """What is made of it."""

    def told(self, batch: Batch) -> Callable[[slice], Told]:
        """Return what is told of any run of the batch's tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The tokens of one micro-batch on one rank (of all its tensor-parallel ranks alike)."""

    tokens_t: Tensor
    targets_t: Tensor | None  # negative: no loss
    weights_t: Tensor | None  # of the tokens' losses; None: all one
    segments: Segments
    positions_t: Tensor
    sequence_t: Tensor  # which sequence each token is of
    lengths: tuple[int, ...]  # of the whole sequences
    lengths_s: Tensor  # the same, beside the tokens
    rows: tuple[int, ...]  # lengths of what context-parallel ranks share out: whole sequences
    tables: tuple[Table, ...]  # in the order of `rotary_specs`
    key_biases: tuple[Tensor, ...]  # in the order of `alibi_specs`, (H, S)
    next_tokens_nt: Tensor | None = None  # for extra prediction heads: tokens 1…n further on
    next_targets_nt: Tensor | None = None
    key_rows: tuple[int, ...] = ()  # rows of keys of each context-parallel rank
    key_order: Tensor | None = None  # brings gathered keys into the whole batch's order
    ring: tuple[RingStep, ...] = ()  # which keys are seen while they travel around
    cache: Cache | None = None
    # with a loss on whole answers instead of tokens
    answers: Answers | SampledAnswers | None = None
    taught: Taught | None = None  # with a loss that a teacher has a part in

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank."""
        return self.tokens_t.shape[0]

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        tokens_t: Tensor,
        lengths: Sequence[int],
        *,
        targets_t: Tensor | None = None,
        weights_t: Tensor | None = None,
        row_length: int | None = None,
        like: Batch | None = None,
        answers: Answers | SampledAnswers | None = None,
    ) -> Batch:
        """Return a batch of whole sequences, one after the other.

        With `row_length` they are documents packed into rows of that many tokens: they are to fill
        each row exactly. A row is padded with a document without targets. What does not depend on
        the tokens is taken from `like`, an earlier batch, where its sequences were as long.
        """
        if sum(lengths) != tokens_t.shape[0]:
            raise InputError(
                f"batch: sequences of {sum(lengths)} tokens in all, {tokens_t.shape[0]} given"
            )
        if like is not None and like.segments == Segments.of_lengths(tuple(lengths)):
            batch = replace(like, tokens_t=tokens_t, next_tokens_nt=None, next_targets_nt=None)
        else:
            segments = Segments.of_lengths(tuple(lengths))
            batch = _assembled(spec, tokens_t, segments, range(len(lengths)), tuple(lengths))
        rows = rows_of(lengths, row_length)
        batch = replace(batch, targets_t=targets_t, weights_t=weights_t, rows=rows, answers=answers)
        if not spec.prediction_heads or targets_t is None:
            return batch
        steps = range(1, spec.prediction_heads + 1)
        return replace(
            batch,
            next_tokens_nt=torch.stack([_shifted(tokens_t, lengths, n, -1) for n in steps]),
            next_targets_nt=torch.stack(
                [_shifted(targets_t, lengths, n, NO_TARGET) for n in steps]
            ),
        )

    @classmethod
    def cached(
        cls,
        spec: ModelSpec,
        tokens_t: Tensor,
        cache: PagedCache,
        steps: PagedSegments,
        bases_b: Tensor,
    ) -> Batch:
        """Return a batch of new tokens of cached sequences; nothing of it is made on the host.

        `bases_b` (a row each) says what length-dependent rotary scalings take a sequence's length
        to be until it is longer: its prompt's, so that neither chunks nor recomputing change it.
        """
        row_t, position_t = steps.rows_and_positions()
        cache.begin(steps, row_t, position_t)
        positions_t = position_t.clamp_min(0)
        lengths_t = positions_t  # of no interest, save where keys depend on them
        if stretch(spec) is not None:
            lengths_t = torch.maximum(bases_b.long()[row_t], positions_t + 1)
        return cls(
            tokens_t=tokens_t,
            targets_t=None,
            weights_t=None,
            segments=Segments((), (), ()),
            positions_t=positions_t,
            sequence_t=row_t,
            lengths=(),
            lengths_s=steps.key_lengths,
            rows=(),
            tables=tuple(table_at(rotary, positions_t, lengths_t) for rotary in rotary_specs(spec)),
            key_biases=(),
            cache=cache,
        )

    def seen_by(self, spec: ModelSpec) -> Batch:
        """Return the same tokens for another model, which predicts and has no loss."""
        return replace(
            self,
            tables=tuple(
                table(rotary, self.positions_t, self.sequence_t, self.lengths)
                for rotary in rotary_specs(spec)
            ),
            key_biases=_key_biases(spec, self.segments, self.positions_t),
            targets_t=None, weights_t=None, next_tokens_nt=None, next_targets_nt=None,
            answers=None, taught=None,
        )  # fmt: skip

    def share(self, spec: ModelSpec, ways: int, rank: int) -> Batch:
        """Return one context-parallel rank's part of a batch of whole sequences."""
        if ways == 1:
            return self
        pieces = [pieces_of(self.lengths, self.rows, ways, r) for r in range(ways)]
        if not all(pieces):
            raise InputError(f"batch: too few tokens for context parallelism over {ways} ranks")
        device = self.tokens_t.device
        rows = [torch.cat([torch.arange(p.first, p.last) for p in part]) for part in pieces]
        own = moved(rows[rank], device)
        segments = Segments(
            tuple(piece.size for piece in pieces[rank]),
            tuple(piece.last - piece.start for piece in pieces[rank]),
            tuple(piece.start for piece in pieces[rank]),
        )
        documents = [piece.document for piece in pieces[rank]]
        batch = _assembled(spec, self.tokens_t[own], segments, documents, self.lengths)
        return replace(
            batch,
            rows=self.rows,
            targets_t=_rows(self.targets_t, own),
            weights_t=_rows(self.weights_t, own),
            next_tokens_nt=None if self.next_tokens_nt is None else self.next_tokens_nt[:, own],
            next_targets_nt=None if self.next_targets_nt is None else self.next_targets_nt[:, own],
            key_rows=tuple(len(part) for part in rows),
            key_order=moved(torch.argsort(torch.cat(rows)), device),
            ring=ring_steps(pieces, rank, device),
            answers=_answers_of(self.answers, own, first=not rank),
        )


def _answers_of(
    answers: Answers | SampledAnswers | None, own: Tensor, *, first: bool
) -> Answers | SampledAnswers | None:
    """Return what a context-parallel rank is told of answers; the first one counts them."""
    if isinstance(answers, SampledAnswers):
        return answers.of_rows(own, speaks=first)
    return answers if answers is None or first else answers.silent()


def _rows(x: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if x is None else x[rows]


def _assembled(
    spec: ModelSpec,
    tokens_t: Tensor,
    segments: Segments,
    sequences: Sequence[int],
    lengths: tuple[int, ...],
) -> Batch:
    device = tokens_t.device
    positions_t = segments.positions(device)
    counts = torch.tensor(segments.queries)
    sequence_t = moved(torch.repeat_interleave(torch.tensor(list(sequences)), counts), device)
    return Batch(
        tokens_t=tokens_t,
        targets_t=None,
        weights_t=None,
        segments=segments,
        positions_t=positions_t,
        sequence_t=sequence_t,
        lengths=lengths,
        lengths_s=moved(torch.tensor(lengths), device),
        rows=lengths,
        tables=tuple(
            table(rotary, positions_t, sequence_t, lengths) for rotary in rotary_specs(spec)
        ),
        key_biases=_key_biases(spec, segments, positions_t),
    )


def _key_biases(spec: ModelSpec, segments: Segments, positions_t: Tensor) -> tuple[Tensor, ...]:
    alibis = alibi_specs(spec)
    keys_s = _key_positions(segments, positions_t.device) if alibis else positions_t
    return tuple(key_bias(alibi, heads, scale, keys_s) for alibi, heads, scale in alibis)


def _key_positions(segments: Segments, device: torch.device) -> Tensor:
    """Return the position of every key in its sequence."""
    ends = [start + keys for start, keys in zip(segments.key_starts, segments.keys, strict=True)]
    positions_s = torch.zeros(max(ends), dtype=torch.long)
    for start, keys in zip(segments.key_starts, segments.keys, strict=True):
        positions_s[start : start + keys] = torch.arange(keys)
    return moved(positions_s, device)


def _shifted(x: Tensor, lengths: Sequence[int], steps: int, fill: int) -> Tensor:
    """Return what stands `steps` further on in the same sequence."""
    shifted = torch.full_like(x, fill)
    for start, length in zip(itertools.accumulate(lengths, initial=0), lengths, strict=False):
        if length > steps:
            shifted[start : start + length - steps] = x[start + steps : start + length]
    return shifted
