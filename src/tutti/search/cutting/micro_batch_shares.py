"""How many micro-batches each pipeline takes, once the simulator has told their paces.

Chains are given their parts of the batch by what the coarse model promises of them. What they
really take is known after two short steps, each pipeline's beginning and its pace: micro-batches
then move from the pipeline that ends last to others, as long as these end before it did.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Runner(NamedTuple):
    """A pipeline that is under way after a while."""

    micro_batches: int
    sequences: int  # of a micro-batch
    start_s: float  # what it takes beyond its micro-batches at its pace
    pace_s: float
    least: int  # micro-batches that it must have for that to hold
    together: int = 1  # micro-batches that come and go only in such groups

    def end(self, more: int = 0) -> float:
        """When it ends, with so many micro-batches more."""
        return self.start_s + (self.micro_batches + more) * self.pace_s


def balanced(runners: Sequence[Runner]) -> list[int]:
    """Return micro-batches by pipeline; they have as many sequences as before."""
    shared = list(runners)
    while len(shared) > 1:
        last = max(range(len(shared)), key=lambda i: (shared[i].end(), -i))
        moves = [
            (shared[i].end(taken), i, given, taken)
            for i in range(len(shared))
            if i != last and shared[i].micro_batches >= shared[i].least
            for given, taken in [_exchange(shared[last], shared[i])]
            if shared[last].micro_batches - given >= shared[last].least
        ]
        end, other, given, taken = min(moves, default=(math.inf, 0, 0, 0))
        if end >= shared[last].end() * (1.0 - 1e-9):
            break
        shared[last] = _with(shared[last], -given)
        shared[other] = _with(shared[other], taken)
    return [runner.micro_batches for runner in shared]


def _with(runner: Runner, more: int) -> Runner:
    return runner._replace(micro_batches=runner.micro_batches + more)


def _exchange(giving: Runner, taking: Runner) -> tuple[int, int]:
    """Return the fewest micro-batches of two pipelines that have equally many sequences."""
    one, other = (r.sequences * r.together for r in (giving, taking))
    sequences = math.lcm(one, other)
    return sequences // giving.sequences, sequences // taking.sequences
