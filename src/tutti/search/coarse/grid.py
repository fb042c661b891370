"""All combinations of the pools' configurations and numbers of copies, priced at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti.plan.schedules import PLAIN
from tutti.search.coarse.pool_options import Options
from tutti.search.question.space import Problem
from tutti.search.strategy.coarse_chain import Chain, ScheduleOption
from tutti.search.thresholds import THRESHOLDS
from tutti.simulate.kernel import compiled

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedGrid:
    """The rows of a grid under one schedule and shard level, with what the coarse model says."""

    grid: Grid
    shard: int
    schedule: ScheduleOption
    seconds: FloatArray  # of a step; infinite where memory cannot be made to suffice
    pace: FloatArray
    fill: FloatArray
    closing: FloatArray
    traffic: tuple[FloatArray, ...]  # per pool: seconds that sharding a block keeps a NIC busy

    def chain(self, i: int) -> Chain:
        """Return a row as a Chain."""
        grid = self.grid
        return Chain(
            configs=tuple(o.configs[grid.pick[i, k]] for k, o in enumerate(grid.options)),
            stages=tuple(int(n) for n in grid.stages[i]),
            copies=int(grid.copies[i]),
            sequences=int(grid.per_copy[i]),
            schedule=self.schedule,
            shard=self.shard,
            pace=float(self.pace[i]),
            fill=float(self.fill[i]),
            closing=float(self.closing[i]),
            traffic=tuple(float(traffic[i]) for traffic in self.traffic),
        )


class Grid:
    """All combinations of the pools' configurations with all numbers of copies."""

    def __init__(
        self,
        problem: Problem,
        options: list[Options],
        sequences: float,
        sharing: float = 1.0,
        *,
        elastic: bool = False,
    ) -> None:
        self.options = options
        self._columns: dict[tuple[int, str], FloatArray] = {}
        self.sharing = sharing  # chips that hold a unit in all pipelines, over those in this one
        self.units = problem.model.num_units
        self.layers = problem.model.num_layers
        self.total = sequences
        self.elastic = elastic  # others take what whole micro-batches leave over, or give some
        self.may_offload = "activations" in problem.space.offload
        self.states_may_go = "optimizer" in problem.space.offload
        picks = list(itertools.product(*(range(len(o.configs)) for o in options)))
        pick = np.array(picks, dtype=np.int64).reshape(len(picks), len(options))
        per_copy = np.max(np.stack([o.sequences[pick[:, k]] for k, o in enumerate(options)]), 0)
        fits = np.ones(len(picks), dtype=bool)
        for k, o in enumerate(options):
            fits &= per_copy % o.sequences[pick[:, k]] == 0
        if not elastic or not problem.has_other_sizes:
            fits &= problem.job.global_batch % per_copy == 0
        pick, per_copy = pick[fits], per_copy[fits]
        copies = _copy_counts(options, int(sequences))
        self.pick = np.repeat(pick, len(copies), axis=0)
        self.per_copy = np.repeat(per_copy, len(copies))
        self.copies = np.tile(copies, len(pick))
        self._lay_stages(problem)

    @property
    def size(self) -> int:
        """Number of combinations."""
        return len(self.copies)

    def _lay_stages(self, problem: Problem) -> None:
        """Give every pool as many stages as its chips make; drop what has none or too many."""
        stages = []
        for k, o in enumerate(self.options):
            wide = o.width[self.pick[:, k]] * (self.per_copy // o.sequences[self.pick[:, k]])
            stages.append(o.chips // np.maximum(1, wide * self.copies))
        self.stages = np.stack(stages, axis=1) if stages else np.zeros((0, 0), dtype=np.int64)
        most = min(self.units, problem.space.max_stages or self.units)
        if len(self.options) == 1:
            self.stages = np.minimum(self.stages, most)
        total = self.stages.sum(axis=1)
        keep = (self.stages >= 1).all(axis=1) & (total <= most)
        keep &= self.copies * self.per_copy <= problem.job.global_batch
        for k, o in enumerate(self.options):
            ep = o.ep[self.pick[:, k]]
            wide = o.width[self.pick[:, k]] * (self.per_copy // o.sequences[self.pick[:, k]])
            keep &= (ep == 1) | ((wide * self.copies) % ep == 0)
            if not problem.space.idle:
                keep &= wide * self.copies * self.stages[:, k] == o.chips
        self._keep(keep)

    def keep_even(self, sequences: int) -> None:
        """Drop what cannot take just so many sequences with its expert groups whole."""
        quantum = np.ones(self.size, dtype=np.int64)
        for k, o in enumerate(self.options):
            ep = o.ep[self.pick[:, k]]
            wide = o.width[self.pick[:, k]] * (self.per_copy // o.sequences[self.pick[:, k]])
            quantum = np.lcm(quantum, ep // np.gcd(ep, wide))
        self._keep(sequences % (quantum * self.per_copy) == 0)

    def _keep(self, rows: npt.NDArray[np.bool_]) -> None:
        for name in ("pick", "per_copy", "copies", "stages"):
            setattr(self, name, getattr(self, name)[rows])
        self._columns.clear()

    def plain_pace(self) -> FloatArray:
        """Return the slowest stage's time if nothing is recomputed."""
        block = np.stack(self._blocks("block"), axis=1)
        return _pace(block, self.stages, self._blocks("ends")[-1], self.layers)

    def price(self, plain: FloatArray, shard: int, schedule: ScheduleOption) -> PricedGrid:
        """Return approximate step times, and what they consist of."""
        depth = self.stages.sum(axis=1)
        size = self.copies * self.per_copy
        rounds = whole_rounds(self.total / size, elastic=self.elastic)
        block = np.stack(self._blocks("block"), axis=1)
        pace = plain
        worst = np.zeros(len(pace), dtype=np.float64)
        before = np.zeros(len(pace), dtype=np.int64)
        fits = np.ones(len(pace), dtype=bool)
        copied = np.zeros(len(pace))
        for k in range(len(self.options)):
            share, moved = self._recomputed(k, shard, schedule, pace, depth, before, rounds)
            copied = np.maximum(copied, moved)
            fits &= np.isfinite(share)
            share = np.where(np.isfinite(share), share, 0.0)
            block[:, k] += share * self._relief_seconds(k, pace)
            worst = np.maximum(worst, share)
            before = before + self.stages[:, k]
        if worst.any():
            pace = _pace(block, self.stages, self._blocks("ends")[-1], self.layers)
        blocks: list[FloatArray] = []
        if shard >= 2:
            blocks = [self._block_traffic(k, shard) for k in range(len(self.options))]
            traffic = self._sharding_traffic(pace, blocks)
            reduced = traffic if shard == 2 else 0.5 * traffic
            shown = np.maximum(0.0, reduced - THRESHOLDS.weight_share * pace) / schedule.virtual
            pace = np.maximum(pace + shown, traffic)
        if schedule.virtual > 1:
            fits &= (depth > 1) & (depth * schedule.virtual <= self.units)
            fits &= rounds >= depth
        elif schedule.kind is not PLAIN:
            fits &= depth > 1
        if shard >= 1:
            fits &= self.copies > 1
        fill = self._fill_seconds(schedule, pace, depth)
        closing = self._closing_seconds(shard, pace) + copied
        seconds = (rounds * pace + fill + closing) * THRESHOLDS.optimism[shard]
        if self.elastic:
            seconds = seconds * self.total / (rounds * size)
        return PricedGrid(
            grid=self, shard=shard, schedule=schedule, seconds=np.where(fits, seconds, np.inf),
            pace=pace, fill=fill, closing=closing, traffic=tuple(blocks),
        )  # fmt: skip

    def _blocks(self, name: str) -> list[FloatArray]:
        return [self._column(k, name) for k in range(len(self.options))]

    def _column(self, k: int, name: str) -> FloatArray:
        """Return a figure of a pool's configurations by row; asked for again and again."""
        if (k, name) not in self._columns:
            self._columns[k, name] = getattr(self.options[k], name)[self.pick[:, k]]
        return self._columns[k, name]

    def _recomputed(
        self,
        k: int,
        shard: int,
        schedule: ScheduleOption,
        pace: FloatArray,
        depth: IntArray,
        before: IntArray,
        rounds: FloatArray,
    ) -> tuple[FloatArray, FloatArray]:
        """Return which share of a pool's blocks must be recomputed, on average over its stages.

        Where that is not enough, optimizer states may live on the host: the seconds of their copies
        are returned, too.
        """
        copied = np.zeros(len(pace))
        o, stages = self.options[k], self.stages[:, k]
        if not np.isfinite(o.memory):
            return copied, copied
        block = self._column(k, "block")
        blocks = np.maximum(1.0, np.floor(pace / block * (1 + 1e-9)))
        blocks = np.minimum(blocks, np.ceil(self.layers / stages))
        replicas = self.per_copy // self._column(k, "sequences") * self.copies
        expert = self._column(k, "expert_share")
        chips = replicas * self._column(k, "width")
        more = self.sharing if shard == 1 else 1.0
        groups = np.maximum(1.0, more * chips / self._column(k, "ep"))
        divide = (1.0 - expert) / (more * replicas) + expert / groups
        once = (rounds <= 1.0) & (shard < 2)  # then gradients take the place of activations
        gradients = np.where(once, 0.0, self._column(k, "gradients"))
        states = (
            self._column(k, "parameters") * (divide if shard >= 3 else 1.0)
            + gradients * (divide if shard >= 2 else 1.0)
            + self._column(k, "optimizer") * (divide if shard >= 1 else 1.0)
        )
        fixed = self._column(k, "passing") + blocks * states
        fixed = fixed + self._column(k, "tables") * (divide if shard >= 1 else 1.0)
        if shard >= 2:
            fixed = fixed + self._column(k, "gradients")
        if shard >= 3:
            fixed = fixed + 3.0 * self._column(k, "parameters")
        kept, least = self._kept(k, once, replicas)
        room = o.memory - fixed
        total = np.zeros(len(pace))
        movable = np.zeros(len(pace))
        if self.states_may_go:
            ends = self._column(k, "tables") / np.maximum(states, 1.0)  # in blocks
            movable = self._column(k, "optimizer") * (divide if shard >= 1 else 1.0)
            movable = np.minimum(movable * (blocks + ends), o.host)
        for position in (before, before + stages - 1):
            flight = schedule.record.in_flight(schedule.place(depth, position, rounds))
            need = blocks * flight * kept - room
            gain = blocks * (flight * (kept - least)) - (kept - least)
            share = np.where(need <= 0, 0.0, need / np.maximum(gain, 1e-9))
            short = np.maximum(need - np.maximum(gain, 0.0), 0.0)
            relieved = (short > 0.0) & (short <= movable)
            copied = np.maximum(copied, np.where(relieved, short / o.copy, 0.0))
            share = np.where(relieved, 1.0, share)
            total += np.where(share <= 1.0, share, np.inf)
        return total / 2.0, copied

    def _kept(
        self, k: int, once: npt.NDArray[np.bool_], replicas: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return what a block keeps of a micro-batch, plain and recomputed.

        Where gradients are made once, they take its place: alone, in the dtype of the weights.
        """
        kept, least = self._column(k, "kept"), self._column(k, "kept_full")
        if not once.any():
            return kept, least
        alone = (replicas == 1) & (self._column(k, "width") == 1)
        made = np.where(alone, self._column(k, "parameters"), self._column(k, "gradients"))
        made = np.where(once, made, 0.0)
        return np.maximum(kept, made), np.maximum(least, made)

    def _relief_seconds(self, k: int, pace: FloatArray) -> FloatArray:
        """Return what it costs to free a block's activations: to recompute or to move them."""
        again = self._column(k, "again")
        if not self.may_offload:
            return again
        blocks = np.maximum(1.0, np.floor(pace / self._column(k, "block") * (1 + 1e-9)))
        exposed = np.maximum(0.0, self._column(k, "away") - self._column(k, "forward"))
        room = blocks * self._column(k, "kept") <= self.options[k].host
        cheap: FloatArray = np.where(room, np.minimum(again, exposed + 0.01 * again), again)
        return cheap

    def _block_traffic(self, k: int, shard: int) -> FloatArray:
        """Return the seconds that gathers and reductions of a block keep a NIC busy."""
        moved = self._column(k, "gradients")
        if shard >= 3:
            moved = moved + 2.0 * self._column(k, "parameters")
        sharers = self.copies * (self.per_copy // self._column(k, "sequences"))
        shared = 1.0 - 1.0 / (sharers * self._column(k, "cp"))
        traffic: FloatArray = moved * shared / self._column(k, "inside")
        return traffic

    def _sharding_traffic(self, pace: FloatArray, each: Sequence[FloatArray]) -> FloatArray:
        """Return the seconds that the traffic of one micro-batch keeps a NIC busy."""
        slowest = np.zeros(len(pace))
        for k, traffic in enumerate(each):
            blocks = np.floor(pace / self._column(k, "block") * (1 + 1e-9))
            slowest = np.maximum(slowest, blocks * traffic)
        return slowest

    def _fill_seconds(
        self, schedule: ScheduleOption, pace: FloatArray, depth: IntArray
    ) -> FloatArray:
        total = np.zeros(len(pace))
        for k in range(len(self.options)):
            passes = self._column(k, "forward") + self._column(k, "backward_input")
            if schedule.record.delays_weights:
                passes = passes - THRESHOLDS.filled_share * self._column(k, "backward_weight")
            share = passes / self._column(k, "block") / schedule.virtual
            total += self.stages[:, k] * share
        return total * pace * (depth - 1) / np.maximum(depth, 1)

    def _closing_seconds(self, shard: int, pace: FloatArray) -> FloatArray:
        """Return what of gradient traffic and optimizer is not hidden."""
        slowest = np.zeros(len(pace))
        for k in range(len(self.options)):
            blocks = np.floor(pace / self._column(k, "block") * (1 + 1e-9))
            moved = blocks * self._column(k, "gradients") * (1.0 - 1.0 / self.copies)
            reduce = moved / self._column(k, "inside") * (2.0 if shard == 0 else 1.0)
            gather = 0.5 * moved / self._column(k, "inside") if shard in (1, 2) else 0.0
            exposed = np.maximum(0.0, reduce - THRESHOLDS.hidden_share * pace) if shard < 2 else 0.0
            slowest = np.maximum(slowest, exposed + gather)
        return slowest


def whole_rounds(rounds: FloatArray, *, elastic: bool) -> FloatArray:
    """Return how many whole micro-batches take so many: enough of them, or about as many."""
    whole: FloatArray = np.maximum(1.0, np.rint(rounds)) if elastic else np.ceil(rounds)
    return whole


def _copy_counts(options: list[Options], sequences: int) -> IntArray:
    """Return the numbers of copies worth a look: all small ones, then ever fewer.

    In a chain of several pools a number that divides none of them leaves chips of all over.
    """
    most = min(min(o.chips for o in options), max(1, sequences))
    wanted = set(range(1, min(most, 64 if len(options) == 1 else 16) + 1))
    step = 64.0
    while step < most and len(options) == 1:
        step *= 1.06
        wanted.add(min(most, int(step)))
    for chips in {o.chips for o in options}:
        wanted |= {d for d in range(1, most + 1) if chips % d == 0}
    return np.array(sorted(wanted), dtype=np.int64)


def _pace(block: FloatArray, stages: IntArray, ends: FloatArray, layers: int) -> FloatArray:
    """Return the smallest stage time at which all blocks, embedding and head find a place."""
    pace = np.empty(len(block))
    compiled(_rise)(block, stages, ends, float(layers), pace)
    return pace


def _rise(  # pragma: no cover - compiled
    block: Any, stages: Any, ends: Any, layers: float, pace: Any
) -> None:
    """Stages of pool k take floor(pace / block_k) blocks, the last as many as the head leaves.

    Starting from the time that would do if blocks could be cut, the pace rises from one multiple
    of a block to the next until all are placed.
    """
    rows, pools = block.shape
    more = 1.0 + 1e-9
    for i in range(rows):
        last, end = block[i, pools - 1], ends[i]
        speed, least = 0.0, block[i, 0]
        for k in range(pools):
            speed += stages[i, k] / block[i, k]
            least = min(least, block[i, k])
        now = max((layers + end / last) / speed, least)
        for _ in range(64):
            room, following = 0.0, np.inf
            for k in range(pools):
                held = np.floor(now / block[i, k] * more)
                room += held * stages[i, k]
                following = min(following, (held + 1.0) * block[i, k])
            beside = np.floor(max(0.0, now - end) / last * more)
            room -= np.floor(now / last * more) - beside
            if room >= layers:
                break
            with_head = (beside + 1.0) * last + end
            if with_head > now:
                following = min(following, with_head)
            now = following
        pace[i] = now
