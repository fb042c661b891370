"""Seconds and bytes of every unit under every configuration of a replica, looked up once each.

The figures come from where the simulator has them (`PoolPrices`, `RankState`, `MemoryModel`), so
that what the search adds up is what the simulator will play.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tutti.cost.memory.instruction_memory import MemoryModel
from tutti.cost.memory.rank_state import RankState
from tutti.cost.plan.plan_costs import pool_prices
from tutti.cost.plan.pool_prices import PoolPrices
from tutti.errors import InputError
from tutti.hardware.pool import Pool
from tutti.models.memory import Recompute
from tutti.models.operators import Workload
from tutti.models.parameters import ParameterClass
from tutti.plan.chips import ChipSet
from tutti.plan.files import refer_to_cluster, refer_to_model
from tutti.plan.plan import ExpertGroup, Pipeline, Plan, Replica, Stage
from tutti.schedule.instruction import Instruction, Op, Scope, What
from tutti.search.question.space import Problem

FloatArray = npt.NDArray[np.float64]
KINDS: tuple[Recompute, ...] = ("none", "selective", "full")
NONE, SELECTIVE, FULL = range(3)
_PASSES = ("forward", "recompute", "backward_input", "backward_weight")  # as in UnitTimes
CHUNKS = (1, 2, 4, 8)  # into which tensor-parallel collectives may be cut


class Config(NamedTuple):
    """How one replica computes: the chips of a pool, its degrees, its part of a micro-batch."""

    pool: str
    tp: int = 1
    cp: int = 1
    ep: int = 1
    sequences: int = 1  # of every micro-batch

    @property
    def width(self) -> int:
        """Chips of one replica."""
        return self.tp * self.cp

    def splits_tokens(self, length: int) -> bool:
        """Tell whether its chips share out the tokens of a sequence between their products."""
        return self.tp > 1 and length // self.cp % self.tp == 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConfigTable:
    """Per unit, for one micro-batch on one rank; the first axis of most is KINDS of recompute."""

    config: Config
    forward: FloatArray
    recompute: FloatArray
    backward_input: FloatArray
    backward_weight: FloatArray
    kept: FloatArray  # bytes between forward and weight gradient
    passing: FloatArray  # bytes that live inside a unit's backward (by unit)
    dense: FloatArray  # parameters a rank computes with, not sharded (by unit)
    expert: FloatArray
    parameter_bytes: FloatArray  # of them, not sharded (by unit)
    gradient_bytes: FloatArray
    optimizer_bytes: FloatArray
    boundary: float  # bytes of a rank's part of a boundary tensor
    frozen_bytes: FloatArray | float = 0.0  # of the parameters, what no level shards
    gradients_made: bool = True  # by a step's only micro-batch: measured layers hold them always
    overlap_chunks: int = 1  # into which tensor-parallel collectives are best cut

    seconds: FloatArray = field(init=False)  # all passes of a micro-batch

    def __post_init__(self) -> None:
        total = self.forward + self.recompute + self.backward_input + self.backward_weight
        object.__setattr__(self, "seconds", total)


class Tables:
    """The tables of one problem, made when first asked for."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.sources = problem.pinned_sources()
        model, cluster = problem.model, problem.cluster
        self.references = (refer_to_model(model), refer_to_cluster(cluster))
        self._known: dict[Config, ConfigTable | None] = {}
        self._sums: dict[Config, FloatArray] = {}
        self._workloads: dict[Config, Workload] = {}  # by configuration, on any chip
        self._kept_bytes: dict[Config, dict[str, Any]] = {}  # by configuration, on any chip
        self._state_bytes: dict[Config, dict[str, Any]] = {}
        used = {pool.name for pool in problem.pools}
        self.prices = pool_prices(self._plan(()), model, cluster, self.sources, used)
        names = [model.unit_kind(unit) for unit in range(model.num_units)]
        kinds = list(dict.fromkeys(names))
        self._examples = [names.index(kind) for kind in kinds]
        self._kind_of = np.array([kinds.index(name) for name in names], dtype=np.intp)

    @property
    def units_alike(self) -> bool:
        """Whether units of one kind have one price in every pool."""
        return all(prices.units_alike for prices in self.prices.values())

    def _plan(self, stages: tuple[Stage, ...]) -> Plan:
        model, cluster = self.references
        # Two micro-batches, as a rule there are several: gradients are sums that stay.
        pipelines = (Pipeline(micro_batch=1, micro_batches=2, stages=stages),) if stages else ()
        return Plan(model=model, cluster=cluster, job=self.problem.job, pipelines=pipelines)

    def for_problem(self, problem: Problem) -> Tables:
        """Return the same tables for another batch or fewer pools of the same question."""
        other = copy.copy(self)
        other.problem = problem
        return other

    def get(self, config: Config) -> ConfigTable | None:
        """Return the table; None where a layer profile has not measured the configuration."""
        if config not in self._known:
            try:
                self._known[config] = self._make(config)
            except InputError:
                if self.prices[config.pool].units_alike:
                    raise
                self._known[config] = None
        return self._known[config]

    def sums(self, config: Config) -> FloatArray:
        """Return the seconds of all units before each: recompute × (forward, input, weight)."""
        if config not in self._sums:
            table = self.get(config)
            assert table is not None, f"{config} has no measured profile"
            passes = (table.forward, table.recompute + table.backward_input, table.backward_weight)
            totals = np.zeros((len(KINDS), len(passes), table.forward.shape[1] + 1))
            np.cumsum(np.stack(passes, axis=1), axis=2, out=totals[:, :, 1:])
            self._sums[config] = totals
        return self._sums[config]

    def pool(self, name: str) -> Pool:
        """Return a pool of the cluster."""
        return self.problem.cluster.pool(name)

    def prepare(self, configs: Sequence[Config]) -> None:
        """Price many configurations at once, which is much faster than one by one."""
        missing: dict[str, list[Config]] = {}
        for config in configs:
            if config not in self._known and self.prices[config.pool].units_alike:
                missing.setdefault(config.pool, []).append(config)
        for pool, chosen in missing.items():
            works = [self._workload(config) for config in chosen]
            prices = self.prices[pool]
            seconds = self._at_best(prices, works)
            best = _best_chunks(seconds)
            passes = seconds[best, :, :, :, range(len(works))].transpose(0, 3, 1, 2)
            passes = self._spread(passes, modelled=True)  # config × pass × recompute × unit
            for i, config in enumerate(chosen):
                self._known[config] = ConfigTable(
                    config=config,
                    **dict(zip(_PASSES, passes[i], strict=True)),
                    **self._bytes(config),
                    overlap_chunks=CHUNKS[best[i]],
                )

    def _at_best(self, prices: PoolPrices, works: Sequence[Workload]) -> FloatArray:
        """Return seconds as `prepare` does, of blocks narrow or wide, whichever is faster."""
        seconds = prices.prepare(works, self._examples, overlap_chunks=CHUNKS)
        if prices.wide is prices:
            return seconds
        wide = prices.wide.prepare(works, self._examples, overlap_chunks=CHUNKS)
        narrow = seconds.sum(axis=3, keepdims=True) <= wide.sum(axis=3, keepdims=True)
        return np.where(narrow, seconds, wide)

    def _make(self, config: Config) -> ConfigTable:
        """Return one table: of measured layers, which are looked up by all their units."""
        work, prices = self._workload(config), self.prices[config.pool]
        if prices.units_alike:
            self.prepare((config,))
            table = self._known[config]
            assert table is not None
            return table
        units = range(self.problem.model.num_units)
        times = np.array([[prices.unit(work, unit, kind) for unit in units] for kind in KINDS])
        return ConfigTable(
            config=config,
            **dict(zip(_PASSES, np.ascontiguousarray(times.transpose(2, 0, 1)), strict=True)),
            **self._bytes(config),
            gradients_made=False,
        )

    def _workload(self, config: Config) -> Workload:
        """Return what a rank of a configuration has to do, the same on all chips."""
        alike = config._replace(pool="")
        if alike not in self._workloads:
            self._workloads[alike] = self._holdings(config).workload
        return self._workloads[alike]

    def _bytes(self, config: Config) -> dict[str, Any]:
        """Return the bytes of a configuration, the same on all chips unless they were measured."""
        prices = self.prices[config.pool]
        modelled = prices.units_alike
        alike = config._replace(pool="") if modelled else config
        if alike not in self._kept_bytes:
            memory = prices.memory(self._holdings(config))
            one = alike._replace(sequences=1) if modelled else alike
            if one not in self._state_bytes:
                self._state_bytes[one] = self._state(memory, modelled=modelled)
            self._kept_bytes[alike] = self._state_bytes[one] | self._kept(memory, modelled=modelled)
        return self._kept_bytes[alike]

    def _state(self, memory: MemoryModel, *, modelled: bool) -> dict[str, Any]:
        """Return what does not depend on the micro-batch: parameters and their states, by unit."""
        rank_state = memory.rank_state
        units = self._examples if modelled else range(self.problem.model.num_units)

        def by_unit(row: Sequence[float]) -> FloatArray:
            values: FloatArray = self._spread([row], modelled)[0]
            return values

        def state(what: What) -> FloatArray:
            return by_unit([memory.effect(_single(Op.FETCH, unit, what))[0] for unit in units])

        def parameters(kind: ParameterClass) -> FloatArray:
            return by_unit([rank_state.share(unit, kind).held for unit in units])

        return {
            "dense": parameters(ParameterClass.DENSE),
            "expert": parameters(ParameterClass.EXPERT),
            "parameter_bytes": state(What.PARAMETERS),
            "frozen_bytes": by_unit([memory.frozen_bytes(unit) for unit in units]),
            "gradient_bytes": state(What.GRADIENTS),
            "optimizer_bytes": state(What.OPTIMIZER),
        }

    def _kept(self, memory: MemoryModel, *, modelled: bool) -> dict[str, Any]:
        """Return what a micro-batch keeps and passes on."""
        rank_state = memory.rank_state
        units = self._examples if modelled else range(self.problem.model.num_units)

        def passing(unit: int) -> float:
            pair = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
            return max(memory.effect(_single(op, unit))[0] for op in pair)

        def kept(unit: int) -> list[float]:
            whole = rank_state.activations(unit, "none")
            taken = memory.effect(_single(Op.FORWARD, unit))[0]
            return [
                taken * (rank_state.activations(unit, kind) / whole if whole else 1.0)
                for kind in KINDS
            ]

        rows = list(map(list, zip(*map(kept, units), strict=True)))
        return {
            "kept": self._spread(rows, modelled),
            "passing": self._spread([[passing(unit) for unit in units]], modelled)[0],
            "boundary": memory.boundary(),
        }

    def _spread(self, rows: npt.ArrayLike, modelled: bool) -> FloatArray:
        """Return figures by kind of unit, on the last axis, as figures by unit."""
        values: FloatArray = np.array(rows, dtype=np.float64)
        if modelled:
            values = np.ascontiguousarray(np.take(values, self._kind_of, axis=-1))
        return values

    def _holdings(self, config: Config) -> RankState:
        count = math.lcm(config.ep, config.width) // config.width
        chips = ChipSet.of(f"{config.pool}/0/0-{count * config.width - 1}")
        replica = Replica(
            chips=chips,
            count=count,
            tp=config.tp,
            cp=config.cp,
            sequence_parallel=config.splits_tokens(self.problem.job.sequence_length),
            sequences=config.sequences,
        )
        all_chips = count * config.width
        groups = (ExpertGroup(chips=config.ep, count=all_chips // config.ep),) * (config.ep > 1)
        units = ((0, self.problem.model.num_units),)
        stage = Stage(units=units, replicas=(replica,), experts=groups)
        place = (0, 0, 0)
        return RankState(self._plan((stage,)), self.problem.model, place, self.sources.kernels)


def _best_chunks(seconds: FloatArray) -> npt.NDArray[np.intp]:
    """Return, by workload, which number of chunks takes least; the fewest of equal ones."""
    forward, backward, weights = (seconds[:, NONE, :, i] for i in (0, 2, 3))
    totals = (forward + backward + weights).sum(axis=1)
    best_chunk, best = np.zeros(totals.shape[1], dtype=np.intp), totals[0]
    for chunks, total in enumerate(totals[1:], start=1):
        less = total < best * (1.0 - 1e-9)
        best_chunk, best = np.where(less, chunks, best_chunk), np.where(less, total, best)
    return best_chunk


def _single(op: Op, unit: int, what: What = What.NOTHING) -> Instruction:
    return Instruction(op, 0, unit, unit + 1, what, Scope.ALL, ())
