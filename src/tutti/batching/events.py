"""What happens to a scheduler, and what it says of a step's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tutti.batching.request import Finish, Request, Sequence

GOES_ON, STOPS, FAILS = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Arrived:
    """Somebody wants something."""

    request: Request


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Nobody wants a request any more, or one of its samples; or a reader found its end."""

    request: int
    sample: int | None = None
    finish: Finish = Finish.CANCELLED


@dataclass(frozen=True, slots=True)
class Room:
    """Another step can be given to the chip."""


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """What a step sampled, in the order of its `sample_slots`."""

    step: int
    tokens: NDArray[np.int32]
    ends: NDArray[np.int8]  # GOES_ON, STOPS or FAILS


@dataclass(frozen=True, slots=True)
class Guessed:
    """Tokens that may come next, of sequences by their ids; the next step tries them."""

    guesses: Mapping[int, tuple[int, ...]]


Event = Arrived | Cancelled | Guessed | Room | Tokens


@dataclass(frozen=True, slots=True, eq=False)
class Received:
    """Which of a step's tokens count (those of sequences that ended meanwhile do not)."""

    sequences: NDArray[np.int64]
    tokens: NDArray[np.int32]
    kept: NDArray[np.intp]  # their places in the step's samples
    finished: tuple[Sequence, ...]
