"""Intervals of training state: what is sharded is held once, what is not by every holder."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from tests.support.plans import Allocator, plans, small_model
from tutti.models.parameters import ParameterClass
from tutti.plan.check import embedded_model
from tutti.plan.files import refer_to_cluster, refer_to_model
from tutti.plan.job import Job
from tutti.plan.plan import Pipeline, Plan, Replica, Stage, Synchronisation
from tutti.search.replan.state_layout import Holding, Kind, StateLayout, joined

FEW = settings(max_examples=max(20, settings.default.max_examples // 4))


def layout_of(plan):
    return StateLayout(plan, plan.model.spec, lambda chips: np.zeros(len(chips), dtype=np.int64))


@FEW
@given(plans())
def test_what_is_sharded_is_held_once_and_nothing_is_missing(plan):
    model, layout = embedded_model(plan), layout_of(plan)
    for unit in range(model.num_units):
        bucket = layout.elements.bucket(unit)
        for parameter in layout.elements.ownership.tensors(unit):
            group = ParameterClass.DENSE if bucket.expert is None else parameter.group
            copied = layout.elements.ownership.is_copied(unit, parameter)
            for kind in Kind:
                holding = layout.holding(unit, parameter, kind)
                assert (holding.upper >= holding.lower).all()
                assert not holding.lacks(holding).any()
                if copied and kind is Kind.OPTIMIZER:
                    assert holding.measure.sum() == 0
                    continue
                assert holding.is_whole
                if not parameter.trainable or bucket.level(group) < kind.shards_from:
                    continue
                times = 1 if bucket.level(group) == 1 else len(plan.pipelines)
                assert holding.measure.sum() == pytest.approx(times)


def test_a_rank_has_what_the_engine_keeps():
    model = small_model(2)
    chips = Allocator()
    replica = Replica(chips=chips.take("fast", 4), count=4)
    plan = Plan(
        model=refer_to_model(model),
        cluster=refer_to_cluster(chips.cluster()),
        job=Job(sequence_length=64, global_batch=8),
        pipelines=(
            Pipeline(
                micro_batch=4,
                micro_batches=2,
                stages=(Stage(units=((0, 4),), replicas=(replica,)),),
            ),
        ),
        synchronisation=(Synchronisation(units=(0, 4), shard_level=1),),
    )
    layout = layout_of(plan)
    # a unit's tensors lie one after the other in one vector: each rank has a quarter of all of it
    kept = sum(p.size * layout.holding(1, p, Kind.OPTIMIZER).measure for p in model.parameters(1))
    whole = sum(p.size for p in model.parameters(1))
    assert kept == pytest.approx([whole / 4] * 4, abs=1)
    first = model.parameters(1)[0]
    assert layout.holding(1, first, Kind.OPTIMIZER).measure.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert layout.holding(1, first, Kind.PARAMETERS).measure.tolist() == [1.0] * 4


def boxes(chips, *ranks):
    """Ranks with boxes of a tensor of two dimensions: rows from, to, columns from, to."""
    array = np.asarray(ranks, dtype=np.float64)
    return Holding(np.asarray(chips), array[:, :, [0, 2]], array[:, :, [1, 3]])


def test_what_is_missing():
    holding = boxes([3, -1, 4], [(0, 0.25, 0, 1)], [(0.25, 0.5, 0, 1)], [(0.5, 0.75, 0, 0.5)])
    everything = boxes([0], [(0, 1, 0, 1)])
    assert holding.lacks(everything) == pytest.approx([0.25 + 0.125])
    assert holding.surviving().lacks(everything) == pytest.approx([0.25 + 0.25 + 0.125])
    wanted = boxes([5, 6], [(0.1, 0.3, 0, 1)], [(0.5, 1, 0.25, 0.75)])
    assert holding.lacks(wanted) == pytest.approx([0, 0.25 * 0.25 + 0.25 * 0.5])
    assert not holding.is_whole


def test_ranks_with_more_boxes_and_fewer_are_joined():
    one = boxes([3, 4], [(0, 0.25, 0, 1)], [(0.5, 0.75, 0, 1)])
    two = boxes([9], [(0, 1, 0, 0.5), (0.25, 0.5, 0.5, 1)])
    both = joined(one, two)
    assert both.lower.shape == (3, 2, 2)
    assert both.measure.tolist() == pytest.approx([0.25, 0.25, 0.5 + 0.125])
    assert both.lacks(boxes([0], [(0, 1, 0, 1)])) == pytest.approx([0.125])
    assert joined(both, boxes([1], [(0.75, 1, 0.5, 1)])).is_whole
