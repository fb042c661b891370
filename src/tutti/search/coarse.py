"""Coarse strategies by the hundred thousand: which kinds of chains are worth a closer look.

A *chain* is one copy of a pipeline: some pools in sequence, each with its degrees and number of
stages. Copies of a chain fill the pools. Everything here is arrays over (combination of degrees,
number of copies, schedule) and approximate: equal blocks, memory by the fullest stage of each
pool, traffic by its volume. What comes out in front is cut, placed and simulated exactly.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti.cost.memory import Overheads
from tutti.hardware.cluster import Pool
from tutti.plan.job import ScheduleKind
from tutti.search.space import Problem
from tutti.search.tables import FULL, NONE, Config, ConfigTable, Tables
from tutti.simulate.kernel import compiled

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
MOST_COMBINATIONS = 4096  # of the configurations of all pools of a chain
HIDDEN_SHARE = 0.6  # of a micro-batch's time that gradient traffic can hide behind
FILLED_SHARE = 0.7  # of the weight passes that zero bubble puts into gaps, unequal stages allowed
HOST_SHARE = 0.8  # of host memory; the rest is the system's, the data loader's and checkpoints'
CHAINED_SEQUENCES = 4  # largest micro-batch looked at where several pools form one chain
# By how much simulated steps are longer, on average, at each shard level: boundaries, uneven ends,
# traffic that does not quite hide.
_OPTIMISM = (1.04, 1.04, 1.06, 1.10)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOption:
    """A schedule and how many unit ranges a stage has under it."""

    kind: ScheduleKind
    virtual: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """One kind of pipeline copy, with what the coarse model says of it."""

    configs: tuple[Config, ...]  # per pool of the chain, in order
    stages: tuple[int, ...]
    copies: int
    sequences: int  # per copy and micro-batch
    schedule: ScheduleOption
    shard: int
    pace: float  # seconds per micro-batch
    fill: float
    closing: float
    traffic: float = 0.0  # seconds per micro-batch that sharding keeps a NIC busy

    def seconds(self, sequences: float) -> float:
        """Return the step time if all copies together take so many sequences."""
        rounds = -(-sequences // (self.copies * self.sequences))
        return (rounds * self.pace + self.fill + self.closing) * _OPTIMISM[self.shard]

    @property
    def key(self) -> object:
        """What makes two chains the same strategy.

        How a replica's chips split their work between tensor and context parallelism is a detail.
        """
        configs = tuple((c.pool, c.width, c.sequences, c.ep) for c in self.configs)
        return (configs, self.stages, self.copies, self.schedule, self.shard)

    @property
    def rate(self) -> float:
        """Sequences per second of all copies."""
        return self.copies * self.sequences / self.pace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Options:
    """The configurations of one pool, as arrays."""

    configs: tuple[Config, ...]
    width: IntArray
    sequences: IntArray
    block: FloatArray  # seconds of an average block, all passes
    forward: FloatArray
    backward_input: FloatArray
    backward_weight: FloatArray
    again: FloatArray  # of recomputing it
    ends: FloatArray  # embedding and head, seconds
    parameters: FloatArray  # bytes of a block
    gradients: FloatArray
    optimizer: FloatArray
    expert_share: FloatArray  # of a block's parameters
    tables: FloatArray  # bytes of states of embedding or head, whichever is larger
    kept: FloatArray
    kept_full: FloatArray
    passing: FloatArray
    ep: IntArray
    memory: float
    chips: int
    inside: FloatArray  # bytes per second of a chip to others of its kind
    host: float
    away: FloatArray  # seconds to copy a block's activations to the host

    def take(self, rows: list[int]) -> _Options:
        """Return some of the configurations."""
        values: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "configs":
                value = tuple(value[i] for i in rows)
            elif isinstance(value, np.ndarray):
                value = value[rows]
            values[field.name] = value
        return _Options(**values)

    @classmethod
    def of(cls, tables: Tables, pool: str, configs: list[Config]) -> _Options | None:
        tables.prepare(configs)
        rows = [(c, t) for c in configs if (t := tables.get(c)) is not None]
        if not rows:
            return None
        found = tables.pool(pool)

        def column(figure: object) -> FloatArray:
            return np.array([figure(t) for _, t in rows], dtype=np.float64)  # type: ignore[operator]

        def mean(values: FloatArray) -> float:
            return float(values[1:-1].mean())

        def whole(t: ConfigTable) -> FloatArray:
            return t.parameter_bytes + t.gradient_bytes + t.optimizer_bytes

        prices = tables.prices[pool]
        nic = found.node.nic_bandwidth / found.node.num_chips * prices.efficiency.fabric
        return cls(
            configs=tuple(c for c, _ in rows),
            width=np.array([c.width for c, _ in rows], dtype=np.int64),
            sequences=np.array([c.sequences for c, _ in rows], dtype=np.int64),
            block=column(lambda t: mean(t.seconds[NONE])),
            forward=column(lambda t: mean(t.forward[NONE])),
            backward_input=column(lambda t: mean(t.backward_input[NONE])),
            backward_weight=column(lambda t: mean(t.backward_weight[NONE])),
            again=column(lambda t: mean(t.seconds[FULL] - t.seconds[NONE])),
            ends=column(lambda t: float(t.seconds[NONE][0] + t.seconds[NONE][-1])),
            parameters=column(lambda t: mean(t.parameter_bytes)),
            gradients=column(lambda t: mean(t.gradient_bytes)),
            optimizer=column(lambda t: mean(t.optimizer_bytes)),
            expert_share=column(
                lambda t: float(t.expert.sum() / max(1.0, (t.dense + t.expert).sum()))
            ),
            tables=column(lambda t: float(max(whole(t)[0], whole(t)[-1]))),
            kept=column(lambda t: mean(t.kept[NONE])),
            kept_full=column(lambda t: mean(t.kept[FULL])),
            passing=column(lambda t: float(t.passing.max()) + 4.0 * t.boundary),
            ep=np.array([c.ep for c, _ in rows], dtype=np.int64),
            memory=float("inf") if tables.problem.unlimited_memory
            else usable_bytes(found.chip.memory_bytes, tables.sources.overheads),
            chips=found.num_chips,
            inside=_exchange_rates(found, nic, [c for c, _ in rows],
                                   prices.efficiency.island),
            host=host_bytes(found),
            away=column(lambda t: mean(t.kept[NONE]) / copy_bandwidth(found)),
        )  # fmt: skip


def _thinned(options: list[_Options]) -> list[_Options]:
    """Return fewer configurations of each pool where all combinations would be too many.

    Of every width and micro-batch the fastest and the one that spreads experts most are kept,
    then the fastest of all.
    """
    most = math.floor(MOST_COMBINATIONS ** (1.0 / len(options)))
    found = []
    for o in options:
        if len(o.configs) <= most:
            found.append(o)
            continue
        work = o.block * o.width / o.sequences
        groups: dict[tuple[int, int], list[int]] = {}
        for i, config in enumerate(o.configs):
            groups.setdefault((config.width, config.sequences), []).append(i)
        chosen: set[int] = set()
        for rows in groups.values():
            chosen.add(min(rows, key=lambda i: (work[i], i)))
            chosen.add(min(rows, key=lambda i: (-o.ep[i], work[i], i)))
        ranked = sorted(chosen, key=lambda i: (work[i], i))[:most]
        found.append(o.take(sorted(ranked)))
    return found


def _exchange_rates(pool: Pool, nic: float, configs: list[Config], efficiency: float) -> FloatArray:
    """Return the bytes per second at which a chip exchanges its state with other copies.

    Copies in one island share what their NICs bring in and pass it on over native links.
    """
    node = pool.node
    link = max((i.bandwidth for i in node.islands), default=node.effective_bridge.bandwidth)
    largest = max((len(i.slots) for i in node.islands), default=1)
    copies = np.array([max(1, largest // c.width) for c in configs], dtype=np.float64)
    across = nic * copies if pool.nodes > 1 else np.full(len(configs), np.inf)
    return np.maximum(np.minimum(across, link * efficiency), 1.0)


def copy_bandwidth(pool: Pool) -> float:
    """Return the bytes per second between a chip and its host, all chips at once."""
    host, node = pool.node.host, pool.node
    return min(host.device_bandwidth, host.memory_bandwidth * node.hosts / node.num_chips)


def host_bytes(pool: Pool) -> float:
    """Return a chip's part of its host's memory that may hold what chips offload."""
    node = pool.node
    return HOST_SHARE * node.host.memory_bytes * node.hosts / node.num_chips


def usable_bytes(memory_bytes: float, overheads: Overheads) -> float:
    """Return what of a chip's memory tensors may take."""
    fixed = overheads.context_bytes + overheads.workspace_bytes
    return (memory_bytes - fixed) / (1.0 + overheads.slack)


def schedule_options(problem: Problem) -> tuple[ScheduleOption, ...]:
    """Return the schedules to price, interleaved once per number of unit ranges."""
    found: list[ScheduleOption] = []
    kinds = problem.space.schedules
    for kind in kinds:
        if kind is ScheduleKind.INTERLEAVED:
            found += [ScheduleOption(kind=kind, virtual=v) for v in problem.space.virtual if v > 1]
        else:
            found.append(ScheduleOption(kind=kind))
    return tuple(found)


class Coarse:
    """Ranks chains over given pools."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.problem = tables.problem
        self.priced = 0
        self._options: dict[tuple[str, bool], _Options | None] = {}

    def _pool(self, name: str, *, chained: bool) -> _Options | None:
        key = (name, chained)
        if key not in self._options:
            problem, pool = self.problem, self.problem.cluster.pool(name)
            counts = [b for b in problem.sequence_counts() if not chained or b <= CHAINED_SEQUENCES]
            configs = [
                Config(name, tp, cp, ep, b)
                for tp in problem.tensor_degrees(pool)
                for cp in problem.context_degrees()
                for ep in problem.expert_degrees()
                for b in counts
                if tp * cp <= pool.num_chips and ep <= pool.num_chips
            ]
            self._options[key] = _Options.of(self.tables, name, configs)
        return self._options[key]

    def chains(self, pools: tuple[str, ...], sequences: float, most: int) -> list[Chain]:
        """Return the most promising chains over pools in this order, best first.

        `most` are taken of every schedule and shard level, for between those the coarse model is
        not to be trusted. `sequences` is what all copies together are to take of a step.
        """
        options = [self._pool(name, chained=len(pools) > 1) for name in pools]
        if any(found is None for found in options):
            return []
        known = _thinned([found for found in options if found is not None])
        grid = _Grid(self.problem, known, sequences)
        if not grid.size:
            return []
        found: list[Chain] = []
        for schedule in schedule_options(self.problem):
            plain = grid.plain_pace(schedule)
            for shard in self.problem.space.shard:
                found += self._best(grid, plain, shard, schedule, most)
        found.sort(key=lambda chain: (chain.seconds(sequences), chain.configs, chain.stages))
        return found

    def _best(
        self, grid: _Grid, plain: FloatArray, shard: int, schedule: ScheduleOption, most: int
    ) -> list[Chain]:
        self.priced += grid.size
        seconds = grid.price(plain, shard, schedule)
        likely = np.argpartition(seconds, min(8 * most, len(seconds) - 1))[: 8 * most]
        likely = likely[np.lexsort((likely, seconds[likely]))]
        found: dict[object, Chain] = {}
        for i in likely.tolist():
            if not np.isfinite(seconds[i]) or len(found) == most:
                break
            chain = grid.chain(i, shard, schedule)
            found.setdefault(chain.key, chain)
        return list(found.values())


class _Grid:
    """All combinations of the pools' configurations with all numbers of copies."""

    def __init__(self, problem: Problem, options: list[_Options], sequences: float) -> None:
        self.options = options
        self.units = problem.model.num_units
        self.layers = problem.model.num_layers
        self.total = sequences
        self.may_offload = "activations" in problem.space.offload
        picks = list(itertools.product(*(range(len(o.configs)) for o in options)))
        pick = np.array(picks, dtype=np.int64).reshape(len(picks), len(options))
        per_copy = np.max(np.stack([o.sequences[pick[:, k]] for k, o in enumerate(options)]), 0)
        fits = np.ones(len(picks), dtype=bool)
        for k, o in enumerate(options):
            fits &= per_copy % o.sequences[pick[:, k]] == 0
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
        for name in ("pick", "per_copy", "copies", "stages"):
            setattr(self, name, getattr(self, name)[keep])

    def plain_pace(self, schedule: ScheduleOption) -> FloatArray:
        """Return the slowest stage's time if nothing is recomputed."""
        block = np.stack(self._blocks("block"), axis=1)
        return self._pace(block, self._blocks("ends")[-1], schedule)

    def price(self, plain: FloatArray, shard: int, schedule: ScheduleOption) -> FloatArray:
        """Return approximate step times; infinite where memory cannot be made to suffice."""
        depth = self.stages.sum(axis=1)
        rounds = np.ceil(self.total / (self.copies * self.per_copy))
        block = np.stack(self._blocks("block"), axis=1)
        pace = plain
        worst = np.zeros(len(pace), dtype=np.float64)
        before = np.zeros(len(pace), dtype=np.int64)
        fits = np.ones(len(pace), dtype=bool)
        for k in range(len(self.options)):
            share = self._recomputed(k, shard, schedule, pace, depth, before, rounds)
            fits &= np.isfinite(share)
            share = np.where(np.isfinite(share), share, 0.0)
            block[:, k] += share * self._relief_seconds(k, pace)
            worst = np.maximum(worst, share)
            before = before + self.stages[:, k]
        if worst.any():
            pace = self._pace(block, self._blocks("ends")[-1], schedule)
        self.traffic = np.zeros(len(pace))
        if shard >= 2:
            self.traffic = self._sharding_traffic(shard, pace)
            pace = np.maximum(pace, self.traffic)
        if schedule.virtual > 1:
            fits &= (depth > 1) & (depth * schedule.virtual <= self.units)
            fits &= rounds >= depth
        elif schedule.kind is not ScheduleKind.ONE_F_ONE_B:
            fits &= depth > 1
        if shard >= 1:
            fits &= self.copies > 1
        self.pace = pace
        self.fill = self._fill_seconds(schedule, pace, depth)
        self.closing = self._closing_seconds(shard, pace)
        seconds = (rounds * pace + self.fill + self.closing) * _OPTIMISM[shard]
        return np.where(fits, seconds, np.inf)

    def _pace(self, block: FloatArray, ends: FloatArray, schedule: ScheduleOption) -> FloatArray:
        """Return the slowest stage's time; the ranges of a stage are as long as one another."""
        virtual = schedule.virtual
        return virtual * _pace(block, self.stages * virtual, ends, self.layers)

    def _blocks(self, name: str) -> list[FloatArray]:
        return [self._column(k, name) for k in range(len(self.options))]

    def _column(self, k: int, name: str) -> FloatArray:
        values: FloatArray = getattr(self.options[k], name)[self.pick[:, k]]
        return values

    def _recomputed(
        self,
        k: int,
        shard: int,
        schedule: ScheduleOption,
        pace: FloatArray,
        depth: IntArray,
        before: IntArray,
        rounds: FloatArray,
    ) -> FloatArray:
        """Return which share of a pool's blocks must be recomputed, on average over its stages."""
        o, stages = self.options[k], self.stages[:, k]
        if not np.isfinite(o.memory):
            return np.zeros(len(pace))
        block = self._column(k, "block")
        blocks = np.maximum(1.0, np.floor(pace / block * (1 + 1e-9)))
        blocks = np.minimum(blocks, np.ceil(self.layers / stages))
        replicas = self.per_copy // self._column(k, "sequences") * self.copies
        expert = self._column(k, "expert_share")
        chips = replicas * self._column(k, "width")
        divide = (1.0 - expert) / replicas + expert / np.maximum(1.0, chips / self._column(k, "ep"))
        states = (
            self._column(k, "parameters") * (divide if shard >= 3 else 1.0)
            + self._column(k, "gradients") * (divide if shard >= 2 else 1.0)
            + self._column(k, "optimizer") * (divide if shard >= 1 else 1.0)
        )
        fixed = self._column(k, "passing") + blocks * states
        fixed = fixed + self._column(k, "tables") * (divide if shard >= 1 else 1.0)
        if shard >= 2:
            fixed = fixed + self._column(k, "gradients")
        if shard >= 3:
            fixed = fixed + 3.0 * self._column(k, "parameters")
        kept, least = self._column(k, "kept"), self._column(k, "kept_full")
        room = o.memory - fixed
        total = np.zeros(len(pace))
        for position in (before, before + stages - 1):
            flight = _in_flight(schedule, depth, position, rounds)
            need = blocks * flight * kept - room
            gain = blocks * (flight * (kept - least)) - (kept - least)
            share = np.where(need <= 0, 0.0, need / np.maximum(gain, 1e-9))
            total += np.where(share <= 1.0, share, np.inf)
        return total / 2.0

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

    def _sharding_traffic(self, shard: int, pace: FloatArray) -> FloatArray:
        """Return the seconds that gathers and reductions of one micro-batch keep a NIC busy."""
        slowest = np.zeros(len(pace))
        for k in range(len(self.options)):
            blocks = np.floor(pace / self._column(k, "block") * (1 + 1e-9))
            moved = self._column(k, "gradients")
            if shard >= 3:
                moved = moved + 2.0 * self._column(k, "parameters")
            traffic = blocks * moved * (1.0 - 1.0 / self.copies) / self._column(k, "inside")
            slowest = np.maximum(slowest, traffic)
        return slowest

    def _fill_seconds(
        self, schedule: ScheduleOption, pace: FloatArray, depth: IntArray
    ) -> FloatArray:
        total = np.zeros(len(pace))
        for k in range(len(self.options)):
            passes = self._column(k, "forward") + self._column(k, "backward_input")
            if schedule.kind is ScheduleKind.ZERO_BUBBLE:
                passes = passes - FILLED_SHARE * self._column(k, "backward_weight")
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
            exposed = np.maximum(0.0, reduce - HIDDEN_SHARE * pace) if shard < 2 else 0.0
            slowest = np.maximum(slowest, exposed + gather)
        return slowest

    def chain(self, i: int, shard: int, schedule: ScheduleOption) -> Chain:
        """Return a row as a Chain."""
        return Chain(
            configs=tuple(o.configs[self.pick[i, k]] for k, o in enumerate(self.options)),
            stages=tuple(int(n) for n in self.stages[i]),
            copies=int(self.copies[i]),
            sequences=int(self.per_copy[i]),
            schedule=schedule,
            shard=shard,
            pace=float(self.pace[i]),
            fill=float(self.fill[i]),
            closing=float(self.closing[i]),
            traffic=float(self.traffic[i]),
        )


def _in_flight(
    schedule: ScheduleOption, depth: IntArray, position: IntArray, rounds: FloatArray
) -> FloatArray:
    """Micro-batches of a whole stage that wait for backward."""
    if schedule.kind is ScheduleKind.ZERO_BUBBLE:
        flight = depth.astype(np.float64)
    elif schedule.virtual > 1:
        ahead = 2.0 * (depth - position - 1) + (schedule.virtual - 1) * depth + 1
        flight = ahead / schedule.virtual
    elif schedule.kind is ScheduleKind.GPIPE:
        flight = rounds
    else:
        flight = (depth - position).astype(np.float64)
    least: FloatArray = np.minimum(flight, rounds)
    return least


def _copy_counts(options: list[_Options], sequences: int) -> IntArray:
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
