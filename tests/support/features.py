"""What a plan makes use of, as words: so that a set of plans can be asked what it leaves out."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from hypothesis import HealthCheck, Phase, given, settings

from tests.support.plans import plans
from tutti.errors import InputError
from tutti.models.parameters import ParameterClass
from tutti.models.spec import ModelSpec
from tutti.ownership.buckets import make_buckets, tied_apart
from tutti.plan.job import ScheduleKind
from tutti.plan.plan import ContextKind, Pipeline, Plan, Replica, Stage
from tutti.ranks.rank_places import Seats
from tutti.train.sync.groups import require_meetings

PARALLEL = {"tensor", "sequence", "context", "pipeline", "data", "experts", "several pipelines"}
OVERLAP = {"tensor in pieces", "sequence in pieces"}
SCHEDULES = {f"schedule {kind}" for kind in ScheduleKind}
SHARES = {"equal shares", "unequal shares", "ragged shards", "unequal experts"}
RECOMPUTE = {"recompute none", "recompute selective", "recompute full", "recompute hybrid"}
OFFLOAD = {f"offload {what}" for what in ("optimizer", "parameters", "gradients", "activations")}
LEVELS = {f"{kind} level {level}" for kind in ParameterClass for level in range(4)}
MODELS = {"dense model", "experts model", "tied apart", "tied together"}
CONTEXT_KINDS = {f"context {kind}" for kind in ContextKind}
# how tensor parallelism is run × how many copies there are × what its ranks then hold alike
ALIKE = {
    f"{how}, {copies}, {what}"
    for how in ("plain tensor", "sequence")
    for copies in ("one copy", "copies")
    for what in ("few kv heads", "norms of heads", "sliced experts with biases", "nothing more")
}
UNLIKE = {"unlike chips", "unlike widths", "unlike cuts"}
EVERYTHING = frozenset().union(
    PARALLEL,
    OVERLAP,
    SCHEDULES,
    SHARES,
    RECOMPUTE,
    OFFLOAD,
    LEVELS,
    MODELS,
    CONTEXT_KINDS,
    UNLIKE,
    ALIKE,
)


def features(plan: Plan) -> set[str]:
    """Return the words that are true of a plan."""
    return set(_features(plan))


def _features(plan: Plan) -> Iterator[str]:
    spec = plan.model.spec
    assert spec is not None
    yield f"schedule {plan.job.schedule}"
    layers = range(1, spec.num_layers + 1)
    yield "experts model" if any(spec.block(u).moe for u in layers) else "dense model"
    if spec.ties_weights:
        yield "tied apart" if tied_apart(plan) else "tied together"
    if len(plan.pipelines) > 1:
        yield "several pipelines"
        cuts = {tuple(stage.units for stage in line.stages) for line in plan.pipelines}
        if len(cuts) > 1:
            yield "unlike cuts"
    for line in plan.pipelines:
        yield from _line_features(line)
    yield from _alike(plan, spec)
    for bucket in make_buckets(plan):
        for kind, rule in bucket.rules():
            yield f"{kind} level {rule.shard_level}"
            if len({share.weight for share in rule.shares}) > 1:
                yield "ragged shards"


def _alike(plan: Plan, spec: ModelSpec) -> Iterator[str]:
    """Yield what tensor-parallel ranks of a block hold alike, by how they are run."""
    for unit in range(1, spec.num_layers + 1):
        block = spec.block(unit)
        stages = [stage for _, _, stage in plan.holders(unit)]
        replicas = [replica for stage in stages for replica in stage.replicas]
        copies = "copies" if sum(r.count * r.cp for r in replicas) > 1 else "one copy"
        for replica in replicas:
            if replica.tp == 1:
                continue
            attention = block.attention
            norm = attention.qk_norm
            true = {
                "few kv heads": attention.kv_heads < replica.tp,
                "norms of heads": norm is not None and norm.span == "head",
                "sliced experts with biases": block.moe is not None
                and block.moe.bias
                and not any(stage.experts for stage in stages),
            }
            how = "sequence" if replica.sequence_parallel else "plain tensor"
            for what in [word for word, is_so in true.items() if is_so] or ["nothing more"]:
                yield f"{how}, {copies}, {what}"


def _line_features(line: Pipeline) -> Iterator[str]:
    if len(line.stages) > 1:
        yield "pipeline"
    if len({(stage.num_chips, stage.replicas[0].tp) for stage in line.stages}) > 1:
        yield "unlike widths"
    for stage in line.stages:
        yield from _stage_features(stage)
        for replica in stage.replicas:
            yield from _replica_features(replica)


def _stage_features(stage: Stage) -> Iterator[str]:
    if sum(replica.count for replica in stage.replicas) > 1:
        yield "data"
        unequal = len({replica.sequences for replica in stage.replicas}) > 1
        yield "unequal shares" if unequal else "equal shares"
    if len(set(stage.chips.pools)) > 1:
        yield "unlike chips"
    for group in stage.experts:
        if group.chips > 1:
            yield "experts"
            if len(set(group.experts)) > 1:
                yield "unequal experts"


def _replica_features(replica: Replica) -> Iterator[str]:
    if replica.tp > 1:
        yield "tensor"
    if replica.sequence_parallel and replica.tp > 1:
        yield "sequence"
    if replica.tp_overlap_chunks > 1:
        yield "sequence in pieces" if replica.sequence_parallel else "tensor in pieces"
    if replica.cp > 1:
        yield "context"
        yield f"context {replica.context_kind}"
    again = replica.recompute
    if again.full and again.selective:
        yield "recompute hybrid"
    if again.full:
        yield "recompute full"
    if again.selective:
        yield "recompute selective"
    if not again.full and not again.selective:
        yield "recompute none"
    for what in ("optimizer", "parameters", "gradients", "activations"):
        if getattr(replica.offload, what):
            yield f"offload {what}"


def _runs(plan: Plan) -> bool:
    """Tell whether the engine takes the plan: not where an expert group recomputes by halves."""
    assert plan.model.spec is not None
    seats = Seats(plan, plan.model.spec)
    try:
        for rank in range(plan.num_ranks):
            require_meetings(seats, rank)
    except InputError:
        return False
    return True


class _EnoughError(Exception):
    """Ends the drawing."""


@functools.cache
def drawn_plans(count: int, most_ranks: int, *, examples: int | None = None) -> tuple[Plan, ...]:
    """Return so many different plans of two ranks or more, the same each time.

    Should something be left out by them, further ones that make use of it follow; what is rare
    takes hundreds of `examples`, of which thirty take a second.
    """
    found: dict[str, Plan] = {}
    missing = set(EVERYTHING)

    @settings(
        max_examples=examples or 40 * count,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(plans())
    def draw(plan: Plan) -> None:
        fits = 2 <= plan.num_ranks <= most_ranks and plan.job.global_batch <= 24 and _runs(plan)
        if fits and (len(found) < count or missing & features(plan)):
            found.setdefault(repr(plan), plan)
            missing.difference_update(features(plan))
        if len(found) >= count and not missing:
            raise _EnoughError

    with contextlib.suppress(_EnoughError):
        draw()
    return tuple(found.values())
