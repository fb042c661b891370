"""An answer to a question in its one form, given back in the user's own names."""

from __future__ import annotations

from dataclasses import replace

from tutti.plan.files import plan_from_document, plan_to_document
from tutti.search.answer.result import Alone, ProvenPlan, SearchResult
from tutti.search.question.canonical_pools import CanonicalQuestion
from tutti.search.strategy.summary import summary_of
from tutti.simulate.estimate import estimate


def restored_result(question: CanonicalQuestion, result: SearchResult) -> SearchResult | None:
    """Return the result with every plan in the user's names, proven there; None where that fails.

    What a pool alone can do is told of the pools that were joined together.
    """
    best = _restored(question, result.best)
    if best is None:
        return None
    alone: dict[str, Alone] = {}
    order = [pool.name for pool in question.asked.cluster.pools]  # as the user wrote them
    for name, one in sorted(result.alone.items(), key=lambda item: order.index(item[0])):
        proven = _restored(question, one.proven)
        if proven is not None:
            alone[name] = replace(one, proven=proven)
    return replace(
        result,
        best=best,
        runner_up=_restored(question, result.runner_up),
        uniform=_restored(question, result.uniform),
        alone=alone,
    )


def _restored(question: CanonicalQuestion, proven: ProvenPlan | None) -> ProvenPlan | None:
    if proven is None:
        return None
    plan = question.restored(proven.plan)
    if plan is None:
        return None
    if not question.is_joined:
        return replace(proven, plan=plan)
    asked = question.asked
    plan = replace(plan, collectives=())
    again = plan_from_document(plan_to_document(plan), "plan")
    job = replace(asked, job=replace(asked.job, global_batch=plan.job.global_batch))
    new_estimate = estimate(again, asked.model, asked.cluster, job.pinned_sources())
    plan = replace(plan, collectives=new_estimate.priced.choices)
    return replace(proven, plan=plan, estimate=new_estimate, summary=summary_of(plan))
