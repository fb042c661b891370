"""The comparison formula: the step time that planners are compared by on measured layers.

Metis' and Sailor's plans for OPT-350M are scored by one closed formula over the published layer
profiles (`data/README.md` beside them); here it scores a Plan, so that ours stand in the same
table. With t_s the slowest replica's compute of a stage, B the micro-batches of a step:

    step = (B−1)·max t_s + Σ t_s + max optimizer_s·units_s/units
         + max 2(n_s−1)/n_s · parameter bytes_s ÷ bandwidth_s
         + Σ boundaries 2·(largest b beside it)·sequence·hidden·2 bytes ÷ bandwidth between nodes

It knows one pipeline, tensor parallelism and unequal shares. What it cannot express (several
pipelines, recomputation, sharding, …) is refused: such a plan has no score, not a flattering one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tutti.cost.measured.layer_profiles import MEGABYTE, LayerFigures, LayerProfiles
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.models.spec import ModelSpec
from tutti.plan.check import embedded_cluster, embedded_model
from tutti.plan.plan import Pipeline, Plan, Replica, Stage
from tutti.plan.schedules import schedule_record

_ACTIVATION_BYTES = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The machines that the formula assumes."""

    node_chips: int = 8
    inside_bandwidth: float = 46e9  # bytes/s
    between_bandwidth: float = 10e9
    memory_mb: Mapping[str, float] = field(
        default_factory=lambda: {"A100": 40_000.0, "V100": 16_000.0}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Milliseconds of a step, and what they are the sum of."""

    pipeline_ms: float  # (B−1)·max t + Σ t
    optimizer_ms: float
    synchronisation_ms: float
    boundary_ms: float
    too_much: tuple[str, ...] = ()  # stages whose memory does not suffice

    @property
    def step_ms(self) -> float:
        """The whole step."""
        return self.pipeline_ms + self.optimizer_ms + self.synchronisation_ms + self.boundary_ms

    @property
    def fits(self) -> bool:
        """Whether every replica holds its units."""
        return not self.too_much


def score(
    plan: Plan,
    profiles: LayerProfiles,
    model: ModelSpec | None = None,
    cluster: Cluster | None = None,
    setting: Setting | None = None,
) -> Score:
    """Score a plan; an InputError says what the formula cannot express or nobody measured."""
    model, cluster = model or embedded_model(plan), cluster or embedded_cluster(plan)
    pipeline = _single_pipeline(plan)
    if profiles.num_units != model.num_units:
        raise InputError(
            f"comparison formula: {profiles.folder} has {profiles.num_units} layers, but "
            f"{model.name} has {model.num_units} units"
        )
    scorer = _Scorer(profiles, cluster, setting or Setting())
    stages = [scorer.stage(index, stage) for index, stage in enumerate(pipeline.stages)]
    times = [scored.compute_ms for scored in stages]
    token_bytes = plan.job.sequence_length * model.hidden * _ACTIVATION_BYTES
    return Score(
        pipeline_ms=(pipeline.micro_batches - 1) * max(times) + sum(times),
        optimizer_ms=max(scored.optimizer_ms for scored in stages),
        synchronisation_ms=max(scored.synchronisation_ms for scored in stages),
        boundary_ms=sum(
            2.0 * widest * token_bytes / scorer.setting.between_bandwidth * 1e3
            for widest in _boundaries(pipeline)
        ),
        too_much=tuple(said for scored in stages for said in scored.too_much),
    )


def _single_pipeline(plan: Plan) -> Pipeline:
    """Return the plan's pipeline; refuse what the formula has no term for."""

    def refuse(what: str) -> InputError:
        return InputError(f"comparison formula: {what}; it has no term for that")

    if len(plan.pipelines) != 1:
        raise refuse(f"the plan has {len(plan.pipelines)} pipelines")
    record = schedule_record(plan.job.schedule)
    if record.several_ranges or record.delays_weights:
        raise refuse(f"the schedule is {plan.job.schedule.value}")
    if any(rule.shard_level for rule in plan.synchronisation):
        raise refuse("training state is sharded")
    (pipeline,) = plan.pipelines
    for index, stage in enumerate(pipeline.stages):
        if len(stage.units) != 1:
            raise refuse(f"stage {index} has several ranges of units")
        for replica in stage.replicas:
            if replica.cp > 1:
                raise refuse(f"stage {index} has context parallelism")
            if replica.recompute.full or replica.recompute.selective:
                raise refuse(f"stage {index} recomputes")
            if replica.offload != type(replica.offload)():
                raise refuse(f"stage {index} offloads")
    return pipeline


def _boundaries(pipeline: Pipeline) -> Iterator[int]:
    """Yield the largest share of a micro-batch beside each boundary."""
    for before, after in zip(pipeline.stages, pipeline.stages[1:], strict=False):
        yield max(replica.sequences for replica in (*before.replicas, *after.replicas))


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageScore:
    compute_ms: float
    optimizer_ms: float
    synchronisation_ms: float
    too_much: tuple[str, ...]


class _Scorer:
    """Looks measured figures up and adds those of a stage."""

    def __init__(self, profiles: LayerProfiles, cluster: Cluster, setting: Setting) -> None:
        self.profiles = profiles
        self.cluster = cluster
        self.setting = setting

    def stage(self, index: int, stage: Stage) -> _StageScore:
        start, stop = stage.units[0]
        of_replicas = [(self._chip(replica), self._figures(replica)) for replica in stage.replicas]
        copies, chips = stage.num_replicas, stage.num_chips
        setting = self.setting
        fast = chips <= setting.node_chips
        bandwidth = setting.inside_bandwidth if fast else setting.between_bandwidth
        ring = 2.0 * (copies - 1) / copies
        too_much = []
        for chip, figures in of_replicas:
            needed = float(figures.memory_bytes[start:stop].sum()) / MEGABYTE
            limit = setting.memory_mb[chip]
            if needed > limit:
                too_much.append(f"stage {index} on {chip}: {needed:,.0f} MB of {limit:,.0f}")
        return _StageScore(
            compute_ms=max(1e3 * float(f.seconds[start:stop].sum()) for _, f in of_replicas),
            optimizer_ms=max(
                1e3 * f.optimizer_s * (stop - start) / self.profiles.num_units
                for _, f in of_replicas
            ),
            synchronisation_ms=max(
                1e3 * ring * float(f.parameter_bytes[start:stop].sum()) / bandwidth
                for _, f in of_replicas
            ),
            too_much=tuple(too_much),
        )

    def _chip(self, replica: Replica) -> str:
        chip = self.cluster.pool(replica.chips.pools[0]).chip
        name = self.profiles.name_of(chip)
        if name is None or name not in self.setting.memory_mb:
            measured = ", ".join(self.setting.memory_mb)
            raise InputError(f"comparison formula: {chip.name} is none of its chips ({measured})")
        return name

    def _figures(self, replica: Replica) -> LayerFigures:
        """Return the figures of exactly this (chip, tp, sequences); nothing is interpolated."""
        chip = self._chip(replica)
        key = (chip, replica.tp, replica.sequences)
        if key not in self.profiles.figures:
            raise InputError(
                f"comparison formula: {chip} was not measured with tp {replica.tp} and "
                f"{replica.sequences} sequences; only measured pairs may be used"
            )
        return self.profiles.figures[key]
