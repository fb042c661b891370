"""What a step asks of a stage: a `Step` of the scheduler summed up to what its price depends on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tutti.batching.step import Step
from tutti.models.spec import ModelSpec

Windows = tuple[int | None, ...]


def windows_of(model: ModelSpec) -> Windows:
    """Return the different windows of a model's layers; None: some see all."""
    windows = dict.fromkeys(block.attention.window for block in model.blocks)
    return tuple(sorted(windows, key=lambda window: (window is not None, window or 0)))


class StepLoad(NamedTuple):
    """Tokens, and the keys that they look at; the last two by `windows_of` the model."""

    tokens: int
    samples: int  # rows whose logits are wanted
    rows: int  # with one query: decodes
    keys: tuple[float, ...]  # that decodes read
    pairs: tuple[float, ...]  # of query and key, of prompts' chunks
    stows: int = 0  # pages that move to the host
    fetches: int = 0  # pages that come back

    @property
    def num_chunks_tokens(self) -> int:
        """Tokens of prompts."""
        return self.tokens - self.rows


def load_of(step: Step, windows: Windows, *, imports: bool = False) -> StepLoad:
    """Return a step's load.

    With `imports`, what would be a prompt's chunk came over a link: of it only the last token is
    computed, which looks at all before it.
    """
    ones = int(np.count_nonzero(step.queries == 1))
    starts, queries = step.starts[ones:], step.queries[ones:]
    lengths = step.starts[:ones] + 1
    tokens, rows = step.num_tokens, ones
    if imports and len(queries):
        lengths = np.concatenate((lengths, starts + queries))
        rows = tokens = len(step.queries)
        starts, queries = starts[:0], queries[:0]
    keys, pairs = [], []
    for window in windows:
        keys.append(float(lengths.sum() if window is None else np.minimum(lengths, window).sum()))
        pairs.append(_pairs(starts, queries, window) if len(queries) else 0.0)
    moved = len(step.stows), len(step.fetches)
    return StepLoad(tokens, len(step.sample_rows), rows, tuple(keys), tuple(pairs), *moved)


def _pairs(starts: np.ndarray, queries: np.ndarray, window: int | None) -> float:
    """Return how many keys the queries of chunks look at, one after the other."""
    first = starts.astype(np.float64) + 1.0
    last = first + queries - 1.0
    whole = (first + last) / 2.0 * queries
    if window is None:
        return float(whole.sum())
    # queries at positions from the window on see a whole window each
    beyond = np.clip(last - window, 0.0, queries)
    inside = queries - beyond
    end = first + inside - 1.0
    return float((np.maximum(0.0, (first + end) / 2.0 * inside) + beyond * window).sum())


def chunk_pairs(start: int, queries: int) -> float:
    """Return how many keys a chunk's queries look at behind so many tokens."""
    first = start + 1.0
    return (first + (first + queries - 1.0)) / 2.0 * queries


def decode_load(batch: int, context: float, windows: Windows) -> StepLoad:
    """Return a step of `batch` decodes whose sequences have so many tokens."""
    keys = tuple(batch * (context if w is None else min(context, w)) for w in windows)
    return StepLoad(batch, batch, batch, keys, (0.0,) * len(windows))


def prefill_load(prompts: list[tuple[int, int]], windows: Windows) -> StepLoad:
    """Return a step of chunks, each (tokens before it, its tokens)."""
    starts = np.array([start for start, _ in prompts], np.int64)
    queries = np.array([count for _, count in prompts], np.int64)
    pairs = tuple(_pairs(starts, queries, w) for w in windows)
    return StepLoad(int(queries.sum()), len(prompts), 0, (0.0,) * len(windows), pairs)
