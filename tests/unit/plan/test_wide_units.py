"""Blocks of an 8-bit job on chips that have no such products."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tutti.document import Place
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.plan.check import check_plan, require_valid
from tutti.plan.job import PRECISIONS, Job
from tutti.plan.plan import Plan
from tutti.plan.uniform import Degrees, uniform_plan
from tutti.plan.wide_units import chosen_wide_units, with_wide_units

CLUSTER = Cluster.from_document(
    {
        "name": "two",
        "pools": [
            {"name": "new", "chip": "H100", "chips_per_node": 2},
            {"name": "old", "chip": "A100-80", "chips_per_node": 2},
        ],
    },
    Place("two"),
)
MODEL = load_model("gpt2")  # 12 blocks


def two_stages(precision: str = "fp8") -> Plan:
    """Blocks 1 to 6 on the H100, the others on the A100."""
    job = Job(sequence_length=256, global_batch=4, precision=PRECISIONS[precision])
    return uniform_plan(MODEL, CLUSTER, job, Degrees(pp=2))


def test_blocks_of_chips_without_8_bits_stay_wide():
    plan = two_stages()
    assert plan.job.wide_units == ((7, 13),)
    assert [unit for unit in range(1, 13) if plan.job.narrow(unit)] == list(range(1, 7))
    assert not chosen_wide_units(plan, CLUSTER)
    assert not two_stages("bf16").job.wide_units


def test_what_was_chosen_stays_beside_what_must_be():
    plan = with_wide_units(two_stages(), CLUSTER, MODEL.head_unit, chosen=((2, 4), (6, 8)))
    assert plan.job.wide_units == ((2, 4), (6, 13))
    assert chosen_wide_units(plan, CLUSTER) == ((2, 4), (6, 7))
    assert not check_plan(plan)


@pytest.mark.parametrize(
    ("wide", "words"),
    [
        ((), "pipeline 0, stage 1, replica 0: chip 'A100-80' cannot compute in fp8; it has"),
        (((8, 13),), "pipeline 0, stage 1, replica 0: chip 'A100-80' cannot compute in fp8"),
        (((7, 14),), r"job, wide_units: \[7, 14\) are not blocks: gpt2 has 1 to 12"),
        (((0, 13),), r"job, wide_units: \[0, 13\) are not blocks"),
    ],
)
def test_what_does_not_hold_is_refused(wide, words):
    plan = two_stages()
    with pytest.raises(InputError, match=words):
        require_valid(replace(plan, job=replace(plan.job, wide_units=wide)))


def test_a_job_in_16_bits_has_none():
    plan = two_stages("bf16")
    with pytest.raises(InputError, match="the job computes in bf16, no block is narrow: leave it"):
        require_valid(replace(plan, job=replace(plan.job, wide_units=((1, 3),))))
