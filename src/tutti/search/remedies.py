"""What a stage does where memory is short, for every range of units: as cheaply as it can.

Per range there is a shortest time under the stage's memory: plain if it fits; otherwise some
units are recomputed (selectively where that is enough), the activations of others lie on the host,
or optimizer states do, in the mixture that costs least; the rest stays as it is. Copies hide
behind passes as far as these last: those that cannot hide one by one are spread over the range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti.plan.plan import Offload, Recompute, UnitRanges
from tutti.search.tables import NONE, ConfigTable
from tutti.simulate.kernel import compiled

FloatArray = npt.NDArray[np.float64]
BOUNDARIES = 4.0  # boundary tensors on a chip: two static buffers, one coming, one going
MORE_BOUNDARIES = 3.0  # for every further range of a stage: others come before they are used
BUFFERS = 3.0  # units whose activations are on the chip although they live on the host
GATHERED = 3.0  # units whose parameters lie gathered at level 3: in use, behind, ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """What a stage of the chain brings along: its configuration and how much memory is left."""

    table: ConfigTable
    in_flight: float  # micro-batches between forward and weight pass
    relieved: float | None = None  # those before their input pass, if fewer: remedies help these
    sharers: float = 1.0  # chips that share a dense parameter's state
    expert_sharers: float = 1.0
    shard: int = 0
    usable_bytes: float = float("inf")  # for tensors of the stage, slack taken off
    ranges: int = 1  # of the stage; they share its memory
    micro_batches: int = 1
    copy_bandwidth: float = float("inf")  # chip ↔ host
    host_bytes: float = 0.0  # a chip's part of its host's memory
    recompute: tuple[str, ...] = ("none", "selective", "full")
    offload: tuple[str, ...] = ("optimizer", "activations")

    @property
    def boundary_bytes(self) -> float:
        """What tensors at the stage's boundaries take."""
        return (BOUNDARIES + MORE_BOUNDARIES * (self.ranges - 1)) * self.table.boundary

    @property
    def key(self) -> object:
        """What makes two slots of one chain alike."""
        return (id(self.table), self.in_flight, self.relieved, self.sharers, self.expert_sharers,
                self.shard, self.usable_bytes)  # fmt: skip


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


NOTHING = (Recompute(), Offload())


class Remedies:
    """The shortest seconds of one slot for every range of units, and how they come about.

    With several ranges per stage each has its part of the memory here; what the stage does with
    all of it is said by `together`.
    """

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        table = slot.table
        units = table.forward.shape[1]
        self._sums, self._once = np.zeros((12, units + 1)), np.zeros((5, units))
        compiled(_add_up)(
            table.seconds,
            table.forward[NONE],
            table.backward_input[NONE] + table.backward_weight[NONE],
            table.kept,
            table.passing,
            table.parameter_bytes,
            table.gradient_bytes,
            static_bytes(slot),
            _held(slot, table.optimizer_bytes, 1),
            slot.shard,
            slot.in_flight,
            slot.in_flight if slot.relieved is None else slot.relieved,
            slot.copy_bandwidth,
            self._sums,
            self._once,
        )
        self.seconds = np.full((units + 1, units + 1), np.inf)
        self.counts = np.zeros((4, units + 1, units + 1), dtype=np.int16)
        self._solve(self._sums, self._once, self.seconds, self.counts, slot.ranges)

    def _solve(
        self, sums: FloatArray, once: FloatArray, seconds: FloatArray, counts: Any, ranges: int,
        only: bool = False, ends: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        """Fill in the ranges, or only the longest one; `ends` are the first and the last block."""
        slot, units = self.slot, once.shape[1]
        first, last = (1, units - 1) if ends is None else ends
        allowed = ["selective" in slot.recompute, "full" in slot.recompute]
        allowed.append("activations" in slot.offload)
        per_byte = 1.0 / slot.copy_bandwidth / max(1, slot.micro_batches)
        compiled(_fill)(
            sums,
            once / ranges,
            np.array(allowed),
            per_byte if "optimizer" in slot.offload else -1.0,
            (slot.usable_bytes - slot.boundary_bytes) / ranges,
            slot.host_bytes / ranges,
            units if only else 0,
            first,
            last,
            seconds,
            counts,
        )

    def part(self, start: int, stop: int) -> tuple[Recompute, Offload]:
        """Return what a range recomputes and keeps on the host."""
        blocks = range(max(start, 1), min(stop, len(self.seconds) - 2))
        return self._named(self.counts[:, start, stop], range(start, stop), blocks)

    def together(
        self, ranges: Sequence[tuple[int, int]]
    ) -> tuple[list[float], list[tuple[Recompute, Offload]]] | None:
        """Return the seconds of a stage's ranges, and what each recomputes and keeps on the host.

        None where they do not fit. The first ranges keep more micro-batches: they come first. What
        the last unit of a range keeps comes back just before the range's backward begins, with
        little to hide behind: it stays as long as others can go.
        """
        if self._fits(ranges):
            times = [self._range_seconds(span, NOTHING[0]) for span in ranges]
            return times, [NOTHING] * len(ranges)
        head = self._once.shape[1] - 1
        tops = [b - 1 for _, b in ranges if 1 < b <= head]
        inner = [u for a, b in ranges for u in range(a, b) if 0 < u < head and u not in tops]
        blocks = inner + tops
        units = [0] * (ranges[0][0] == 0) + blocks + [head] * (ranges[-1][1] > head)
        sums = np.zeros((len(self._sums), len(units) + 1))
        each = np.diff(self._sums)[:, units]
        late = np.isin(units, tops)
        each[LATE] = np.where(late, np.maximum(each[ADDED + AWAY] - each[FORWARD], 0), each[LATE])
        np.cumsum(each, axis=1, out=sums[:, 1:])
        ends = (int(units[0] == 0), len(units) - int(units[-1] == head))
        seconds = np.full((len(units) + 1, len(units) + 1), np.inf)
        counts = np.zeros((4, len(units) + 1, len(units) + 1), dtype=np.int16)
        self._solve(sums, self._once[:, units], seconds, counts, 1, only=True, ends=ends)
        whole = float(seconds[0, -1])
        if not np.isfinite(whole):
            return None
        found = self._named(counts[:, 0, -1], units, blocks)
        parts = [(_recompute_inside(found[0], span), _offload_inside(found[1], span))
                 for span in ranges]  # fmt: skip
        times = [self._range_seconds(s, part[0]) for s, part in zip(ranges, parts, strict=True)]
        rest = max(0.0, whole - sum(times))  # copies that do not hide
        return [t + rest * t / sum(times) for t in times], parts

    def _fits(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Tell whether a stage holds its ranges without any remedy."""
        held = sum(float(self._sums[HELD, b] - self._sums[HELD, a]) for a, b in ranges)
        peak = max(float(self._once[PASSING, a:b].max()) for a, b in ranges)
        return held + peak + self.slot.boundary_bytes <= self.slot.usable_bytes

    def _range_seconds(self, span: tuple[int, int], recompute: Recompute) -> float:
        """Return the seconds of a range's passes."""
        total = float(self._sums[SECONDS, span[1]] - self._sums[SECONDS, span[0]])
        for kind, again in ((SOME, recompute.selective), (ALL, recompute.full)):
            row = self._sums[ADDED + kind]
            total += sum(float(row[b] - row[a]) for a, b in again)
        return total

    def _named(
        self, counts: Any, units: Sequence[int], blocks: Sequence[int]
    ) -> tuple[Recompute, Offload]:
        """Return the units that so many of each kind are; `blocks` are those without the ends.

        The embedding's optimizer states are the last to go: they are large, and nothing hides them.
        """
        selective, full, activations, optimizer = (int(n) for n in counts)
        states = [*units[1:], 0] if units[0] == 0 else units
        rest = blocks[full:]
        away = rest[:activations]
        if away and self._copy_is_longer(away[0]):
            away = [rest[i * len(rest) // activations] for i in range(activations)]
        return (
            Recompute(selective=_joined(blocks[:selective]), full=_joined(blocks[:full])),
            Offload(optimizer=_joined(states[:optimizer]), activations=_joined(away)),
        )

    def _copy_is_longer(self, unit: int) -> bool:
        """Tell whether a unit's copy to the host takes longer than its forward pass."""
        copy, forward = (self._sums[row, unit + 1] - self._sums[row, unit]
                         for row in (ADDED + AWAY, FORWARD))  # fmt: skip
        return bool(copy > forward)


def _joined(units: Sequence[int]) -> UnitRanges:
    """Return units as ranges."""
    found: list[tuple[int, int]] = []
    for unit in sorted(units):
        if found and found[-1][1] == unit:
            found[-1] = (found[-1][0], unit + 1)
        else:
            found.append((unit, unit + 1))
    return tuple(found)


def _inside(ranges: UnitRanges, span: tuple[int, int]) -> UnitRanges:
    cut = ((max(a, span[0]), min(b, span[1])) for a, b in ranges)
    return tuple((a, b) for a, b in cut if a < b)


def _recompute_inside(whole: Recompute, span: tuple[int, int]) -> Recompute:
    return Recompute(selective=_inside(whole.selective, span), full=_inside(whole.full, span))


def _offload_inside(whole: Offload, span: tuple[int, int]) -> Offload:
    return Offload(
        optimizer=_inside(whole.optimizer, span), activations=_inside(whole.activations, span)
    )


# Rows of sums over units, from the first one on; those of three remedies follow one another:
# selective recomputation, full recomputation, activations on the host.
SECONDS, FORWARD, HELD, OPTIMIZER, SAVED, ADDED, LATE, STATIC = 0, 1, 2, 3, 4, 7, 10, 11
SOME, ALL, AWAY = 0, 1, 2
PASSING = 3  # row of what a unit needs while it runs, behind what the remedies need
STATES = 4  # row of a unit's optimizer states


def _add_up(  # pragma: no cover - compiled
    all_seconds: Any, all_forward: Any, backward: Any, kept: Any, passes: Any, parameters: Any,
    gradients: Any, static: Any, states: Any, shard: int, flight: float, relieved: float,
    bandwidth: float, sums: Any, once: Any,
) -> None:  # fmt: skip
    """Sum up what units take, and what remedies save and add; ends have neither.

    What was copied to the host comes back one unit ahead: a copy that is longer than a unit's
    backward passes shows (LATE).
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
        sums[HELD, u + 1] += static[u] + flight * whole
        sums[OPTIMIZER, u + 1] += states[u]
        sums[STATIC, u + 1] += static[u]
        sums[SAVED + SOME, u + 1] += relieved * (whole - some) * block
        sums[SAVED + ALL, u + 1] += relieved * (whole - least) * block
        sums[SAVED + AWAY, u + 1] += relieved * whole * block
        sums[ADDED + SOME, u + 1] += (all_seconds[1, u] - all_seconds[0, u]) * block
        sums[ADDED + ALL, u + 1] += (all_seconds[2, u] - all_seconds[0, u]) * block
        sums[ADDED + AWAY, u + 1] += copy * block
        sums[LATE, u + 1] += max(0.0, copy - backward[u]) * block


def _fill(  # pragma: no cover - compiled
    sums: Any, once: Any, allowed: Any, per_byte: float, room: float, host: float, least: int,
    lowest: int, highest: int, out: Any, counts: Any,
) -> None:  # fmt: skip
    """For every range of at least `least` units, the cheapest remedies that make it fit.

    The first units are recomputed; behind them activations go away, or else optimizer states do.
    Of these, two units' come and go at a time when the step closes: as many must live on the host
    as leave room for them. They cost their copies one way, and the other way the largest one's.
    For every number of recomputed units the fewest others that suffice are known at once: that
    number never falls by more than what one more recomputed unit saves. Where a range does not
    fit, no longer one does.
    """
    units = once.shape[1]
    states, some, again, away = (
        sums[OPTIMIZER], sums[SAVED + SOME], sums[SAVED + ALL], sums[SAVED + AWAY],
    )  # fmt: skip
    pair, most = (
        np.zeros(units + 1),
        np.zeros(units + 1),
    )  # of states from the first block up to here
    for a in range(units if least == 0 else 1):
        peak = 0.0
        first = max(a, lowest)
        pair[: min(first, units) + 1] = 0.0
        most[: min(first, units) + 1] = 0.0
        for s in range(first + 1, units + 1):
            own = once[STATES, s - 1]
            before = once[STATES, s - 2] if s - 2 >= first else 0.0
            pair[s], most[s] = max(pair[s - 1], own + before), max(most[s - 1], own)
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
            begin = min(first, b)  # all units' states: from here to the end, then those before
            end = b + 1 if begin > a else b
            whole_pair, whole_most = pair[b], most[b]
            if begin > a:
                other = once[STATES, begin] if begin < b else 0.0
                whole_pair = max(whole_pair, once[STATES, a] + other)
                whole_most = max(whole_most, once[STATES, a])
            enough = end + 1
            if per_byte >= 0.0:
                over = sums[STATIC, b] - sums[STATIC, a] + once[PASSING, a] - room
                enough = begin + 1
                while enough <= b and over + pair[enough] > states[enough] - states[begin]:
                    enough += 1
                if enough == b + 1 and (end == b or over + whole_pair > states[b] - states[a]):
                    enough = end + 1
            j, s = first, end
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
                    copied = away[j] - away[k]
                    if more <= copied <= host:
                        copy = sums[ADDED + AWAY, j] - sums[ADDED + AWAY, k]
                        total = max(0.0, copy - (sums[FORWARD, b] - sums[FORWARD, k]))
                        total += cost + sums[LATE, j] - sums[LATE, k]
                        if j == last:  # the last one comes back as soon as it has gone
                            total += copy / (j - k)
                        if total < best:
                            best, chosen, moved, gone, light = total, k - first, j - k, 0, 0
                if enough <= end and need <= states[b] - states[a]:
                    while s > enough and states[s - 1] - states[begin] >= need:
                        s -= 1
                    copied, longest = states[b] - states[a], whole_most
                    if s <= b:
                        copied, longest = states[s] - states[begin], most[s]
                    total = cost + (copied + longest) * per_byte
                    if copied <= host and total < best:
                        best, chosen, moved, gone, light = total, k - first, 0, s - begin, 0
            if best == np.inf:
                break
            counts[SOME, a, b], counts[ALL, a, b] = light, chosen
            counts[2, a, b], counts[3, a, b] = moved, gone
            out[a, b] = sums[SECONDS, b] - sums[SECONDS, a] + best
