"""A search's answer in words and figures: what the plan does, what holds it back, what lost.

Pure: values in, an `Explanation` out; `render` (from `explain_drawing`) shows it on a terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tutti.hardware.cluster import Cluster
from tutti.models.lengths import length_warning
from tutti.models.spec import ModelSpec
from tutti.plan.plan import Plan
from tutti.schedule.instruction import LANES, Lane, Op
from tutti.search.answer.explain_drawing import render
from tutti.search.answer.explain_groups import groups_text
from tutti.search.answer.explain_kinds import listed, mixed_text, wide_text
from tutti.search.answer.explain_rows import pass_seconds, pool_rows, stage_rows
from tutti.search.answer.explanation import (
    PROVEN,
    Bottleneck,
    Cause,
    Compared,
    Explanation,
    PoolAlone,
    PoolRow,
    StageRow,
    step_text,
)
from tutti.search.answer.result import Objective, ProvenPlan, Pruned, SearchResult
from tutti.search.answer.uncertainty import interval_text, ties
from tutti.search.pricing.money_and_energy import energy_text, spending_of
from tutti.simulate.result import IdleReason, SimulationResult
from tutti.units import bytes_text, count_text, many

__all__ = ["Explanation", "explain", "render"]

_SHARDED = ("", "optimizer state is", "optimizer state and gradients are", "all training state is")
_COUNTED = {
    Objective.STEP_TIME: "seconds per step",
    Objective.COST: "cost per step",
    Objective.ENERGY: "energy per step",
}
_MOST_PIPELINES = 6
_NOTICED = 0.01  # of the step; less recomputation than this is no bottleneck


def explain(result: SearchResult, model: ModelSpec, cluster: Cluster) -> Explanation:
    """Put a search's answer into words and figures."""
    estimate, plan = result.best.estimate, result.best.plan
    stages = stage_rows(result.best, model)
    pools = pool_rows(result.best, cluster, stages)
    return Explanation(
        title=f"{plan.model.name} on {plan.cluster.name}",
        headline=_headline(result, cluster),
        details=(
            *_details(plan, stages, pools),
            *wide_text(plan, model, cluster),
            *groups_text(plan, cluster),
        ),
        step_seconds=estimate.step_seconds,
        step_interval=interval_text(result.best),
        tokens_per_second=estimate.tokens_per_second,
        mfu=estimate.mfu,
        slowdown=estimate.priced.slowdown,
        mixed_efficiency_pct=result.mixed_efficiency_pct,
        speedup=result.speedup,
        gap_pct=_gap(result),
        bound_text=_amount(result, bound) if (bound := _bound_of(result)) > 0 else "",
        search_cpu_seconds=result.search_cpu_seconds,
        bottleneck=_bottleneck(estimate.result, stages),
        stages=stages,
        pools=pools,
        compared=tuple(_compared(result, cluster)),
        counted=_COUNTED[result.objective],
        spending=result.spending,
        alone=tuple(_alone(result)),
        missing=tuple(_missing(result, cluster)),
        runner_up=" ".join((_runner_up(result), *ties(result))),
        bound=_bound(result),
        pruned=tuple(map(_pruned, result.pruned)),
        work=", ".join(f"{count:,} {name}" for name, count in result.work.items()),
        caveats=tuple(_caveats(result, model, pools)),
    )


# --- what the plan does ------------------------------------------------------------------------


def _headline(result: SearchResult, cluster: Cluster) -> str:
    plan = result.best.plan
    used = {name for _, _, stage in plan.stages() for name in stage.chips.pools}
    kinds = list(dict.fromkeys(p.chip.name for p in cluster.pools if p.name in used))
    chips = many(plan.num_ranks, f"{kinds[0]} chip") if len(kinds) == 1 else ""
    goal = {
        Objective.STEP_TIME: "",
        Objective.COST: " It was chosen for its cost, not for time.",
        Objective.ENERGY: " It was chosen for its energy, not for time.",
    }[result.objective]
    spent = f" {words}" if result.spending and (words := result.spending.words) else ""
    return (
        f"{plan.model.name} trains on {chips or many(plan.num_ranks, 'chip')} "
        f"{'' if chips else f'of {len(kinds)} kinds ({listed(kinds)}) '}"
        f"in {step_text(result.best.step_seconds)} per step "
        f"(8 of 10 times within {interval_text(result.best)}): "
        f"{count_text(result.best.tokens_per_second)} tokens/s, "
        f"{100 * result.best.estimate.mfu:.1f} % MFU.{goal}{spent}"
    )


def _details(plan: Plan, stages: Sequence[StageRow], pools: Sequence[PoolRow]) -> Iterator[str]:
    yield _pipelines_text(plan)
    shares = [
        f"{row.pool} does {_percent(row.work_share)} of the work with "
        f"{_percent(row.peak_share)} of the peak"
        for row in pools
        if row.work_share
    ]
    if len(pools) > 1:
        yield f"{listed(shares)}."
    mixed = [(p, s, stage) for p, s, stage in plan.stages() if len(stage.chips.pools) > 1]
    if mixed:
        yield mixed_text(plan, mixed)
    yield from _memory_details(plan, stages)
    for count, what in ((len(plan.idle), "left out"), (len(plan.spare), "kept in reserve")):
        if count:
            yield f"{many(count, 'chip')} {'is' if count == 1 else 'are'} {what}."


def _pipelines_text(plan: Plan) -> str:
    number = len(plan.pipelines)
    first = plan.pipelines[0]
    if number == 1:
        cut = f"cut into {len(first.stages)} stages" if len(first.stages) > 1 else "not cut"
        return (
            f"The model is {cut}; {many(first.micro_batches, 'micro-batch', 'micro-batches')} of "
            f"{many(first.micro_batch, 'sequence')} pass through it per step "
            f"(schedule {plan.job.schedule})."
        )
    cuts = sorted({len(pipeline.stages) for pipeline in plan.pipelines})
    counts = many(cuts[0], "stage") if len(cuts) == 1 else f"{cuts[0]} to {cuts[-1]} stages"
    batches = [
        f"{many(pipeline.micro_batches, 'micro-batch', 'micro-batches')} of "
        f"{many(pipeline.micro_batch, 'sequence')} "
        f"({_percent(pipeline.sequences / plan.job.global_batch)})"
        for pipeline in plan.pipelines[:_MOST_PIPELINES]
    ]
    if number > _MOST_PIPELINES:
        batches.append("so on")
    return (
        f"{number} pipelines of {counts} train side by side (schedule {plan.job.schedule}) "
        f"and share out the batch: {listed(batches)}."
    )


def _memory_details(plan: Plan, stages: Sequence[StageRow]) -> Iterator[str]:
    again = [row for row in stages if row.num_recomputed]
    if again:
        units, kinds = sum(row.num_recomputed for row in again), {row.pool for row in again}
        yield (
            f"To save memory, {many(units, 'unit')} in {many(len(again), 'replica group')} on "
            f"{listed(sorted(kinds))} {'is' if units == 1 else 'are'} recomputed."
        )
    moved = [row for row in stages if row.offload]
    if moved:
        pools = listed(sorted({row.pool for row in moved}))
        yield f"Host memory helps {many(len(moved), 'replica group')} on {pools}."
    level = max((rule.shard_level for rule in plan.synchronisation), default=0)
    if level:
        yield f"Replicas share out what they hold: {_SHARDED[level]} sharded (level {level})."


# --- what holds it back ------------------------------------------------------------------------


def _bottleneck(result: SimulationResult, stages: Sequence[StageRow]) -> Bottleneck:
    """Find the busiest replica group, and what it would have to be given to be faster."""
    index = min(range(len(stages)), key=lambda i: stages[i].idle_share)
    row, step = stages[index], result.step_seconds or 1.0
    recompute = pass_seconds(result, index, (Op.RECOMPUTE,)) / step
    saving = recompute + row.idle[IdleReason.COPY.value]
    rivals = [
        1.0 - other.idle_share
        for other in stages
        if (other.pipeline, other.stage) != (row.pipeline, row.stage)
    ]
    wires = sum(
        seconds for op, seconds in result.critical_seconds.items() if LANES[Op(op)] is Lane.NETWORK
    )
    if wires > 0.5 * step:
        cause = Cause.COMMUNICATION
        why = (
            f"{_percent(wires / step)} of the longest chain of instructions that wait for each "
            "other is the network's"
        )
    elif saving >= _NOTICED and 1.0 - row.idle_share - saving < max(rivals, default=1.0):
        cause = Cause.MEMORY
        spent = ((recompute, "recomputes"), (saving - recompute, "waits for copies"))
        said = [f"{what} for {_percent(share)}" for share, what in spent if share >= 0.0005]
        why = f"to save memory it {listed(said)} of the step"
    else:
        cause = Cause.COMPUTE
        why = "only fewer units or faster chips there shorten the step"
    return Bottleneck(
        row=index,
        cause=cause,
        sentence=f"{row.name[0].upper()}{row.name[1:]} on {row.pool} is the busiest: it computes "
        f"{_percent(1.0 - row.idle_share)} of the step{_waits(row)}. It is bound by "
        f"{cause.value}: {why}.",
    )


def _waits(row: StageRow) -> str:
    for_what = {
        IdleReason.BUBBLE.value: "other stages",
        IdleReason.COMMUNICATION.value: "the network",
        IdleReason.COPY.value: "copies",
    }
    waits = [
        f"{_percent(row.idle[reason])} for {what}"
        for reason, what in for_what.items()
        if row.idle[reason] >= 0.0005
    ]
    return f" and waits {listed(waits)}" if waits else ""


# --- what it is held against -------------------------------------------------------------------


def _gap(result: SearchResult) -> float | None:
    return result.gap_pct if _bound_of(result) > 0 else None


def _bound_of(result: SearchResult) -> float:
    """Return what no plan has less of, in what the objective counts; 0 where nothing is proven."""
    if result.objective is Objective.STEP_TIME:
        return result.lower_bound_seconds
    return result.value_bound or 0.0


def _worth(result: SearchResult, proven: ProvenPlan, cluster: Cluster) -> float:
    """Return what the objective counts of a plan's step."""
    if result.objective is Objective.STEP_TIME:
        return proven.step_seconds
    spent = spending_of(proven.plan, proven.step_seconds, cluster)
    worth = spent.cost if result.objective is Objective.COST else spent.joules
    return worth or 0.0


def _amount(result: SearchResult, amount: float) -> str:
    """Return what the objective counts, with its unit."""
    if result.objective is Objective.COST:
        currency = result.spending.currency if result.spending is not None else ""
        return f"{amount:,.4g} {currency}".rstrip()
    return energy_text(amount) if result.objective is Objective.ENERGY else step_text(amount)


def _compared(result: SearchResult, cluster: Cluster) -> Iterator[Compared]:
    own = _worth(result, result.best, cluster)
    bound = _bound_of(result)
    rows = [
        (name, _worth(result, proven, cluster), proven.summary)
        for name, proven in (
            ("this plan", result.best),
            ("runner-up", result.runner_up),
            ("best uniform", result.uniform),
        )
        if proven is not None
    ]
    if bound > 0:
        rows.append(("lower bound", bound, ""))
    for name, amount, detail in rows:
        yield Compared(
            name=name,
            amount=amount,
            text=_amount(result, amount),
            ratio=amount / own if own else 1.0,
            detail=detail,
        )


def _alone(result: SearchResult) -> Iterator[PoolAlone]:
    for pool, one in result.alone.items():
        memory = "" if one.fits else "; cannot hold the model, predicted with unlimited memory"
        yield PoolAlone(
            pool=pool,
            tokens_per_second=one.proven.tokens_per_second,
            detail=f"{one.proven.summary}; {many(one.global_batch, 'sequence')} in "
            f"{step_text(one.proven.step_seconds)}{memory}",
            fits=one.fits,
        )


def _missing(result: SearchResult, cluster: Cluster) -> Iterator[str]:
    if result.uniform is None:
        why = result.uniform_missing or "the search did not look for one"
        yield f"There is no uniform plan to compare with: {why.rstrip('.')}."
    if len(cluster.pools) == 1:
        if result.mixed_efficiency_pct is None:
            yield "The cluster has one pool, so there is no mixed-chip efficiency."
        return
    reasons: dict[str, list[str]] = {}
    for pool in cluster.pools:
        if pool.name not in result.alone:
            why = result.alone_missing.get(pool.name) or "the search did not look for it"
            reasons.setdefault(why.rstrip("."), []).append(pool.name)
    for why, names in reasons.items():
        yield f"There is no figure for {listed(names)} alone: {why}."
    if result.mixed_efficiency_pct is None:
        yield "Without every pool's own throughput there is no mixed-chip efficiency."


def _runner_up(result: SearchResult) -> str:
    if result.runner_up is None:
        return "No other strategy came so far as to be simulated."
    slower = 100 * (result.runner_up.step_seconds / result.best.step_seconds - 1)
    why = f": {result.why_runner_up_lost}" if result.why_runner_up_lost else ""
    return (
        f"The runner-up ({result.runner_up.summary}) takes "
        f"{step_text(result.runner_up.step_seconds)}, {_more(slower)}{why.rstrip('.')}."
    )


def _bound(result: SearchResult) -> str:
    gap = _gap(result)
    if gap is None:
        return "The search proved no lower bound."
    bound = _amount(result, _bound_of(result))
    beaten, worse = {
        Objective.STEP_TIME: (f"is faster than {bound}", "is at most {} slower than the best"),
        Objective.COST: (f"costs less than {bound} per step",
                         "costs at most {} more than the cheapest"),
        Objective.ENERGY: (f"takes less than {bound} per step",
                           "takes at most {} more than the most frugal"),
    }[result.objective]  # fmt: skip
    if gap < PROVEN:
        return f"No plan of the whole search space {beaten}: this one is the best."
    return (
        f"No plan of the whole search space {beaten}, so this one {worse.format(f'{gap:.2f} %')}."
    )


def _pruned(pruned: Pruned) -> str:
    bound = ""
    if pruned.bound_seconds is not None:
        bound = f"; none is faster than {step_text(pruned.bound_seconds)}"
    one = f"{pruned.what.removesuffix('strategies')}strategy"
    return f"{many(pruned.count, one, pruned.what)}, by {pruned.by}{bound}"


def _caveats(result: SearchResult, model: ModelSpec, pools: Sequence[PoolRow]) -> Iterator[str]:
    if result.interrupted:
        yield "The search was interrupted: this is the best plan found until then."
    if doubt := length_warning(model, result.best.plan.job.sequence_length):
        yield f"{doubt[0].upper()}{doubt[1:]}."
    estimate = result.best.estimate
    over, memory = sum(not one.fits for one in estimate.memory), estimate.tightest
    if over:
        yield (
            f"{many(over, 'replica group')} {'does' if over == 1 else 'do'} not fit; the "
            f"tightest, {memory.name} on {memory.pool}, needs {bytes_text(memory.total)} of "
            f"{bytes_text(memory.limit)} per chip."
        )
    nominal = [row.pool for row in pools if row.nominal]
    if nominal:
        yield (
            f"Nominal: the times of {listed(nominal)} rest on data sheets; nothing was measured."
        )
    unlimited = [pool for pool, one in result.alone.items() if not one.fits]
    if unlimited:
        yield (
            f"{listed(unlimited)} alone cannot hold the model and is predicted with unlimited "
            "memory, which makes the mixed-chip efficiency look worse than it is."
        )
    if estimate.priced.extrapolations:
        yield f"Beyond what was measured: {'; '.join(estimate.priced.extrapolations)}."


# --- text --------------------------------------------------------------------------------------


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _more(percent: float) -> str:
    """Return "3.2 % more", or "as long" where the difference would read as nothing."""
    return "as long" if abs(percent) < 0.005 else f"{percent:.2g} % more"
