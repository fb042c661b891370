"""Prices of one engine of a Plan: its stages, what travels between them, its scheduler's settings.

A step passes the stages one after the other; several steps may be under way, one per lane. A lane
has its own scheduler, slots and pages: no step waits for another's tokens.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from tutti.batching.prices import StepSize
from tutti.batching.settings import Settings
from tutti.cost.measured.chip import MeasuredChip
from tutti.cost.serving.pages import stage_tokens
from tutti.cost.serving.stage_prices import STREAM_BYTES, Formats, StagePrices, stage_prices
from tutti.cost.serving.step_load import StepLoad, Windows, windows_of
from tutti.cost.serving.transfers import TransferWire, wire_between
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.hardware.local import is_cpu
from tutti.models.cached import cached_bytes
from tutti.models.spec import ModelSpec
from tutti.plan.plan import Pipeline, Plan
from tutti.plan.serving import Engine, Role
from tutti.units import bytes_text

MeasuredPools = Mapping[str, MeasuredChip]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EnginePrices:
    """What a step of one engine takes, stage by stage."""

    model: ModelSpec
    engine: Engine
    stages: tuple[StagePrices, ...]
    wires: tuple[TransferWire, ...]  # between neighbouring stages
    lanes: int
    slots: int  # of one engine, all lanes
    longest: int  # tokens of a sequence
    num_chips: int  # of one engine
    # stages that stand for all of their kind, and for every stage the place of its own among them
    distinct: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def windows(self) -> Windows:
        """The model's windows, in the order of a load's keys."""
        return windows_of(self.model)

    @property
    def launches_ahead(self) -> bool:
        """Whether a step is given to the chip before the one before it has ended."""
        return self.lanes == 1 and not is_cpu(self.stages[0].pool.chip)

    @property
    def imports(self) -> bool:
        """Whether prompts' keys and values come from elsewhere."""
        return self.engine.role is Role.DECODE

    def stage_seconds(self, load: StepLoad) -> tuple[float, ...]:
        """Return the seconds of a step on each stage; the host's part is the first one's."""
        each = [self.part_seconds(number, load) for number in self.distinct[0]]
        first, *others = (each[place] for place in self.distinct[1])
        return (first + self.host_s, *others)

    @property
    def host_s(self) -> float:
        """Seconds of the host between two steps, where no other lane's step hides them."""
        own = self.stages[0].own
        host = own.step_s if len(self.stages) == 1 else own.staged_step_s
        return host if self.lanes == 1 else 0.0

    def part_seconds(self, stage: int, load: StepLoad) -> float:
        """Return the seconds of a step on one stage, without the host's part."""
        own = self.stages[stage]
        return own.seconds(load) + own.move_seconds(load, self.engine.page_size)

    def wire_seconds(self, load: StepLoad) -> tuple[float, ...]:
        """Return how long a step's stream takes between neighbouring stages."""
        moved = load.tokens * self.model.hidden * STREAM_BYTES
        return tuple(wire.seconds(moved) for wire in self.wires)

    def step_seconds(self, load: StepLoad) -> float:
        """Return the seconds of a step from its first stage to its tokens."""
        return sum(self.stage_seconds(load)) + sum(self.wire_seconds(load))

    def settings(self, *, prefix: bool = False, target_s: float | None = None) -> Settings:
        """Return the settings of one lane's scheduler."""
        chunk = self.engine.chunk
        if self.imports:  # a prompt that came over a link takes no step's room
            chunk = max(chunk, self.longest + self.slots)
        windows = windows_of(self.model)
        return Settings(
            slots=max(1, self.slots // self.lanes),
            pages=self.engine.pages // self.lanes + 1,
            page_size=self.engine.page_size,
            host_pages=self.engine.host_pages // self.lanes,
            max_length=self.longest,
            most_tokens=chunk,
            window=None if windows[0] is None else max(w or 0 for w in windows),
            prefix=prefix,
            target_s=target_s,
        )

    def prices(self) -> ScheduledPrices:
        """Return what the engine's own scheduler asks."""
        return ScheduledPrices(self)

    @property
    def basis(self) -> str:
        """What the prices rest on."""
        return "; ".join(dict.fromkeys(f"{s.pool.name}: {s.basis}" for s in self.stages))


class ScheduledPrices:
    """Seconds of a step as the scheduler knows it; windows are not, so all layers see all keys."""

    def __init__(self, engine: EnginePrices) -> None:
        self._engine = engine
        self._count = len(engine.windows)

    def seconds(self, size: StepSize) -> float:
        """Return the time of a step."""
        keys, pairs = (float(size.keys),) * self._count, (float(size.pairs),) * self._count
        moved = size.stows, size.fetches
        load = StepLoad(size.tokens, size.decodes, size.decodes, keys, pairs, *moved)
        return self._engine.step_seconds(load)


def engine_prices(
    model: ModelSpec,
    cluster: Cluster,
    pipeline: Pipeline,
    longest: int,
    measured: MeasuredPools | None = None,
) -> EnginePrices:
    """Return the prices of one engine of a Plan's pipeline."""
    engine = pipeline.engine
    if engine is None:
        raise InputError("plan: a pipeline without 'engine' does not serve; plan with --serve")
    formats = Formats(weights=engine.weights, cache=engine.cache)
    known = measured or {}
    stages = tuple(
        stage_prices(
            model,
            stage.units[0],
            cluster,
            (pool := stage.replicas[0].chips.pools[0]),
            stage.replicas[0].tp,
            formats,
            known.get(pool),
        )
        for stage in pipeline.stages
    )
    _require_room(model, pipeline, stages, formats)
    wires = []
    for before, after in itertools.pairwise(pipeline.stages):
        ends = (before.replicas[0], after.replicas[0])
        chips = (ends[0].chips.at(0), ends[1].chips.at(0))
        wires.append(wire_between(cluster, *chips))
    return EnginePrices(
        model=model,
        engine=engine,
        stages=stages,
        wires=tuple(wires),
        lanes=pipeline.micro_batches,
        slots=pipeline.slots,
        longest=longest,
        num_chips=sum(stage.num_chips for stage in pipeline.stages) // pipeline.copies,
        distinct=_distinct(stages),
    )


def _distinct(stages: tuple[StagePrices, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    firsts: dict[object, int] = {}
    for number, stage in enumerate(stages):
        firsts.setdefault(stage.kind, number)
    order = {kind: place for place, kind in enumerate(firsts)}
    return tuple(firsts.values()), tuple(order[stage.kind] for stage in stages)


def _require_room(
    model: ModelSpec, pipeline: Pipeline, stages: tuple[StagePrices, ...], formats: Formats
) -> None:
    engine = pipeline.engine
    assert engine is not None
    for number, stage in enumerate(stages):
        room = stage_tokens(model, stage.units, stage.pool.chip, stage.tp, formats)
        wanted = engine.pages * engine.page_size
        if room * (1.0 + 1e-9) < wanted:
            raise InputError(
                f"plan: stage {number} on {stage.pool.name} has room for {max(0, int(room)):,} "
                f"tokens beside its weights; its {engine.pages:,} pages of {engine.page_size} are "
                f"{wanted:,}: give fewer pages, units or a larger tp"
            )


def require_room_on_hosts(plan: Plan, model: ModelSpec, cluster: Cluster) -> None:
    """Refuse a plan whose engines keep more in pages on a host than its memory holds."""
    kept: dict[tuple[str, int], float] = defaultdict(float)
    for pipeline in plan.pipelines:
        engine = pipeline.engine
        if engine is None or not engine.host_pages:
            continue
        stored = Formats(weights=engine.weights, cache=engine.cache).cache_bytes
        for replica, units in ((r, s.units[0]) for s in pipeline.stages for r in s.replicas):
            token = cached_bytes(
                model, range(*units), tp=replica.tp, stored=stored, stream=STREAM_BYTES
            )
            for chip in replica.chips:
                kept[chip.pool, chip.node] += engine.host_pages * engine.page_size * token
    for (pool, node), wanted in kept.items():
        memory = cluster.pool(pool).node.host.memory_bytes
        if wanted > memory:
            raise InputError(
                f"plan: the engines on node {pool}/{node} keep {bytes_text(wanted)} in pages on "
                f"their host, which has {bytes_text(memory)}: give fewer host_pages"
            )


@functools.lru_cache(maxsize=256)
def request_bytes(model: ModelSpec, formats: Formats) -> float:
    """Return the bytes of keys and values of one token, all layers, not sliced."""
    return cached_bytes(
        model, range(model.num_units), stored=formats.cache_bytes, stream=STREAM_BYTES
    )


def import_wire(cluster: Cluster, prefill: Pipeline, decode: Pipeline) -> TransferWire:
    """Return the way of keys and values between two engines.

    Layers leave as soon as they are computed; each chip of the narrower side sends its own.
    """
    chips = [sum(s.num_chips for s in p.stages) // p.copies for p in (prefill, decode)]
    ends = (prefill.stages[0].chips.at(0), decode.stages[0].chips.at(0))
    return wire_between(cluster, *ends, lanes=min(chips))
