"""Stores made by hand, and the rows that they must give, by brute force."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tutti.train.data.row import NO_TARGET
from tutti.train.data.store import TokenStore


def store_of(
    documents: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]] | None = None
) -> TokenStore:
    tokens = np.asarray([token for document in documents for token in document], np.uint16)
    offsets = np.cumsum([0, *map(len, documents)]).astype(np.int64)
    bits = None
    if masks is not None:
        bits = np.packbits(np.asarray([bit for mask in masks for bit in mask], np.bool_))
    largest = int(tokens.max(initial=0))
    return TokenStore(tokens, offsets, bits, name="made", digest="0", largest=largest)


def targets_by_hand(document: Sequence[int], mask: Sequence[bool] | None) -> list[int]:
    """The target of every token of a document."""
    found = []
    for place in range(len(document)):
        later = place + 1
        has = later < len(document) and (mask is None or mask[later])
        found.append(document[later] if has else NO_TARGET)
    return found
