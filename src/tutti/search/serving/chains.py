"""Chains of chip groups worth pricing: of one kind, then of several where one alone is short."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from tutti.search.serving.kinds import ChipGroup, pages_room
from tutti.search.serving.question import ServeProblem

MOST_CHAINS = 1500
MOST_STAGES = 32
Chain = tuple[ChipGroup, ...]  # a group for each stage


def chains(problem: ServeProblem, kinds: Sequence[ChipGroup]) -> Iterator[Chain]:
    """Yield the chains worth pricing: of one kind, then of several where one alone is short."""
    most = problem.space.max_stages or MOST_STAGES
    short = False
    for kind in kinds:
        least = fewest_stages(problem, kind)
        if least is None or least > most:
            short = True
            continue
        short |= least > 1
        for stages in _stage_counts(least, min(kind.groups, most)):
            yield (kind,) * stages
    pools = dict.fromkeys(kind.pool for kind in kinds)
    if not problem.space.mix or not short or len(pools) < 2:
        return
    widest = [max((k for k in kinds if k.pool == pool), key=lambda k: k.tp) for pool in pools]
    yield from _mixed(problem, widest, most)


def fewest_stages(problem: ServeProblem, kind: ChipGroup) -> int | None:
    """Return how many groups of a kind hold the model and one sequence; None: all do not."""
    layers = problem.model.num_layers
    one = problem.longest * kind.token_bytes
    for stages in range(1, min(kind.groups, layers, MOST_STAGES) + 1):
        held = math.ceil(layers / stages)
        if pages_room(kind, held, 1.0 if stages > 1 else 2.0) >= held * one:
            return stages
    return None


def _stage_counts(least: int, most: int) -> list[int]:
    wanted = {least, least + 1, least + 2, 2 * least, math.ceil(1.5 * least), most}
    return sorted(stages for stages in wanted if least <= stages <= most)


def _mixed(problem: ServeProblem, kinds: Sequence[ChipGroup], most: int) -> Iterator[Chain]:
    """Yield chains of several kinds, fast memory last: it has the head."""
    counts = [_counts(min(kind.groups, most)) for kind in kinds]
    while math.prod(map(len, counts)) > MOST_CHAINS:
        longest = max(range(len(counts)), key=lambda i: len(counts[i]))
        counts[longest] = [0, *counts[longest][1::2]]
    layers, one = problem.model.num_layers, problem.longest
    for numbers in itertools.product(*counts):
        used = [(kind, number) for kind, number in zip(kinds, numbers, strict=True) if number]
        total = sum(number for _, number in used)
        if len(used) < 2 or not 2 <= total <= min(most, layers):
            continue
        room = sum(
            number * kind.room_bytes / (kind.layer_bytes + one * kind.token_bytes)
            for kind, number in used
        )
        if room >= layers:
            ordered = sorted(used, key=lambda item: item[0].room_bytes)
            yield tuple(kind for kind, number in ordered for _ in range(number))


def _counts(most: int) -> list[int]:
    if most <= 12:
        return list(range(most + 1))
    return [count for count in (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if count <= most]
