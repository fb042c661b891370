"""Intervals of training state: what is sharded is held once, what is not by every holder."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from tests.support.plans import plans, small_model
from tutti.plan.check import embedded_model
from tutti.search.replan.state_layout import Holding, Kind, Part, StateLayout, joined, unit_parts

FEW = settings(max_examples=max(20, settings.default.max_examples // 4))


def layout_of(plan):
    return StateLayout(plan, lambda chips: np.zeros(len(chips), dtype=np.int64))


def test_parts_of_a_unit():
    model = small_model(2, experts_in=(1,), tied=True)
    assert sum(unit_parts(model, 1, {1}).values()) == sum(p.size for p in model.parameters(1))
    # Heads, key-value heads and columns are one part while every degree divides them all.
    assert set(unit_parts(model, 1, {1, 2, 4})) == {Part(4, 0, False), Part(None, 0, False)}
    assert {part.pieces for part in unit_parts(model, 1, {8})} == {None, 4, 8}
    assert Part(2, 8, False) in unit_parts(model, 2, {2})
    assert unit_parts(model, 0, {1}) == {Part(1, 0, True): 256 * 64}


@FEW
@given(plans())
def test_what_is_sharded_is_held_once_and_nothing_is_missing(plan):
    model, layout = embedded_model(plan), layout_of(plan)
    for unit in range(model.num_units):
        for part in unit_parts(model, unit, layout.tensor_degrees):
            for kind in Kind:
                holding = layout.holding(unit, part, kind)
                assert (holding.upper >= holding.lower).all()
                assert holding.gaps() == []
                rule = plan.synchronisation_of(unit)
                whole = part.experts and any(s.experts for _, _, s in plan.holders(unit))
                # what tensor-parallel ranks hold alike each of them counts
                alone = part.pieces is not None and part.pieces >= max(layout.tensor_degrees)
                if rule.shard_level == 1 and alone and not whole and kind is Kind.OPTIMIZER:
                    assert holding.measure.sum() == pytest.approx(1.0)


def test_gaps_and_joins():
    chips = np.asarray([3, -1, 4])
    holding = Holding(chips, np.asarray([[0.0], [0.25], [0.5]]),
                      np.asarray([[0.25], [0.5], [0.75]]), by_expert=False)  # fmt: skip
    assert holding.gaps() == [(0.75, 1.0)]
    assert holding.surviving().gaps() == [(0.25, 0.5), (0.75, 1.0)]
    two = Holding(np.asarray([9]), np.asarray([[0.0, 0.7]]), np.asarray([[0.1, 1.0]]), False)
    both = joined(holding, two)
    assert both.lower.shape == (4, 2)
    assert both.measure.tolist() == pytest.approx([0.25, 0.25, 0.25, 0.4])
    assert both.gaps() == []
