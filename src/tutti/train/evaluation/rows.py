"""The likelihood of tasks under any plan: items as rows, and what engines say of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tutti.train.checkpoint.coordinator import Coordinator
from tutti.train.data.packing import best_fit, padded
from tutti.train.data.row import NO_TARGET, Row, blank_row
from tutti.train.engine.engine import Engine
from tutti.train.evaluation.tasks import Scored
from tutti.train.run.ask_reference import Feed, ask_rows


@dataclass(frozen=True, slots=True)
class ItemRows:
    """Items packed into rows, and blank rows behind the last."""

    items: Sequence[Scored]
    groups: Sequence[Sequence[int]]
    length: int

    @classmethod
    def of(cls, items: Sequence[Scored], length: int) -> ItemRows:
        """Pack items."""
        sizes = np.asarray([len(item.tokens) for item in items], np.int64)
        return cls(items, best_fit(sizes, length), length)

    def row(self, sample: int) -> Row:
        """Return a row; targets are what is scored."""
        if sample >= len(self.groups):
            return blank_row(self.length, 0)
        own = [self.items[i] for i in self.groups[sample]]
        tokens = np.concatenate([np.asarray(item.tokens, np.int64) for item in own])
        targets = np.full(len(tokens), NO_TARGET, np.int64)
        at = 0
        for item in own:
            size = len(item.tokens)
            scored = tokens[at + item.first : at + size]
            targets[at + item.first - 1 : at + size - 1] = scored
            at += size
        lengths = [len(item.tokens) for item in own]
        return padded(tokens, targets, lengths, self.length, 0, (1.0,) * len(own))


def item_logps(
    engine: Engine, feed: Feed, coordinator: Coordinator, items: Sequence[Scored]
) -> list[float]:
    """Return each item's log-probability by the weights as they are."""
    rows = ItemRows.of(items, engine.plan.job.sequence_length)
    by_row = ask_rows(engine, feed, coordinator, rows, len(rows.groups))
    logps = [0.0] * len(items)
    for sample, values in by_row.items():
        for item, value in zip(rows.groups[sample], values, strict=False):
            logps[item] = value
    return logps
