"""`Row`: the tokens of one sequence of a training step, its targets, and where documents end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tutti.errors import InputError

NO_TARGET = -100

Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Row:
    """One row of S tokens.

    `targets[i]` is the token after `tokens[i]` in the same document, or NO_TARGET: at a document's
    end, where the loss is masked, and on padding. Padding is a document of its own, the last.
    """

    tokens: Tokens
    targets: Tokens
    lengths: tuple[int, ...]  # of the documents in it; their sum is S
    weights: tuple[float, ...] = ()  # of the documents, padding's 0; none: all one
    # what answers are held against: log-probabilities by a reference model, or pairs' margins
    references: tuple[float, ...] = ()


class Rows(Protocol):
    """Something that has rows, and finds each by its number."""

    name: str

    @property
    def num_rows(self) -> int:
        """How many rows there are."""

    def row(self, index: int) -> Row:
        """Return one of them."""


def blank_row(length: int, pad: int) -> Row:
    """Return a row without a loss: what stands behind the last row of a validation set."""
    return Row(np.full(length, pad, np.int64), np.full(length, NO_TARGET, np.int64), (length,))


def padded_row(tokens: Sequence[int], length: int, pad: int) -> Row:
    """Return a row of one document, filled up, without a loss."""
    missing = length - len(tokens)
    both = np.concatenate([np.asarray(tokens, np.int64), np.full(missing, pad, np.int64)])
    lengths = (len(tokens), missing) if missing else (len(tokens),)
    return Row(both, np.full(length, NO_TARGET, np.int64), lengths)


def targets_of(
    tokens: Tokens, next_token: int, lengths: Sequence[int], supervised: NDArray[np.bool_] | None
) -> Tokens:
    """Return the targets of a row whose last document goes on with `next_token`.

    `next_token` is NO_TARGET where nothing goes on. `supervised[i]` tells whether token i may be a
    target; it has one entry more than the row, for `next_token`.
    """
    targets = np.empty_like(tokens)
    targets[:-1] = tokens[1:]
    targets[-1] = next_token
    if supervised is not None:
        targets[~supervised[1:]] = NO_TARGET
    if len(lengths) > 1:
        targets[np.cumsum(lengths[:-1]) - 1] = NO_TARGET
    return targets


def check_vocabulary(tokens: Tokens, vocabulary: int, place: str) -> None:
    """Refuse tokens that the model has no embedding for."""
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest < 0 or highest >= vocabulary:
        wrong = lowest if lowest < 0 else highest
        raise InputError(
            f"{place}: token {wrong} is not in the model's vocabulary of {vocabulary}; "
            f"use the tokenizer that belongs to the model"
        )
