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
from tutti.search.cutting.relief_mixture import (
    ADDED,
    ALL,
    AWAY,
    FORWARD,
    HELD,
    LATE,
    PASSING,
    ROWS,
    SECONDS,
    SOME,
    add_up,
    count_states,
    fill,
)
from tutti.search.pricing.unit_tables import NONE, ConfigTable
from tutti.search.thresholds import THRESHOLDS
from tutti.simulate.kernel import compiled

FloatArray = npt.NDArray[np.float64]


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
    def makes_once(self) -> bool:
        """Whether gradients come and go with the only micro-batch of a step."""
        alone = self.micro_batches == 1 and self.in_flight <= 1.0
        return alone and self.shard < 2 and self.table.gradients_made

    @property
    def boundary_bytes(self) -> float:
        """What tensors at the stage's boundaries take."""
        return (
            THRESHOLDS.boundaries + THRESHOLDS.more_boundaries * (self.ranges - 1)
        ) * self.table.boundary

    @property
    def key(self) -> object:
        """What makes two slots of one chain alike."""
        return (id(self.table), self.in_flight, self.relieved, self.sharers, self.expert_sharers,
                self.shard, self.usable_bytes)  # fmt: skip


def static_bytes(slot: Slot) -> FloatArray:
    """Return, per unit, the bytes of states that lie on a chip from step to step."""
    table = slot.table
    sharded = _held(slot, table.parameter_bytes - table.frozen_bytes, 3) + table.frozen_bytes
    standing = sharded + _held(slot, table.optimizer_bytes, 1)
    return standing if slot.makes_once else standing + _held(slot, table.gradient_bytes, 2)


def made_bytes(slot: Slot) -> FloatArray:
    """Return, per unit, the bytes of gradients that take the place of what the unit kept.

    One micro-batch makes them once (`cost.memory`), in the weights' dtype where nobody shares them.
    """
    table = slot.table
    if not slot.makes_once:
        return np.zeros_like(table.gradient_bytes)
    alone = max(slot.sharers, slot.expert_sharers, table.config.tp, table.config.ep) <= 1
    made: FloatArray = np.minimum(table.parameter_bytes, table.gradient_bytes)
    return made if alone else table.gradient_bytes


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
        self._sums, self._once = np.zeros((ROWS, units + 1)), np.zeros((5, units))
        compiled(add_up)(
            table.seconds,
            table.forward[NONE],
            table.backward_input[NONE] + table.backward_weight[NONE],
            table.kept,
            table.passing,
            table.parameter_bytes,
            table.gradient_bytes,
            static_bytes(slot),
            made_bytes(slot),
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
        once, room = once / ranges, (slot.usable_bytes - slot.boundary_bytes) / ranges
        least = units if only else 0
        fewest_away = np.zeros((units + 1, units + 1), dtype=np.int64)
        most = np.zeros((units + 1, units + 1))
        if "optimizer" in slot.offload:
            compiled(count_states)(sums, once, room, least, first, fewest_away, most)
        compiled(fill)(
            sums,
            once,
            np.array(allowed),
            1.0 / slot.copy_bandwidth / max(1, slot.micro_batches),
            room,
            slot.host_bytes / ranges,
            least,
            first,
            last,
            fewest_away,
            most,
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
        relieved = self._named(counts[:, 0, -1], units, blocks)
        parts = [(_recompute_inside(relieved[0], span), _offload_inside(relieved[1], span))
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
    ranges: list[tuple[int, int]] = []
    for unit in sorted(units):
        if ranges and ranges[-1][1] == unit:
            ranges[-1] = (ranges[-1][0], unit + 1)
        else:
            ranges.append((unit, unit + 1))
    return tuple(ranges)


def _inside(ranges: UnitRanges, span: tuple[int, int]) -> UnitRanges:
    cut = ((max(a, span[0]), min(b, span[1])) for a, b in ranges)
    return tuple((a, b) for a, b in cut if a < b)


def _recompute_inside(whole: Recompute, span: tuple[int, int]) -> Recompute:
    return Recompute(selective=_inside(whole.selective, span), full=_inside(whole.full, span))


def _offload_inside(whole: Offload, span: tuple[int, int]) -> Offload:
    return Offload(
        optimizer=_inside(whole.optimizer, span), activations=_inside(whole.activations, span)
    )
