"""What steps take on this chip: measured before the first request comes.

Steps of each usual size are timed without keys; then the same with rows that look at long
contexts, of which the difference is what a key costs, read by one token or met by many. The pages
that are written meanwhile are nobody's yet.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from tutti.batching.prices import TabledPrices
from tutti.serve.inputs import Shape

ROUNDS = 2  # the quicker one counts
ROWS = 32  # of steps with prompts
LONG = 4096  # keys of a row by which keys are priced, where a sequence may have as many
FAR = 32768  # keys that a chunk of a long prompt meets
CHUNK = 48  # tokens of it: what is left of a step that must not take long; more cost less each


def thinned(sizes: Sequence[int]) -> list[int]:
    """Return sizes each of which is at least twice the one before, and the last."""
    kept = [sizes[0]]
    for size in sizes[1:]:
        if size >= 2 * kept[-1]:
            kept.append(size)
    return kept if kept[-1] == sizes[-1] else [*kept, sizes[-1]]


def measured_prices(
    *,
    slots: int,
    most_tokens: int,
    longest: int,
    rehearse: Callable[[Shape, int], Callable[[], None]],
    synchronize: Callable[[], None],
    decode_sizes: Sequence[int] = (),
    mixed_sizes: Sequence[int] = (),
) -> TabledPrices:
    """Return prices of steps; `rehearse` writes one down in which each row looks at some keys.

    `decode_sizes`, `mixed_sizes`: rows and tokens that steps are filled up to, where they are.
    """

    def timed(shape: Shape, keys: int = 0) -> float:
        run = rehearse(shape, keys)
        run()  # nothing is made for the first time
        best = math.inf
        for _ in range(ROUNDS):
            synchronize()
            started = time.perf_counter()
            run()
            synchronize()
            best = min(best, time.perf_counter() - started)
        return best

    keys = min(LONG, longest)
    rows = thinned([1 << n for n in range(slots.bit_length()) if 1 << n <= slots] + [slots])
    decode = [(n, timed(Shape(n, n, n, 1, keys))) for n in rows]
    usual = sorted({16, 64, 256, 512, 1024, 2048, 4096, 8192, *mixed_sizes})
    sizes = [size for size in usual if size < most_tokens]
    mixed = []
    for size in (*sizes, most_tokens):
        own = min(slots, size, ROWS)
        mixed.append((size, timed(Shape(size, own, own, size, keys, 1))))
    few = min(rows[-1], 32)
    alone = dict(decode).get(few) or timed(Shape(few, few, few, 1, keys))
    read = timed(Shape(few, few, few, 1, keys), keys) - alone
    pair_s, back_s = _met(timed, keys, min(FAR, longest), most_tokens)
    return TabledPrices(
        decode=tuple(decode),
        mixed=tuple(mixed),
        key_s=max(0.0, read / (few * keys)),
        pair_s=pair_s,
        back_s=back_s,
        decode_sizes=decode_sizes,
        mixed_sizes=mixed_sizes,
    )


def _met(
    timed: Callable[[Shape, int], float], near: int, far: int, most_tokens: int
) -> tuple[float, float]:
    """Return what a pair takes in a row of some tokens, and what there is to any such row."""
    chunk = min(CHUNK, most_tokens, near)
    shape = Shape(chunk, 1, 1, chunk, far, 1)
    at_near, at_far = (max(0.0, timed(shape, keys) - timed(shape, 0)) for keys in (near, far))
    met, all_met = (chunk * keys - chunk * (chunk - 1) // 2 for keys in (near, far))
    if far < 2 * near or at_far < at_near:  # too near for a difference
        return at_far / all_met, 0.0
    pair_s = (at_far - at_near) / (all_met - met)
    return pair_s, max(0.0, at_near - pair_s * met)
