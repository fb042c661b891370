"""The loops of `remedies`: the cheapest mixture for every range of units, compiled by numba."""

from __future__ import annotations

from typing import Any

import numpy as np

BUFFERS = 3.0  # units whose activations are on the chip although they live on the host
GATHERED = 3.0  # units whose parameters lie gathered at level 3: in use, behind, ahead

# Rows of sums over units, from the first one on; those of three remedies follow one another:
# selective recomputation, full recomputation, activations on the host.
SECONDS, FORWARD, HELD, OPTIMIZER, SAVED, ADDED, LATE, STATIC = 0, 1, 2, 3, 4, 7, 10, 11
COPIED = 12  # bytes on the host; more than they save where gradients take their place
ROWS = 13
SOME, ALL, AWAY = 0, 1, 2
PASSING = 3  # row of what a unit needs while it runs, behind what the remedies need
STATES = 4  # row of a unit's optimizer states


def add_up(  # pragma: no cover - compiled
    all_seconds: Any, all_forward: Any, backward: Any, kept: Any, passes: Any, parameters: Any,
    gradients: Any, static: Any, made: Any, states: Any, shard: int, flight: float, relieved: float,
    bandwidth: float, sums: Any, once: Any,
) -> None:  # fmt: skip
    """Sum up what units take, and what remedies save and add; ends have neither.

    What was copied to the host comes back one unit ahead: a copy that is longer than a unit's
    backward passes shows (LATE). Gradients that are `made` once take the place of what a unit kept.
    """
    units = len(passes)
    for u in range(units):
        whole, some, least = kept[0, u], kept[1, u], kept[2, u]
        block = 1.0 if 0 < u < units - 1 else 0.0
        copy = whole / bandwidth
        once[SOME, u], once[ALL, u] = (whole - some) * block, (whole - least) * block
        once[AWAY, u] = BUFFERS * whole * block
        once[PASSING, u], once[STATES, u] = passes[u], states[u]
        if shard >= 3:
            once[PASSING, u] += GATHERED * parameters[u]
        if shard >= 2:
            once[PASSING, u] += gradients[u]
        for row in range(len(sums)):
            sums[row, u + 1] = sums[row, u]
        sums[SECONDS, u + 1] += all_seconds[0, u]
        sums[FORWARD, u + 1] += all_forward[u]
        full = max(flight * whole, made[u])
        sums[HELD, u + 1] += static[u] + full
        sums[OPTIMIZER, u + 1] += states[u]
        sums[STATIC, u + 1] += static[u] + made[u]
        sums[SAVED + SOME, u + 1] += min(relieved * (whole - some), full - made[u]) * block
        sums[SAVED + ALL, u + 1] += min(relieved * (whole - least), full - made[u]) * block
        sums[SAVED + AWAY, u + 1] += min(relieved * whole, full - made[u]) * block
        sums[COPIED, u + 1] += relieved * whole * block
        sums[ADDED + SOME, u + 1] += (all_seconds[1, u] - all_seconds[0, u]) * block
        sums[ADDED + ALL, u + 1] += (all_seconds[2, u] - all_seconds[0, u]) * block
        sums[ADDED + AWAY, u + 1] += copy * block
        sums[LATE, u + 1] += max(0.0, copy - backward[u]) * block


def count_states(  # pragma: no cover - compiled
    sums: Any, once: Any, room: float, least: int, lowest: int, fewest_away: Any, most: Any
) -> None:
    """For every range, how few units' optimizer states may live on the host if any do; 0: none can.

    When the step closes, two units' come and go at a time: as many must be away as leave room for
    them. Blocks go first, the embedding last. `most` is the largest of the first so many.
    """
    units = once.shape[1]
    states, static = sums[OPTIMIZER], sums[STATIC]
    for a in range(units if least == 0 else 1):
        first, fewest = max(a, lowest), 1
        pair = np.zeros(units + 1)
        for n in range(1, units - first + 1):
            own = once[STATES, first + n - 1]
            before = once[STATES, first + n - 2] if n > 1 else 0.0
            pair[n], most[a, n] = max(pair[n - 1], own + before), max(most[a, n - 1], own)
        for b in range(max(a + 1, least), units + 1):
            begin = min(first, b)
            over = static[b] - static[a] + once[PASSING, a] - room
            while fewest <= b - begin and over + pair[fewest] > (
                states[begin + fewest] - states[begin]
            ):  # a longer range needs no fewer
                fewest += 1
            if fewest <= b - begin:
                fewest_away[a, b] = fewest
            elif begin > a:
                other = once[STATES, begin] if begin < b else 0.0
                both = max(pair[b - begin], once[STATES, a] + other)
                fewest_away[a, b] = b - a if over + both <= states[b] - states[a] else 0


def fill(  # pragma: no cover - compiled
    sums: Any, once: Any, allowed: Any, per_byte: float, room: float, host: float, least: int,
    lowest: int, highest: int, fewest_away: Any, most: Any, out: Any, counts: Any,
) -> None:  # fmt: skip
    """For every range of at least `least` units, the cheapest remedies that make it fit.

    The first units are recomputed; behind them activations go away, or else optimizer states do,
    which cost their copies one way, and the other way the largest one's. For every number of
    recomputed units the fewest others that suffice are known at once: that number never falls by
    more than what one more recomputed unit saves. Where a range does not fit, no longer one does.
    """
    units = once.shape[1]
    states, some, again, away = (
        sums[OPTIMIZER], sums[SAVED + SOME], sums[SAVED + ALL], sums[SAVED + AWAY],
    )  # fmt: skip
    for a in range(units if least == 0 else 1):
        peak = 0.0
        first = max(a, lowest)
        for b in range(a + 1, units + 1):
            peak = max(peak, once[PASSING, b - 1])
            if b < least:
                continue
            excess = sums[HELD, b] - sums[HELD, a] + peak - room
            if excess <= 0.0:
                out[a, b] = sums[SECONDS, b] - sums[SECONDS, a]
                continue
            last = max(first, min(b, highest))
            best, chosen, moved, gone, light = np.inf, 0, 0, 0, 0
            if allowed[SOME] and last > first:
                need = excess + once[SOME, first]
                if some[last] - some[first] >= need:
                    j = first
                    while some[j] - some[first] < need:
                        j += 1
                    best = sums[ADDED + SOME, j] - sums[ADDED + SOME, first]
                    light = j - first
            begin, fewest = min(first, b), fewest_away[a, b]
            j, n = first, b - a
            for k in range(first, last + 1):  # units from the first up to here are recomputed
                if k > first and not allowed[ALL]:
                    break
                cost = sums[ADDED + ALL, k] - sums[ADDED + ALL, first]
                if cost >= best:
                    break
                need = excess - (again[k] - again[first])
                if k > first:
                    need += once[ALL, first]
                if need <= 0.0:
                    best, chosen, moved, gone, light = cost, k - first, 0, 0, 0
                    break
                if allowed[AWAY] and k < last:
                    more = need + once[AWAY, k]
                    while j < last and away[j] - away[k] < more:
                        j += 1
                    copied = sums[COPIED, j] - sums[COPIED, k]
                    if more <= away[j] - away[k] and copied <= host:
                        copy = sums[ADDED + AWAY, j] - sums[ADDED + AWAY, k]
                        total = max(0.0, copy - (sums[FORWARD, b] - sums[FORWARD, k]))
                        total += cost + sums[LATE, j] - sums[LATE, k]
                        if j == last:  # the last one comes back as soon as it has gone
                            total += copy / (j - k)
                        if total < best:
                            best, chosen, moved, gone, light = total, k - first, j - k, 0, 0
                if fewest and need <= states[b] - states[a]:
                    while n > fewest and states[begin + n - 1] - states[begin] >= need:
                        n -= 1
                    copied, longest = states[b] - states[a], most[a, b - begin]
                    if n <= b - begin:
                        copied, longest = states[begin + n] - states[begin], most[a, n]
                    elif begin > a:
                        longest = max(longest, once[STATES, a])
                    total = cost + (copied + longest) * per_byte
                    if copied <= host and total < best:
                        best, chosen, moved, gone, light = total, k - first, 0, n, 0
            if best == np.inf:
                break
            counts[SOME, a, b], counts[ALL, a, b] = light, chosen
            counts[2, a, b], counts[3, a, b] = moved, gone
            out[a, b] = sums[SECONDS, b] - sums[SECONDS, a] + best
