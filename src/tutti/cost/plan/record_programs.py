"""Writes the collective programs that a plan's price rests on into the plan."""

from __future__ import annotations

from dataclasses import replace

from tutti.cost.plan.plan_costs import price_schedule
from tutti.cost.plan.sources import Sources
from tutti.hardware.cluster import Cluster
from tutti.models.spec import ModelSpec
from tutti.plan.check import embedded_cluster, embedded_model
from tutti.plan.plan import Plan
from tutti.schedule.schedule import build_schedule


def record_collectives(
    plan: Plan,
    model: ModelSpec | None = None,
    cluster: Cluster | None = None,
    sources: Sources | None = None,
) -> Plan:
    """Return the plan with the collective programs that the cost model chose; its price stays."""
    model, cluster = model or embedded_model(plan), cluster or embedded_cluster(plan)
    priced = price_schedule(build_schedule(plan), model, cluster, sources)
    return replace(plan, collectives=priced.choices)
