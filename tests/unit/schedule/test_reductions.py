"""Which gradients a schedule reduces: those that several chips have parts of, and no others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.any_plan import FOUR, Draft
from tutti.plan.plan import ExpertGroup, ModelReference, Plan
from tutti.schedule.instruction import Op
from tutti.schedule.schedule import build_schedule

BLOCKS, ALL = {1, 2}, {0, 1, 2, 3}


def one_stage(model: dict[str, Any], *, spread: bool = False, **replica: Any) -> Plan:
    draft = Draft(experts_in=(0, 1), **model)
    return draft.line(
        (FOUR, [replica]), experts={0: (ExpertGroup(chips=replica["tp"]),)} if spread else {}
    ).plan()


def reduced(plan: Plan) -> set[int]:
    """Return the units whose gradients are reduced."""
    entries = build_schedule(plan).classes[0].instructions
    return {
        unit
        for entry in entries
        if entry.op is Op.REDUCE_GRADIENTS
        for unit in range(entry.start, entry.stop)
    }


@pytest.mark.parametrize(
    ("model", "replica", "units"),
    [
        # one copy, plain tensor parallelism: only what ranks hold alike and see in part
        ({"kv_heads": 4}, {"tp": 4}, set()),
        ({"kv_heads": 2}, {"tp": 4}, BLOCKS),
        ({"kv_heads": 1}, {"tp": 2}, BLOCKS),
        ({"head_norm": "head"}, {"tp": 2}, BLOCKS),
        ({"head_norm": "heads"}, {"tp": 2}, set()),
        ({"head_norm": "all", "kv_heads": 1}, {"tp": 2}, BLOCKS),
        ({"biases": True}, {"tp": 2}, BLOCKS),  # of the experts' last layer
        # sequence parallelism: all that is not sliced, which the embedding has nothing of
        ({}, {"tp": 2, "sequence_parallel": True}, ALL - {0}),
        # copies: everything
        ({"kv_heads": 4}, {"tp": 2, "count": 2}, ALL),
        ({"kv_heads": 4}, {"tp": 1, "cp": 2}, ALL),
        ({"kv_heads": 1}, {"tp": 1}, set()),
    ],
)
def test_reduced_units(model: dict[str, Any], replica: dict[str, Any], units: set[int]) -> None:
    assert reduced(one_stage(model, **replica)) == units


def test_a_router_beside_spread_experts() -> None:
    assert reduced(one_stage({"kv_heads": 4}, spread=True, tp=2)) == BLOCKS


def test_of_a_model_that_is_not_embedded_anything_may_be_shared() -> None:
    plan = one_stage({"kv_heads": 4}, tp=4)
    assert reduced(replace(plan, model=ModelReference(name="small"))) == ALL
