"""Where to cut a chain of unlike stages, with recomputation only where memory asks for it.

For every stage and every range of units there is a shortest time under the stage's memory: plain
if it fits, otherwise with as few recomputed units as make it fit (selective where that is enough
and cheaper), otherwise with optimizer states on the host as well. Over these tables the best cut
is exact: the smallest possible time of the slowest stage, and among those cuts the smallest sum.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti.plan.plan import Offload, Recompute
from tutti.search.tables import NONE, ConfigTable
from tutti.simulate.kernel import compiled

FloatArray = npt.NDArray[np.float64]
BOUNDARIES = 4.0  # boundary tensors on a chip: two static buffers, one coming, one going
BUFFERS = 3.0  # units whose activations are on the chip although they live on the host
GATHERED = 3.0  # units whose parameters lie gathered at level 3: in use, behind, ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """What a stage of the chain brings along: its configuration and how much memory is left."""

    table: ConfigTable
    in_flight: float  # micro-batches between forward and backward
    sharers: float = 1.0  # chips that share a dense parameter's state
    expert_sharers: float = 1.0
    shard: int = 0
    usable_bytes: float = float("inf")  # for tensors of this range, slack taken off
    ranges: int = 1  # of the stage, each with its part of the memory
    micro_batches: int = 1
    copy_bandwidth: float = float("inf")  # chip ↔ host
    host_bytes: float = 0.0  # a chip's part of its host's memory
    recompute: tuple[str, ...] = ("none", "selective", "full")
    offload: tuple[str, ...] = ("optimizer", "activations")

    @property
    def transient_share(self) -> float:
        """The part of what a unit needs while it runs that is held against each range.

        Only one range runs at a time. Where nothing large comes and goes (below level 2), all of it
        is held against each: ranges keep more of early micro-batches than of late ones.
        """
        return 1.0 / self.ranges if self.shard >= 2 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The best cut: half-open ranges per stage, and what memory made of them."""

    ranges: tuple[tuple[int, int], ...]
    seconds: tuple[float, ...]  # of one micro-batch
    recompute: tuple[Recompute, ...]
    offload: tuple[Offload, ...]

    @property
    def pace(self) -> float:
        """The slowest stage."""
        return max(self.seconds)


def best_cut(slots: list[Slot], given: list[tuple[int, int]] | None = None) -> Cut | None:
    """Return the best cut of all units over the slots, or the given one; None: does not fit."""
    num_units = slots[0].table.forward.shape[1]
    if len(slots) > num_units:
        return None
    distinct: dict[object, int] = {}
    matrices: list[_Matrix] = []
    index = np.empty(len(slots), dtype=np.int64)
    for position, slot in enumerate(slots):
        key = (id(slot.table), slot.in_flight, slot.sharers, slot.expert_sharers, slot.shard,
               slot.usable_bytes)  # fmt: skip
        if key not in distinct:
            distinct[key] = len(matrices)
            matrices.append(_Matrix(slot))
        index[position] = distinct[key]
    seconds = np.stack([matrix.seconds for matrix in matrices])
    if given is None:
        bounds = compiled(_solve)(seconds, index)
        if bounds[0] < 0:
            return None
        ranges = tuple((int(a), int(b)) for a, b in itertools.pairwise(bounds))
    else:
        ranges = tuple(given)
        if not all(np.isfinite(seconds[index[i], a, b]) for i, (a, b) in enumerate(ranges)):
            return None
    parts = [matrices[index[i]].part(a, b) for i, (a, b) in enumerate(ranges)]
    return Cut(
        ranges=ranges,
        seconds=tuple(float(seconds[index[i], a, b]) for i, (a, b) in enumerate(ranges)),
        recompute=tuple(recompute for recompute, _ in parts),
        offload=tuple(offload for _, offload in parts),
    )


def static_bytes(slot: Slot) -> FloatArray:
    """Return, per unit, the bytes of states that lie on a chip from step to step."""
    table = slot.table
    return (
        _held(slot, table.parameter_bytes, 3)
        + _held(slot, table.gradient_bytes, 2)
        + _held(slot, table.optimizer_bytes, 1)
    )


def _held(slot: Slot, size: FloatArray, level: int) -> FloatArray:
    """Return a rank's part of a state that is shared out from a shard level on."""
    if slot.shard < level:
        return size
    table = slot.table
    dense = table.dense / np.maximum(table.dense + table.expert, 1.0)
    return size * (dense / slot.sharers + (1.0 - dense) / slot.expert_sharers)


class _Matrix:
    """The shortest seconds of one slot for every range of units, and how they come about."""

    def __init__(self, slot: Slot) -> None:
        table = slot.table
        units = table.forward.shape[1]
        per_byte = 2.0 / slot.copy_bandwidth / max(1, slot.micro_batches)
        allowed = ["selective" in slot.recompute, "full" in slot.recompute]
        allowed.append("activations" in slot.offload)
        sums, once = np.zeros((10, units + 1)), np.zeros((4, units))
        compiled(_add_up)(
            table.seconds,
            table.forward[NONE],
            table.kept,
            table.passing,
            table.parameter_bytes,
            table.gradient_bytes,
            static_bytes(slot),
            _held(slot, table.optimizer_bytes, 1),
            slot.shard,
            slot.in_flight,
            slot.copy_bandwidth,
            sums,
            once,
        )
        once *= slot.transient_share
        self.seconds = np.full((units + 1, units + 1), np.inf)
        self.counts = np.zeros((4, units + 1, units + 1), dtype=np.int16)
        compiled(_fill)(
            sums,
            once,
            np.array(allowed),
            per_byte if "optimizer" in slot.offload else -1.0,
            slot.usable_bytes - BOUNDARIES * table.boundary * slot.transient_share,
            slot.host_bytes,
            self.seconds,
            self.counts,
        )

    def part(self, start: int, stop: int) -> tuple[Recompute, Offload]:
        """Return what a range recomputes and keeps on the host."""
        selective, full, activations, optimizer = (int(n) for n in self.counts[:, start, stop])
        first = max(start, 1)

        def leading(count: int, start: int) -> tuple[tuple[int, int], ...]:
            return ((start, start + count),) if count else ()

        recompute = Recompute(selective=leading(selective, first), full=leading(full, first))
        return recompute, Offload(
            optimizer=leading(optimizer, start), activations=leading(activations, first)
        )


# Rows of sums over units, from the first one on; those of three remedies follow one another:
# selective recomputation, full recomputation, activations on the host.
SECONDS, FORWARD, HELD, OPTIMIZER, SAVED, ADDED = 0, 1, 2, 3, 4, 7
SOME, ALL, AWAY = 0, 1, 2
PASSING = 3  # row of what a unit needs while it runs, behind what the remedies need


def _add_up(  # pragma: no cover - compiled
    all_seconds: Any, all_forward: Any, kept: Any, passes: Any, parameters: Any, gradients: Any,
    static: Any, states: Any, shard: int, flight: float, bandwidth: float, sums: Any, once: Any,
) -> None:  # fmt: skip
    """Sum up what units take, and what remedies save and add; ends have neither."""
    units = len(passes)
    for u in range(units):
        whole, some, least = kept[0, u], kept[1, u], kept[2, u]
        block = 1.0 if 0 < u < units - 1 else 0.0
        once[SOME, u], once[ALL, u] = (whole - some) * block, (whole - least) * block
        once[AWAY, u] = BUFFERS * whole * block
        once[PASSING, u] = passes[u]
        if shard >= 3:
            once[PASSING, u] += GATHERED * parameters[u]
        if shard >= 2:
            once[PASSING, u] += gradients[u]
        for row in range(len(sums)):
            sums[row, u + 1] = sums[row, u]
        sums[SECONDS, u + 1] += all_seconds[0, u]
        sums[FORWARD, u + 1] += all_forward[u]
        sums[HELD, u + 1] += static[u] + flight * whole
        sums[OPTIMIZER, u + 1] += states[u]
        sums[SAVED + SOME, u + 1] += flight * (whole - some) * block
        sums[SAVED + ALL, u + 1] += flight * (whole - least) * block
        sums[SAVED + AWAY, u + 1] += flight * whole * block
        sums[ADDED + SOME, u + 1] += (all_seconds[1, u] - all_seconds[0, u]) * block
        sums[ADDED + ALL, u + 1] += (all_seconds[2, u] - all_seconds[0, u]) * block
        sums[ADDED + AWAY, u + 1] += whole / bandwidth * block


def _fill(  # pragma: no cover - compiled
    sums: Any, once: Any, allowed: Any, per_byte: float, room: float, host: float,
    out: Any, counts: Any,
) -> None:  # fmt: skip
    """For every range, the cheapest of: plain, selective, full, activations away, optimizer away.

    Copies of activations hide behind the stage's forward passes, as far as these last. Where a
    range does not fit, no longer one does.
    """
    units = once.shape[1]
    for a in range(units):
        peak = 0.0
        first = max(a, 1)
        for b in range(a + 1, units + 1):
            peak = max(peak, once[PASSING, b - 1])
            excess = sums[HELD, b] - sums[HELD, a] + peak - room
            last = min(b, units - 1)
            best, kind, chosen = np.inf, -1, 0
            for k in range(3 if excess > 0.0 and last > first else 0):
                saved, added = sums[SAVED + k], sums[ADDED + k]
                need = excess + once[k, first]
                if not allowed[k] or saved[last] - saved[first] < need:
                    continue
                j = first
                while saved[j] - saved[first] < need:
                    j += 1
                cost = added[j] - added[first]
                if k == AWAY:
                    if saved[j] - saved[first] > host:
                        continue
                    cost = max(0.0, cost - (sums[FORWARD, b] - sums[FORWARD, a]))
                    cost += added[first + 1] - added[first]
                if cost < best:
                    best, kind, chosen = cost, k, j - first
            if excess <= 0.0:
                best = 0.0
            elif kind >= 0:
                counts[kind, a, b] = chosen
            elif per_byte >= 0.0:  # everything is recomputed, and states go away
                best, rest = 0.0, excess
                if (
                    allowed[ALL]
                    and last > first
                    and sums[SAVED + ALL, last] > sums[SAVED + ALL, first]
                ):
                    rest += once[ALL, first] - (sums[SAVED + ALL, last] - sums[SAVED + ALL, first])
                    best = sums[ADDED + ALL, last] - sums[ADDED + ALL, first]
                    counts[ALL, a, b] = last - first if best > 0.0 else 0
                states, j = sums[OPTIMIZER], a
                while j < b and states[j] - states[a] < rest:
                    j += 1
                away = states[j] - states[a]
                counts[3, a, b] = j - a
                best = best + away * per_byte if rest <= away <= host else np.inf
            if best == np.inf:
                break
            out[a, b] = sums[SECONDS, b] - sums[SECONDS, a] + best


def _solve(seconds: Any, index: Any) -> Any:  # pragma: no cover - compiled
    """Return the cut positions; the first is −1 where no cut exists."""
    stages, units = len(index), seconds.shape[1] - 1
    low, high = 0.0, 0.0
    for k in range(seconds.shape[0]):
        for a in range(units):
            for b in range(a + 1, units + 1):
                if np.isfinite(seconds[k, a, b]):
                    high = max(high, seconds[k, a, b])
    none = np.full(stages + 1, -1, dtype=np.int64)
    reach = np.zeros(units + 1, dtype=np.bool_)
    following = np.zeros(units + 1, dtype=np.bool_)
    for attempt in range(64):
        limit = high if attempt == 0 else 0.5 * (low + high)
        reach[:] = False
        reach[0] = True
        for s in range(stages):
            following[:] = False
            row = seconds[index[s]]
            for a in range(units):
                if reach[a]:
                    for b in range(a + 1, units + 1):
                        if row[a, b] > limit:
                            break
                        following[b] = True
            reach[:] = following
        if reach[units]:
            high = limit
        elif attempt == 0:
            return none
        else:
            low = limit
        if high - low <= 1e-12 * high:
            break
    limit = high
    best = np.full((stages + 1, units + 1), np.inf)
    origin = np.zeros((stages + 1, units + 1), dtype=np.int64)
    best[0, 0] = 0.0
    for s in range(stages):
        row = seconds[index[s]]
        for a in range(units):
            if best[s, a] == np.inf:
                continue
            for b in range(a + 1, units + 1):
                if row[a, b] > limit:
                    break
                total = best[s, a] + row[a, b]
                if total < best[s + 1, b] * (1.0 - 1e-12):
                    best[s + 1, b] = total
                    origin[s + 1, b] = a
    bounds = np.zeros(stages + 1, dtype=np.int64)
    bounds[stages] = units
    for s in range(stages, 0, -1):
        bounds[s - 1] = origin[s, bounds[s]]
    return bounds
