"""The plan of a job: the one it names, or the planner's answer. Needs no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tutti import files
from tutti.cost.measured.pools import profile_of
from tutti.cost.plan.sources import Sources
from tutti.document import Place, build, plain
from tutti.errors import InputError, StoppedError, hint
from tutti.hardware.chip import Dtype
from tutti.hardware.cluster import Cluster
from tutti.hardware.local import has_bf16, is_cpu, local_cluster
from tutti.hardware.profile import Profile, profiles_here
from tutti.huggingface.peft.layers import fused_layers
from tutti.models.distillation import teacher_model
from tutti.models.load import load_model
from tutti.models.spec import ModelSpec
from tutti.models.tuning import Tuning, matches
from tutti.observe.folder import PLAN_FILE, RUN_FILE
from tutti.ownership.buckets import tied_apart
from tutti.plan.check import require_valid
from tutti.plan.files import load_plan, refer_to_model, save_plan
from tutti.plan.plan import Plan
from tutti.ranks.local_capacity import DEVICE
from tutti.search.answer.result import ProvenPlan
from tutti.search.ask_from_values import Limits, make_problem
from tutti.search.planner import plan as search_plan
from tutti.search.planner import plan_uniform
from tutti.search.question.effort import Report, silent
from tutti.search.question.space import Problem
from tutti.simulate.estimate import Estimate, estimate, with_forward_before
from tutti.train.run.claim import make_folder
from tutti.train.run.config import AUTO, JobConfig, OptimizerConfig, TrainConfig

SCORE = "score.*"  # of a reward model's head, which an adapter's base does not have
STEPS_FILE = "steps.json"  # of a folder with the steps that ranks kept for `tutti align`


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job that is ready to start: everything a rank needs to know."""

    config: TrainConfig
    plan: Plan
    spec: ModelSpec
    cluster: Cluster

    def save(self) -> Path:
        """Write it into its folder; return the file that ranks are started with."""
        folder = self.config.folder
        make_folder(folder)
        save_plan(self.plan, folder / PLAN_FILE)
        written = plain(self.config.with_whole_profile_paths())
        text = json.dumps(written, indent=1, ensure_ascii=False)
        files.write_text(folder / RUN_FILE, text + "\n")
        return folder / RUN_FILE

    @classmethod
    def load(cls, path: Path) -> Job:
        """Read what `save` wrote."""
        config = build(TrainConfig, files.read_file(path), Place(path.name))
        return prepared(config, load_plan(path.parent / PLAN_FILE))

    def predicted(self) -> Estimate:
        """Return what the cost model says of the plan's steps."""
        sources, objective = sources_of(self.config.job), self.config.objective
        predicted = estimate(self.plan, self.spec, self.cluster, sources)
        if objective is None or not objective.has_baseline:
            return predicted
        return with_forward_before(predicted, self.spec, self.cluster, sources)

    def chip_profiles(self) -> dict[str, Profile]:
        """Return the measured Profile of each kind of chip that has one, by the chip's name.

        The job's own come first, then those that ship: whatever the plan does not record is chosen
        by them.
        """
        given = tuple(Profile.find(name) for name in self.config.job.chip_profiles)
        used = {name for _, _, stage in self.plan.stages() for name in stage.chips.pools}
        chips = [self.cluster.pool(name).chip for name in sorted(used)]
        shipped = profiles_here()
        profiles = {c.name: profile_of(given, c) or profile_of(shipped, c) for c in chips}
        return {name: profile for name, profile in profiles.items() if profile is not None}


def sources_of(job: JobConfig) -> Sources:
    """Return what prices rest on."""
    return Sources(profiles=tuple(Profile.find(name) for name in job.chip_profiles))


def prepare(config: TrainConfig, report: Report = silent) -> Job:
    """Return the job with its plan, searched where none is named."""
    if config.plan is not None:
        return prepared(config, load_plan(Path(config.plan)))
    spec = load_model(config.model)
    planned = trained(spec, config, plain=True)
    return prepared(config, _searched(config, planned, cluster_of(config), report), spec)


def cluster_of(config: TrainConfig) -> Cluster:
    """Return the cluster of a file or of the catalog; "here" is this machine."""
    if config.cluster == "here":
        return local_cluster(config.ranks)
    if config.ranks is not None:
        raise InputError(
            f"ranks: {config.ranks} of this machine are asked for, but the cluster is "
            f"'{config.cluster}'; leave one of the two out"
        )
    return Cluster.load(config.cluster)


def prepared(config: TrainConfig, plan: Plan, spec: ModelSpec | None = None) -> Job:
    """Return the job under a given plan, checked."""
    require_held_out(config)
    spec = trained(spec or load_model(config.model), config)
    cluster = plan.cluster.cluster or cluster_of(config)
    known = refer_to_model(spec)
    if spec.tuning is not None and plan.model.hash == spec.untuned.fingerprint:
        plan = replace(plan, model=known)  # of the whole model: less of it is trained
    if plan.model.hash and plan.model.hash != known.hash:
        raise InputError(
            f"the plan is for model '{plan.model.name}', but '{config.model}' has another shape; "
            "plan again, or train the planned model"
        )
    optimizer = config.optimizer
    if optimizer.name is not None and optimizer.name != plan.job.optimizer:
        plan = replace(plan, job=replace(plan.job, optimizer=optimizer.name))
    plan = _averaging(plan, spec, config)
    _require_named(optimizer, spec)
    if config.measure.noise_every and not plan.job.optimizer.startswith("adamw"):
        raise InputError(
            f"measure.noise_every: the gradient's noise is read from AdamW's moments, and "
            f"{plan.job.optimizer} keeps no such; leave it out"
        )
    require_valid(plan, spec, cluster)
    return Job(config=config, plan=plan, spec=spec, cluster=cluster)


def _averaging(plan: Plan, spec: ModelSpec, config: TrainConfig) -> Plan:
    """Return the plan with a mean of weights or without, as the job says."""
    wanted = config.average is not None
    if wanted and spec.tuning is not None and spec.tuning.adapter is not None:
        raise InputError("average: of adapters no mean is kept; leave it out, or train all weights")
    if wanted and config.validation.every and tied_apart(plan):
        raise InputError(
            "average: the tied table lies on two stages of this plan, and validation with the mean "
            "would need it on both; leave validation.every out, or plan with max_stages: 1"
        )
    return replace(plan, job=replace(plan.job, average=wanted))


def _require_named(optimizer: OptimizerConfig, spec: ModelSpec) -> None:
    """Refuse patterns of tensors that the model does not have."""
    names = [f"{u}.{p.name}" for u in range(spec.num_units) for p in spec.parameters(u)]
    for pattern in (pattern for own in optimizer.tensors for pattern in own.match):
        if not any(matches(name, (pattern,)) for name in names):
            known = sorted({name.partition(".")[2] for name in names})
            raise InputError(f"optimizer.tensors: '{pattern}' is no tensor; {hint(pattern, known)}")


def trained(spec: ModelSpec, config: TrainConfig, *, plain: bool = False) -> ModelSpec:
    """Return the model with what of it is trained as the job says, else as its own config does.

    A `plain` one is planned for: without what changes no price.
    """
    objective, tuning = config.objective, config.tuning
    if objective is not None and objective.gives_scores:
        model = spec.with_scores()
        if tuning is not None and tuning.adapter is not None and SCORE not in tuning.trained:
            tuning = replace(tuning, trained=(*tuning.trained, SCORE))  # it begins at random
    elif spec.head.scores:
        raise InputError(
            f"{config.model}: is a reward model and predicts no tokens; train it with objective: "
            "{kind: reward}, or name a model that does"
        )
    else:
        model = spec.with_training(answers=objective is not None)
    how = config.distillation
    if how is not None:
        teacher = teacher_model(how, model)
        model = replace(model, taught=True, teacher=None if how.stored else teacher)
    if plain:
        return tuned(model, tuning)
    balance = None if config.balance_loss == "config" else config.balance_loss == "on"
    model = model.with_training(
        balance=balance if objective is None else False,
        padding=config.padding_row == "trained",
        answers=model.answers,
    )
    return tuned(model, tuning)


def tuned(spec: ModelSpec, tuning: Tuning | None) -> ModelSpec:
    """Return the model with what is trained of it; layers that its folder fuses share a factor."""
    if tuning is not None and tuning.adapter is not None:
        adapter = replace(tuning.adapter, joined=fused_layers(spec))
        tuning = replace(tuning, adapter=adapter)
    return spec.with_tuning(tuning)


def require_held_out(config: TrainConfig) -> None:
    """Refuse a validation without data for it."""
    if config.validation.every and not (config.data.validation or config.data.holdout):
        raise InputError(
            "validation.every is given, but the data hold nothing out: name data.validation, or "
            "data.holdout"
        )


def default_precision(
    cluster: Cluster, job: JobConfig, cpu_has_bf16: Callable[[], bool] = has_bf16
) -> str:
    """Return bf16, or fp32 where CPUs of this machine compute and have no instructions for it.

    Without them a product in bf16 takes some hundred times as long as one in fp32.
    """
    pools = [pool for pool in cluster.pools if not job.pools or pool.name in job.pools]
    on_cpu = os.environ.get(DEVICE) == "cpu" or any(is_cpu(pool.chip) for pool in pools)
    return "fp32" if on_cpu and not cpu_has_bf16() else "bf16"


def notices(job: Job) -> Iterator[str]:
    """Yield what a person should know before a job runs: one line each."""
    chosen = job.config.plan is None and job.config.job.precision == AUTO
    if chosen and job.plan.job.precision.compute is Dtype.FP32:
        yield (
            "precision: fp32, for this machine's CPU has no bf16 instructions "
            "(--set job.precision=bf16 overrides it)"
        )
    tuning = job.config.tuning
    if tuning is not None and tuning.base != "wide":
        yield (
            f"base: {tuning.base} saves memory, not time: no chip here multiplies by such weights, "
            "so each product makes its own wide again"
        )
    parts = {
        name: getattr(job.spec.dropout, name) for name in ("attention", "residual", "embedding")
    }
    asked = ", ".join(f"{name} {rate:g}" for name, rate in parts.items() if rate)
    if asked and job.config.dropout is None:
        yield (
            f"dropout of the model's config ({asked}) is not applied: tutti trains without "
            "(--set dropout=0 says that this is meant)"
        )
    routers = [block.moe.router for block in job.spec.blocks if block.moe is not None]
    if any(router.jitter or router.scores == "near_softmax" for router in routers):
        yield (
            "the noise of the model's router in training is not applied: every token takes its "
            "best experts"
        )


def training_pools(config: TrainConfig, cluster: Cluster) -> tuple[str, ...]:
    """Return the pools that the planner may use: as asked for, without those that only answer."""
    given, objective = config.job.pools, config.objective
    if objective is None or objective.sampling is None or not objective.sampling.answering:
        return given
    names = [pool.name for pool in cluster.pools]
    for name in objective.sampling.answering:
        if name not in names:
            raise InputError(f"sampling.answering: no pool '{name}'; {hint(name, names)}")
    left = tuple(n for n in given or names if n not in objective.sampling.answering)
    if not left:
        raise InputError("sampling.answering: names all pools, so none is left to train; leave one")
    return left


def problem_of(config: TrainConfig, spec: ModelSpec, cluster: Cluster) -> Problem:
    """Return the question of a training file to the planner."""
    job = config.job
    return make_problem(
        spec,
        cluster,
        global_batch=job.global_batch,
        sequence_length=job.sequence_length,
        precision=job.precision if job.precision != AUTO else default_precision(cluster, job),
        limits=Limits(
            tp_max=job.tp_max,
            cp_max=job.cp_max,
            max_stages=job.max_stages,
            micro_batch=job.micro_batch,
            schedules=job.schedules,
            shard=job.shard,
            pools=training_pools(config, cluster),
            offload=job.offload and config.optimizer.name != "muon",
            recompute=job.recompute,
            mixed_stages=job.mixed_stages,
            mixed_pipelines=job.mixed_pipelines,
            idle=not job.use_all_pools and config.ranks is None,
        ),
        sources=sources_of(job),
        optimizer=config.optimizer.name or "adamw",
        average=config.average is not None,
    )


def search_question(problem: Problem, report: Report = silent) -> ProvenPlan:
    """Return the planner's answer."""
    result = search_plan(problem, compare=False, report=report)
    if result.interrupted:
        raise StoppedError("stopped while planning; nothing was trained")
    return result.best


def _searched(config: TrainConfig, spec: ModelSpec, cluster: Cluster, report: Report) -> Plan:
    problem = problem_of(config, spec, cluster)
    if not config.job.uniform:
        return search_question(problem, report).plan
    candidate = plan_uniform(problem)
    if isinstance(candidate, str):
        raise InputError(f"no plan treats all chips alike ({candidate}); drop 'uniform: true'")
    return candidate.plan
