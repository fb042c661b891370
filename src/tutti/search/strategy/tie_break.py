"""Which of two plans that take the same time is the better one: the one that splits less."""

from __future__ import annotations

from tutti.plan.plan import Plan

Splitting = tuple[int, int]


def splitting(plan: Plan) -> Splitting:
    """Return how many chips only help others with a sequence, then with a matrix."""
    replicas = [replica for _, _, stage in plan.stages() for replica in stage.replicas]
    return (
        sum(replica.count * (replica.cp - 1) for replica in replicas),
        sum(replica.count * (replica.tp - 1) for replica in replicas),
    )
