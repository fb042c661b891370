"""Greedy decoding of a batch of prompts with a key-value cache."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from tutti.nn.batch import Batch
from tutti.nn.cache import ContiguousCache
from tutti.nn.model import Model


@torch.no_grad()
def greedy(
    model: Model,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    stop: Collection[int] = (),
) -> list[list[int]]:
    """Return up to `new_tokens` most likely tokens after each prompt, the stopping one included."""
    device = next(model.parameters()).device
    cache = ContiguousCache(len(prompts), max(map(len, prompts)) + new_tokens)
    found: list[list[int]] = [[] for _ in prompts]
    step: list[list[int]] = [list(prompt) for prompt in prompts]
    for _ in range(new_tokens):
        lengths = [len(tokens) for tokens in step]
        tokens_t = torch.tensor(list(itertools.chain(*step)), device=device)
        batch = Batch.cached(model.spec, tokens_t, lengths, cache)
        last = torch.tensor(list(itertools.accumulate(lengths)), device=device) - 1
        chosen: Tensor = model.logits(batch, rows=last).argmax(-1)
        step = [[token] for token in chosen.tolist()]
        for tokens, (token,) in zip(found, step, strict=True):
            if not tokens or tokens[-1] not in stop:
                tokens.append(token)
        if stop and all(tokens[-1] in stop for tokens in found):
            break
    return found
