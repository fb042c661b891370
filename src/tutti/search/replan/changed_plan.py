"""A running plan as it is on a cluster of which single chips or wires changed."""

from __future__ import annotations

from tutti.errors import InputError
from tutti.models.spec import ModelSpec
from tutti.plan.plan import Plan
from tutti.search.question.what_if import Change
from tutti.search.replan.surviving_plan import surviving_plan


def changed_plan(plan: Plan, change: Change, model: ModelSpec) -> Plan:
    """Return a plan, by the places of the cluster before, for the changed one.

    Where nodes changed only, it is as it was: `Change.moved` says where they are.
    """
    if change.parts is None:
        return plan
    if any(old != new for old, new in change.moved.items()):
        raise InputError("what-if: ask for changes of nodes and of single chips one by one")
    left: Plan | None = plan
    if change.lost:
        left = surviving_plan(plan, model, change.parts.real, lost=change.lost)
    moved = change.parts.from_real(left) if left is not None else None
    if moved is None:
        raise InputError(
            "what-if: the running plan cannot go on without what is lost; plan without "
            "--replan-from"
        )
    return moved
