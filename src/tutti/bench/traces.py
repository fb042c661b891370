"""Requests as people send them, drawn with a seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

TraceKind = Literal["short", "chat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request of a trace."""

    prompt: tuple[int, ...]
    new: int


def trace(kind: TraceKind, requests: int, vocab: int, seed: int = 0) -> list[Asked]:
    """Return requests: short ones of even lengths, or lengths as people chat."""
    r = random.Random(seed)

    def lognormal(mean: float, deviation: float, top: int) -> int:
        drawn = r.lognormvariate(math.log(mean) - deviation * deviation / 2, deviation)
        return max(4, min(top, int(drawn)))

    asked = []
    for _ in range(requests):
        if kind == "short":
            length, new = r.randint(16, 256), r.randint(16, 128)
        else:
            length, new = lognormal(161, 1.0, 1024), -1
        prompt = tuple(r.randrange(3, vocab) for _ in range(length))
        new = lognormal(338, 0.8, 512) if new < 0 else new
        asked.append(Asked(prompt=prompt, new=new))
    return asked
