"""The prices of one pool: its machine, its calibration, the seconds of each kind of unit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from tutti.cost.arrays import FloatArray, Machine, Strategy
from tutti.cost.calibration.intervals import (
    EXPERTS,
    NARROW,
    Known,
    measured_half_width,
    shipped_widths,
)
from tutti.cost.calibration.shipped import Calibration
from tutti.cost.constants import Constants
from tutti.cost.families import nominal_constants, nominal_label
from tutti.cost.kernels import Kernels
from tutti.cost.measured.chip import MeasuredChip
from tutti.cost.measured.forms import profiled_update_bytes
from tutti.cost.measured.pools import measured_chip
from tutti.cost.measured.unit import unmeasured
from tutti.cost.memory.instruction_memory import MemoryModel
from tutti.cost.memory.measured_passes import MeasuredMemory, MeasuredRanks
from tutti.cost.memory.rank_state import RankState
from tutti.cost.network.group_placement import ALIGNED, Placement, span_of
from tutti.cost.network.program_choice import Efficiency
from tutti.cost.operators.exposed_communication import AS_PRICED, PerCollective, Spans
from tutti.cost.operators.unit_times import (
    UnitSeconds,
    optimizer_seconds,
)
from tutti.cost.plan.unit_seconds import (
    BlockCollectives,
    Inside,
    block_collectives,
    passes_of,
    run_again,
    unit_seconds,
)
from tutti.hardware.chip import Dtype
from tutti.hardware.cluster import Cluster
from tutti.hardware.pool import Pool
from tutti.models.memory import Recompute
from tutti.models.operators import Workload
from tutti.models.spec import ModelSpec
from tutti.plan.job import Job, Precision
from tutti.plan.plan import ContextKind, Plan
from tutti.plan.wide_units import widened

_NARROW = {Dtype.FP8: 1.0, Dtype.FP4: 2.0}  # what Strategy.fp8 calls them
_USUAL_STATES = 26.0  # bytes of an update in published runs: fp32 master and moments, 16-bit weight


class UnitTimes(NamedTuple):
    """Seconds of one unit for one micro-batch on one rank."""

    forward: float
    recompute: float
    backward_input: float
    backward_weight: float


_SheetKey = tuple[str, Recompute, Inside]  # with the kind of a unit first
_Sheet = dict[_SheetKey, FloatArray]  # seconds by pass and workload


class PoolPrices:
    """Seconds and bytes on the chips of one pool: by its calibration, or operators as measured.

    What measures whole units is another source, with the same questions.
    """

    units_alike = True  # units of one kind have one price

    def __init__(
        self,
        plan: Plan,
        model: ModelSpec,
        cluster: Cluster,
        pool: Pool,
        calibration: Calibration | None,
        measured: MeasuredChip | None = None,
        *,
        kernels: Kernels | None = None,
        constants: Constants | None = None,
        measured_ranks: MeasuredRanks | None = None,
        known: Known = Known.CHIP,
        precision: Precision | None = None,
    ) -> None:
        """Look up what a pool is like; `precision` is what it multiplies in, the job's if None."""
        self._model = model
        self._measured_ranks = measured_ranks or {}
        self.kernels = kernels or Kernels()
        precision = precision or plan.job.precision
        self._compute = precision.compute
        self._measured = measured
        self._pool = pool
        self._machine = Machine.of(cluster, pool, self._compute)
        self._wide = None if precision == widened(precision) else partial(
            PoolPrices, plan, model, cluster, pool, calibration, kernels=kernels,
            constants=constants, measured_ranks=measured_ranks, known=known,
            precision=widened(precision),
        )  # fmt: skip
        if constants is None:
            constants = calibration.constants() if calibration else nominal_constants(pool.chip)
        self.constants = constants
        self.calibration = calibration
        self._known = known
        self._links = calibration.label if calibration is not None else nominal_label(pool.chip)
        self.basis = self._links
        if measured is not None:
            profile = measured.profile
            measured_by = f"profile of {profile.chip} ({profile.stack}, {profile.date})"
            self.basis = f"{measured_by}; its links {self._links}"
        self.efficiency = Efficiency(
            island=_number(self.constants.link_efficiency),
            fabric=_number(self.constants.nic_efficiency),
            startup_s=_number(self.constants.link_latency_s),
            hop_s=_number(self.constants.nic_latency_s),
        )
        self._units: dict[object, UnitTimes] = {}
        self._half_widths: dict[object, float] = {}
        self._prepared: dict[Workload, tuple[_Sheet, int]] = {}
        self._outside: dict[Workload, tuple[str, ...]] = {}  # what a profile does not know of each

    @cached_property
    def wide(self) -> PoolPrices:
        """The prices of blocks that stay wide in a job of 8 bits."""
        if self._wide is None:
            return self
        measured = self._measured
        if measured is not None:
            measured = measured_chip(measured.profile, measured.dtype)
        return self._wide(measured)

    @property
    def overlap_slowdown(self) -> float:
        """The seconds of compute lost per second of a collective beside it.

        A profile's operators ran alone, and the calibrations are of other engines: what is
        measured takes as long as it was measured.
        """
        return 0.0 if self._measured is not None else _number(self.constants.overlap_slowdown)

    @property
    def node_jitter(self) -> float:
        """The relative spread of the nodes' step times."""
        return _number(self.constants.node_jitter)

    def extrapolations(self, work: Workload, **degrees: float) -> tuple[str, ...]:
        """Return what of a workload lies outside the runs that the calibration was fitted on."""
        if self._measured is not None:
            if work not in self._outside:
                self._outside[work] = unmeasured(self._model, self._measured, work)
            return self._outside[work]
        if self.calibration is None:
            return ()
        return self.calibration.extrapolations(**self._values(work), **degrees)

    def half_width(self, work: Workload, **degrees: float) -> float:
        """Return how far predictions of a workload may be off: ln, of a 10–90 % interval."""
        if self._measured is not None:
            return measured_half_width(self.extrapolations(work))
        return self.links_half_width(work, **degrees)

    def links_half_width(self, work: Workload, **degrees: float) -> float:
        """Return the same of what the calibration prices, were nothing measured here."""
        key = (work, *degrees.items())
        if key not in self._half_widths:
            values = self._values(work) | degrees
            half_width = shipped_widths().half_width(self.calibration, self._known, values)
            self._half_widths[key] = half_width
        return self._half_widths[key]

    def _values(self, work: Workload) -> dict[str, float]:
        """Return what a workload is like, in the words of the calibrations' ranges."""
        return {
            "hidden": float(self._model.hidden),
            "tokens": float(work.tokens),
            "sequence_length": float(work.sequence_length),
            "tp": float(work.tp),
            "cp": float(work.cp),
            "ep": float(work.ep),
            EXPERTS: float(self._model.num_experts),
            NARROW: _NARROW.get(self._compute, 0.0),
        }

    def unit(
        self,
        work: Workload,
        unit: int,
        recompute: Recompute,
        *,
        overlap_chunks: int = 1,
        context_kind: ContextKind = ContextKind.RING,
        placement: Placement = ALIGNED,
        made_once: bool = False,
        wide: bool = False,
        longer: PerCollective = AS_PRICED,
    ) -> UnitTimes:
        """Return the seconds of a unit.

        `made_once`: its gradients are added to nothing; `wide`: its products are not narrow, in a
        job in which others are; its collectives take `longer` than on links of their own.
        """
        if wide and self._wide is not None:
            return self.wide.unit(
                work, unit, recompute, overlap_chunks=overlap_chunks, context_kind=context_kind,
                placement=placement, made_once=made_once, longer=longer,
            )  # fmt: skip
        made_once = made_once and self._measured is not None  # formulas do not tell the two apart
        inside = Inside(overlap_chunks, context_kind, placement, made_once, longer)
        name = self._model.unit_kind(unit)  # equal units are priced once
        key = (work, name, recompute, inside)
        if key not in self._units:
            seconds = self._looked_up(work, (name, recompute, inside))
            if seconds is None:
                times = self._price_one(work, unit, recompute, inside)
                seconds = [_number(column) for column in passes_of(times)]
            self._units[key] = self._times(*seconds)
        return self._units[key]

    def _times(self, forward: float, again: float, by_input: float, by_weight: float) -> UnitTimes:
        if not self.kernels.split_backward:
            by_input, by_weight = by_input + by_weight, 0.0
        return UnitTimes(forward, again, by_input, by_weight)

    def _looked_up(self, work: Workload, key: _SheetKey) -> list[float] | None:
        """Return what `prepare` has said of a workload; None if nothing."""
        sheet, column = self._prepared.get(work, ({}, 0))
        if key not in sheet:
            return None
        seconds: list[float] = sheet[key][:, column].tolist()
        return seconds if math.isfinite(seconds[0]) else None

    def prepare(
        self,
        works: Sequence[Workload],
        units: Sequence[int],
        *,
        overlap_chunks: Sequence[int] = (1,),
    ) -> FloatArray:
        """Price many aligned workloads at once; `unit` then only looks them up.

        Returns seconds by chunks, recomputation (none, selective, full), unit, pass as in UnitTimes
        and workload; infinite where there are chunks and nothing to cut.
        """
        recomputed = self.kernels.recomputed
        shape = (len(overlap_chunks), len(recomputed), len(units), 4, len(works))
        seconds = np.full(shape, np.inf)
        tensor = [i for i, work in enumerate(works) if work.tp > 1]
        rows = [
            (chunks, again, i)
            for chunks, count in enumerate(overlap_chunks)
            for again in range(len(recomputed))
            for i in (range(len(works)) if count == 1 else tensor)
        ]
        if not rows:
            return seconds
        chunks, again, i = np.array(rows, dtype=np.intp).T
        strategy = replace(
            self._strategy(works, ContextKind.RING).take(i),
            overlap_chunks=np.array(overlap_chunks, dtype=np.float64)[chunks],
            **run_again(np.array(list(recomputed.values()))[again].T),
        )
        for u, unit in enumerate(units):
            for p, column in enumerate(passes_of(self._price(strategy, unit, Spans()))):
                seconds[chunks, again, u, p, i] = column
        sheet = {
            (
                self._model.unit_kind(unit),
                recompute,
                Inside(count, ContextKind.RING, ALIGNED),
            ): seconds[c, r, u]
            for c, count in enumerate(overlap_chunks)
            for r, recompute in enumerate(recomputed)
            for u, unit in enumerate(units)
        }
        self._prepared |= {work: (sheet, i) for i, work in enumerate(works)}
        return seconds

    def _strategy(self, works: Sequence[Workload], context_kind: ContextKind) -> Strategy:
        """Return workloads that differ in degrees and sequences only; nothing runs again."""
        first = works[0]

        def column(name: str) -> FloatArray:
            values = np.array([getattr(work, name) for work in works], dtype=np.float64)
            return values if len(works) > 1 else values[0]

        return Strategy.filled(
            sequence_length=first.sequence_length,
            sequences=column("sequences"),
            tp=column("tp"),
            cp=column("cp"),
            ep=column("ep"),
            sequence_parallel=column("sequence_parallel"),
            flash=float(first.fused_attention),
            fp8=_NARROW.get(self._compute, 0.0),
            fp8_rowwise=float(self.kernels.row_scales),
            once_per_node=float(self.kernels.dispatches_once),
            compiled=float(self.kernels.compiled),
            async_tp=float(self.kernels.asynchronous_tp),
            shared_beside=1.0,
            context_gather=float(context_kind is ContextKind.ALL_GATHER),
        )

    def _price_one(
        self, work: Workload, unit: int, recompute: Recompute, inside: Inside
    ) -> UnitSeconds:
        """Price a unit for one workload, wherever its chips lie."""
        strategy = replace(
            self._strategy((work,), inside.context_kind),
            overlap_chunks=np.asarray(inside.overlap_chunks, dtype=np.float64),
            **run_again(np.array(self.kernels.recomputed[recompute])),
        )
        spans = self._spans(work, inside.placement, inside.longer)
        return self._price(strategy, unit, spans, made_once=inside.made_once)

    def _spans(self, work: Workload, placement: Placement, longer: PerCollective) -> Spans:
        node, machine = self._pool.node, self._machine
        return Spans(
            tp=span_of(placement.tp, work.tp, machine, node),
            cp=span_of(placement.cp, work.cp, machine, node),
            longer=longer,
        )

    def block_collectives(
        self, work: Workload, unit: int, context_kind: ContextKind, placement: Placement
    ) -> BlockCollectives:
        """Return what a block's collectives move and take, each once and uncut."""
        strategy = self._strategy((work,), context_kind)
        spans = self._spans(work, placement, AS_PRICED)
        return block_collectives(self._model, unit, strategy, spans, self._machine, self.constants)

    def _price(
        self, strategy: Strategy, unit: int, spans: Spans, *, made_once: bool = False
    ) -> UnitSeconds:
        chip = (self._machine, self.constants, self._measured)
        return unit_seconds(self._model, unit, strategy, spans, *chip, made_once=made_once)

    def optimizer(self, num_parameters: float, job: Job) -> float:
        """Return the seconds of a whole step over so many parameters, the host's part included.

        Both sources know one format of weights and moments; others move more bytes, or fewer.
        """
        if self._measured is not None and num_parameters >= 1:
            known = profiled_update_bytes(self._measured.dtype)
            count = np.asarray(num_parameters * job.update_bytes / known, dtype=np.float64)
            return _number(self._measured.seconds("adamw", "forward", (count,)))
        usual = job.precision.gradients.num_bytes + _USUAL_STATES
        count = np.asarray(num_parameters * job.update_bytes / usual, dtype=np.float64)
        return _number(optimizer_seconds(count, self._machine, self.constants))

    def read_seconds(self, num_bytes: float) -> float:
        """Return the seconds of reading gradients once more, for their norm.

        Nothing by formulas: calibrations on whole steps have it in the optimizer's constants.
        """
        if self._measured is None or num_bytes <= 0:
            return 0.0
        return _number(self._measured.memory(num_bytes / self._measured.dtype.num_bytes))

    def updates(self, memory: MemoryModel) -> Callable[[int, int], float]:
        """Return how to ask for a range of units' part of the optimizer's step on a rank."""

        def count(units: Iterable[int]) -> float:
            return sum(memory.optimizer_parameters(unit) for unit in units)

        updated = count(memory.units)
        whole = self.optimizer(updated, memory.plan.job)
        return lambda start, stop: whole * count(range(start, stop)) / updated if updated else 0.0

    def memory(self, rank_state: RankState) -> MemoryModel:
        """Return the bytes of a class of ranks, by its passes as measured if they were."""
        measured = self._measured_ranks.get(rank_state.place)
        return MemoryModel(rank_state) if measured is None else MeasuredMemory(rank_state, measured)

    def copy_seconds(self, num_bytes: float, host_bandwidth: float | None = None) -> float:
        """Return the seconds of a copy between chip and host.

        `host_bandwidth` is what the copy has of the host's memory; by default a chip's fair share.
        """
        host, node = self._pool.node.host, self._pool.node
        fair = host.memory_bandwidth * node.hosts / node.num_chips
        rate = fair if host_bandwidth is None else host_bandwidth
        return host.device_latency_s + num_bytes / min(host.device_bandwidth, rate)


def _number(value: object) -> float:
    return float(np.asarray(value, dtype=np.float64))
