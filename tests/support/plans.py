"""Random valid plans over small models and clusters, for property tests.

Everything that a Plan can say is drawn: several pipelines that cut the model differently, stages
whose replicas differ in pool, degree and share, every schedule kind, shard levels with ragged
shares, recompute, offload, expert groups, tied weights.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Literal

from hypothesis import strategies as st

from tutti.document import Place
from tutti.hardware.cluster import Cluster
from tutti.hardware.topology import Position
from tutti.models.parameters import ParameterClass
from tutti.models.parts import (
    AttentionSpec,
    BlockSpec,
    EmbeddingSpec,
    HeadSpec,
    MlpSpec,
    MoeSpec,
    NormSpec,
    QkNormSpec,
    RotarySpec,
    RouterSpec,
)
from tutti.models.spec import ModelSpec, cycle_of
from tutti.plan.check_stage import precision_refusal
from tutti.plan.chips import ChipSet
from tutti.plan.expert_meetings import missed_meeting
from tutti.plan.files import refer_to_cluster, refer_to_model
from tutti.plan.job import PRECISIONS, Job, ScheduleKind
from tutti.plan.plan import (
    CollectiveChoice,
    ContextKind,
    ExpertGroup,
    Offload,
    Order,
    Pipeline,
    Plan,
    Recompute,
    Replica,
    Share,
    Stage,
    Synchronisation,
    covers,
)
from tutti.plan.schedules import StagePlace, schedule_record

EXPERTS = 8
NODES = {"fast": ("HGX-A800", 8), "slow": ("OAM-8xP800", 8), "wide": ("Atlas-16x910B", 16)}
SEQUENCE_LENGTH = 64


def small_model(
    layers: int = 4,
    *,
    experts_in: tuple[int, ...] = (),
    tied: bool = False,
    heads: int = 8,
    kv_heads: int | None = None,
    head_norm: Literal["head", "heads", "all"] | None = None,
    biases: bool = False,
    balance_loss: float = 0.0,
    padding: int | None = None,
) -> ModelSpec:
    """Return a tiny decoder; `experts_in` lists the layers (from 0) with experts."""
    norm = NormSpec(eps=1e-5)
    attention = AttentionSpec(
        heads=heads,
        kv_heads=kv_heads or heads // 2,
        head_dim=8,
        qkv_bias=biases,
        output_bias=biases,
        # without positions a key's bias changes no score: its gradient is rounding alone
        rotary=RotarySpec(theta=10_000.0, dim=8) if biases else None,
        qk_norm=None if head_norm is None else QkNormSpec(norm=norm, span=head_norm),
    )
    dense = BlockSpec(attention=attention, norm=norm, mlp=MlpSpec(hidden=128))
    sparse = BlockSpec(
        attention=attention,
        norm=norm,
        moe=MoeSpec(
            experts=EXPERTS,
            experts_per_token=2,
            hidden=32,
            bias=biases,
            router=RouterSpec(balance_loss=balance_loss, balance_loss_on=balance_loss > 0),
        ),
    )
    kinds = [1 if layer in experts_in else 0 for layer in range(layers)]
    return ModelSpec(
        name="small",
        model_type="llama",
        num_layers=layers,
        hidden=64,
        vocab=256,
        max_length=SEQUENCE_LENGTH,
        embedding=EmbeddingSpec(dim=64, padding=padding),
        blocks=(dense, sparse),
        cycle=cycle_of(kinds),
        head=HeadSpec(norm=norm, tied=tied),
    )


@dataclass
class Allocator:
    """Hands out chips of growing pools."""

    used: dict[str, int] = field(default_factory=lambda: dict.fromkeys(NODES, 0))

    def take(self, pool: str, count: int) -> ChipSet:
        width = NODES[pool][1]
        first = self.used[pool]
        self.used[pool] += count
        ids = (Position(pool, i // width, i % width) for i in range(first, first + count))
        return ChipSet.from_ids(ids)

    def cluster(self) -> Cluster:
        pools = [
            {"name": pool, "node": node, "nodes": -(-self.used[pool] // width) + 1}
            for pool, (node, width) in NODES.items()
        ]
        return Cluster.from_document({"name": "drawn", "pools": pools}, Place("drawn"))


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    layers = draw(st.integers(1, 9))
    experts_in = draw(st.sets(st.integers(0, layers - 1))) if draw(st.booleans()) else set()
    return small_model(
        layers,
        experts_in=tuple(experts_in),
        tied=draw(st.booleans()),
        kv_heads=draw(st.sampled_from([1, 2, 4, 8])),
        head_norm=draw(st.sampled_from([None, "head", "heads", "all"])),
        biases=draw(st.booleans()),
        balance_loss=draw(st.sampled_from([0.0, 0.1])),
        padding=draw(st.sampled_from([None, 0, 200])),
    )


@st.composite
def cuts(draw: st.DrawFn, num_units: int, parts: int) -> list[tuple[int, int]]:
    inner = draw(st.sets(st.integers(1, num_units - 1), min_size=parts - 1, max_size=parts - 1))
    bounds = [0, *sorted(inner), num_units]
    return list(itertools.pairwise(bounds))


@st.composite
def sub_ranges(draw: st.DrawFn, units: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    chosen: list[tuple[int, int]] = []
    for start, stop in units:
        if draw(st.integers(0, 2)) == 0:
            low = draw(st.integers(start, stop - 1))
            chosen.append((low, draw(st.integers(low + 1, stop))))
    return tuple(chosen)


@st.composite
def recomputes(draw: st.DrawFn, units: tuple[tuple[int, int], ...]) -> Recompute:
    full = draw(sub_ranges(units))
    rest = tuple(
        span
        for span in draw(sub_ranges(units))
        if not any(a < span[1] and span[0] < b for a, b in full)
    )
    return Recompute(full=full, selective=rest)


@st.composite
def offloads(draw: st.DrawFn, units: tuple[tuple[int, int], ...]) -> Offload:
    if draw(st.integers(0, 2)):
        return Offload()
    inner = tuple((a + 1, b) for a, b in units if b - a > 2)  # never an end: it may be tied
    inner = tuple((a, b - 1) for a, b in inner)
    return Offload(
        optimizer=draw(sub_ranges(units)),
        parameters=draw(sub_ranges(inner)),
        gradients=draw(sub_ranges(inner)),
        activations=draw(sub_ranges(units)),
    )


@st.composite
def share_groups(draw: st.DrawFn, micro_batch: int) -> list[tuple[int, int]]:
    """Split a micro-batch into groups of (count, sequences each)."""
    groups: list[tuple[int, int]] = []
    left = micro_batch
    while left:
        part = left if len(groups) == 2 else draw(st.integers(1, left))
        divisors = [d for d in range(1, part + 1) if part % d == 0]
        count = draw(st.sampled_from(divisors))
        groups.append((count, part // count))
        left -= part
    return groups


@st.composite
def replicas(
    draw: st.DrawFn, units: tuple[tuple[int, int], ...], micro_batch: int, chips: Allocator
) -> tuple[Replica, ...]:
    found = []
    for count, sequences in draw(share_groups(micro_batch)):
        tp, cp = draw(st.sampled_from([1, 1, 2, 4])), draw(st.sampled_from([1, 1, 2]))
        found.append(
            Replica(
                chips=chips.take(draw(st.sampled_from(sorted(NODES))), count * tp * cp),
                count=count,
                tp=tp,
                cp=cp,
                context_kind=draw(st.sampled_from(ContextKind)),
                sequence_parallel=tp > 1 and draw(st.booleans()),
                tp_overlap_chunks=draw(st.sampled_from([1, 2, 3, 4])) if tp > 1 else 1,
                sequences=sequences,
                recompute=draw(recomputes(units)),
                offload=draw(offloads(units)),
            )
        )
    return tuple(found)


@st.composite
def expert_groups(
    draw: st.DrawFn,
    units: tuple[tuple[int, int], ...],
    held: tuple[Replica, ...],
    model: ModelSpec,
) -> tuple[ExpertGroup, ...]:
    blocks = range(1, model.num_layers + 1)
    # All pipelines spread experts or none: decided by the model, so that they agree.
    spread = model.num_layers % 2 == 0
    if not spread or not any(covers(units, u) and model.block(u).moe for u in blocks):
        return ()
    num_chips = sum(replica.num_chips for replica in held)
    holders = [(replica.num_chips, replica.recompute.full) for replica in held]
    sizes = [
        size
        for size in range(1, num_chips + 1)
        if num_chips % size == 0
        and not missed_meeting(holders, (ExpertGroup(chips=size, count=num_chips),), units, model)
    ]
    size = draw(st.sampled_from(sizes))
    experts: tuple[int, ...] = ()
    if EXPERTS % size or draw(st.booleans()):
        marks = sorted(
            draw(st.lists(st.integers(0, EXPERTS), min_size=size - 1, max_size=size - 1))
        )
        bounds = [0, *marks, EXPERTS]
        experts = tuple(b - a for a, b in itertools.pairwise(bounds))
    return (ExpertGroup(chips=size, count=num_chips // size, experts=experts),)


@st.composite
def orders(draw: st.DrawFn, kind: ScheduleKind, most: int) -> Order:
    times = st.sampled_from([0.5, 1.0, 1.5, 3.0])
    given = schedule_record(kind).sets_warm_up and draw(st.booleans())
    return Order(
        warm_up=draw(st.integers(1, most)) if given else None,
        forward=draw(times),
        backward_input=draw(times),
        backward_weight=draw(times),
    )


@st.composite
def pipelines(draw: st.DrawFn, model: ModelSpec, kind: ScheduleKind, chips: Allocator) -> Pipeline:
    record = schedule_record(kind)
    rounds = draw(st.integers(1, 3)) if record.several_ranges else 1
    most = min(4, model.num_units // rounds)
    num_stages = draw(st.integers(1, most))
    spans = draw(cuts(model.num_units, num_stages * rounds))
    micro_batch, micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    stages = []
    depth = micro_batches
    for s in range(num_stages):
        units = tuple(spans[s::num_stages])
        held = draw(replicas(units, micro_batch, chips))
        order = draw(orders(kind, depth))
        if record.sets_warm_up and not record.delays_weights:  # must not grow along the pipeline
            default = record.passes_ahead(StagePlace(num_stages, s, micro_batches))
            if order.warm_up is None and default > depth:
                order = Order(warm_up=depth)
            depth = min(order.warm_up or default, depth)
        experts = draw(expert_groups(units, held, model))
        stages.append(Stage(units=units, replicas=held, experts=experts, order=order))
    return Pipeline(micro_batch=micro_batch, micro_batches=micro_batches, stages=tuple(stages))


@st.composite
def rules(
    draw: st.DrawFn, lines: tuple[Pipeline, ...], num_units: int
) -> tuple[Synchronisation, ...]:
    found = []
    for kind in ParameterClass:
        for units in draw(cuts(num_units, draw(st.integers(1, 3)))):
            level = draw(st.integers(0, 3))
            if draw(st.integers(0, 3)) == 0:
                continue
            on_host = any(
                a < units[1] and units[0] < b
                for line in lines
                for stage in line.stages
                for replica in stage.replicas
                for a, b in replica.offload.parameters
            )
            if on_host and level in (1, 2):
                level = 3
            shares: tuple[Share, ...] = ()
            if level and kind is ParameterClass.DENSE and draw(st.booleans()):
                shares = tuple(
                    Share(pipeline=p, stage=s, replica=r, weight=draw(st.integers(1, 3)))
                    for p, pipeline in enumerate(lines)
                    for s, stage in enumerate(pipeline.stages)
                    if any(a < units[1] and units[0] < b for a, b in stage.units)
                    for r in range(len(stage.replicas))
                )
            found.append(
                Synchronisation(
                    units=units,
                    parameter_class=kind,
                    shard_level=level,
                    bucket=draw(st.integers(1, 3)),
                    overlap=draw(st.booleans()),
                    shares=shares,
                )
            )
    return tuple(found)


@st.composite
def plans(draw: st.DrawFn, schedule: ScheduleKind | None = None) -> Plan:
    """Return a valid plan."""
    model = draw(models())
    kind = schedule or draw(st.sampled_from(ScheduleKind))
    chips = Allocator()
    lines: list[Pipeline] = []
    for _ in range(draw(st.integers(1, 3))):
        line = draw(pipelines(model, kind, chips))
        cut = (tuple(stage.units for stage in line.stages), line.micro_batches)
        if all(
            cut != (tuple(stage.units for stage in other.stages), other.micro_batches)
            for other in lines
        ):
            lines.append(line)
    idle = chips.take("fast", draw(st.integers(0, 3)))
    cluster = chips.cluster()
    on_host = any(
        replica.offload.parameters
        for line in lines
        for stage in line.stages
        for replica in stage.replicas
    )
    precisions = [
        precision
        for precision in PRECISIONS.values()
        if (precision.master or not on_host)
        and not any(precision_refusal(pool.chip, precision) for pool in cluster.pools)
    ]
    job = Job(
        sequence_length=SEQUENCE_LENGTH,
        global_batch=sum(line.sequences for line in lines),
        precision=draw(st.sampled_from(precisions)),
        schedule=kind,
    )
    choices = st.sampled_from(
        [
            (),
            (CollectiveChoice(use="gradients", operation="all_reduce", algorithm="ring"),),
        ]
    )
    return Plan(
        model=refer_to_model(model),
        cluster=refer_to_cluster(cluster),
        job=job,
        pipelines=tuple(lines),
        synchronisation=draw(rules(tuple(lines), model.num_units)),
        tied_owner=draw(st.sampled_from([0, model.head_unit])) if model.head.tied else None,
        collectives=draw(choices),
        idle=idle,
    )
