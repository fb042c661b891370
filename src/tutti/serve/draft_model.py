"""`DraftModel`: a small model that guesses what a large one will say.

It draws with the large model's random numbers, so that where both find the same tokens likely they
choose the same. Its keys lie in one page per slot.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from tutti.accelerator import Accelerator, PagedSegments
from tutti.errors import InputError
from tutti.models import ModelSpec
from tutti.nn import Batch, Model, PagedCache
from tutti.serve.drafting import Wanted
from tutti.serve.sampler import Sampler


def check_draft(target: ModelSpec, draft: ModelSpec) -> None:
    """Refuse a draft model that has other tokens."""
    if draft.vocab != target.vocab:
        raise InputError(
            f"draft model {draft.name} has a vocabulary of {draft.vocab:,} tokens, {target.name} "
            f"one of {target.vocab:,}; a draft model must have the same tokens"
        )


class DraftModel:
    """Guesses by running a model."""

    def __init__(
        self,
        model: Model,
        accelerator: Accelerator,
        sampler: Sampler,
        *,
        slots: int,
        max_length: int,
        dtype: torch.dtype,
    ) -> None:
        self._model, self._sampler, self._device = model, sampler, accelerator.device
        self._room = min(max_length, model.spec.max_length)
        self._cache = PagedCache(
            model.spec,
            accelerator.operators,
            pages=slots + 1,
            page_size=self._room,
            dtype=dtype,
            device=accelerator.device,
        )
        self._fed: dict[int, list[int]] = {}  # by slot: tokens whose keys are there

    @torch.no_grad()
    def guess(self, wanted: Sequence[Wanted]) -> dict[int, tuple[int, ...]]:
        """Return the draft model's own continuations."""
        asked = [one for one in wanted if len(one.tokens) + one.count <= self._room]
        if not asked:
            return {}
        texts = [one.tokens.tolist() for one in asked]
        fresh = [self._new(one.slot, text) for one, text in zip(asked, texts, strict=True)]
        guesses: list[list[int]] = [[] for _ in asked]
        for _ in range(max(one.count for one in asked)):
            chosen = self._step(asked, fresh, [len(text) for text in texts])
            for text, guess, token in zip(texts, guesses, chosen, strict=True):
                text.append(token)
                guess.append(token)
            fresh = [[token] for token in chosen]
        for one, text in zip(asked, texts, strict=True):
            self._fed[one.slot] = text[:-1]  # of the last one no keys were made
        pairs = zip(asked, guesses, strict=True)
        return {one.sequence: tuple(guess[: one.count]) for one, guess in pairs}

    def _new(self, slot: int, text: list[int]) -> list[int]:
        """Return the tokens of a text whose keys are not there; the last one at least."""
        fed = self._fed.get(slot, [])
        same = 0
        for own, other in zip(fed, text[:-1], strict=False):
            if own != other:
                break
            same += 1
        return text[same:]

    def _step(
        self, asked: Sequence[Wanted], fresh: list[list[int]], lengths: list[int]
    ) -> list[int]:
        counts = [len(tokens) for tokens in fresh]
        tables = [[one.slot + 1] for one in asked]
        steps = PagedSegments.of(counts, lengths, tables, self._room, self._device)
        tokens_t = torch.tensor(list(itertools.chain(*fresh)), device=self._device)
        bases = torch.tensor(lengths, device=self._device)
        batch = Batch.cached(self._model.spec, tokens_t, self._cache, steps, bases)
        last = torch.tensor(list(itertools.accumulate(counts)), device=self._device) - 1
        logits = self._model.logits(batch, rows=last)
        slots = np.array([one.slot for one in asked])
        drawn = self._sampler.draw(logits, slots, batch.positions_t[last] + 1)
        return [int(token) for token in drawn.tolist()]
