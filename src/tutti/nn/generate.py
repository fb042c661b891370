"""Greedy decoding of a batch of prompts that all begin and go on together.

The plain loop, for comparisons and examples; `tutti.serve` is what serves.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from tutti.accelerator.paged_segments import PagedSegments
from tutti.nn.batch import Batch
from tutti.nn.cache import PagedCache
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
    first = next(model.parameters())
    room = max(map(len, prompts)) + new_tokens
    cache = PagedCache(
        model.spec,
        model.operators,
        pages=len(prompts) + 1,
        page_size=room,
        parallel=model.parallel,
        dtype=first.dtype,
        device=first.device,
    )
    tables = [[number] for number in range(1, len(prompts) + 1)]  # a page holds a whole sequence
    lengths = [0] * len(prompts)
    bases = torch.tensor([len(prompt) for prompt in prompts], device=first.device)
    generated: list[list[int]] = [[] for _ in prompts]
    step: list[list[int]] = [list(prompt) for prompt in prompts]
    for _ in range(new_tokens):
        counts = [len(tokens) for tokens in step]
        lengths = [old + new for old, new in zip(lengths, counts, strict=True)]
        steps = PagedSegments.of(counts, lengths, tables, room, first.device)
        tokens_t = torch.tensor(list(itertools.chain(*step)), device=first.device)
        batch = Batch.cached(model.spec, tokens_t, cache, steps, bases)
        last = torch.tensor(list(itertools.accumulate(counts)), device=first.device) - 1
        chosen: Tensor = model.logits(batch, rows=last).argmax(-1)
        step = [[token] for token in chosen.tolist()]
        for tokens, (token,) in zip(generated, step, strict=True):
            if not tokens or tokens[-1] not in stop:
                tokens.append(token)
        if stop and all(tokens[-1] in stop for tokens in generated):
            break
    return generated
