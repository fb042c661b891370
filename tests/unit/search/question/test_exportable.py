"""Searches that another system must be able to run: the answer is always exported."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.search.exports import a800, mixed
from tutti.errors import InputError
from tutti.models.load import load_model
from tutti.models.plain_decoder import plain_gpt
from tutti.plan.job import Job, ScheduleKind
from tutti.search.ask_from_values import Limits, make_problem
from tutti.search.planner import plan
from tutti.search.question.exportable import SYSTEMS, export_refusal, exportable_space
from tutti.search.question.space import Problem, Space


def asked(cluster, system: str | None) -> Problem:
    model = plain_gpt(layers=12, hidden=2048, heads=16, vocab=32000, style="llama", name="small")
    job = Job(sequence_length=2048, global_batch=64)
    space = Space() if system is None else exportable_space(Space(), system, model, job)
    return Problem(model=model, cluster=cluster, job=job, space=space)


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("cluster", [a800(1), mixed()], ids=["one kind", "two vendors"])
def test_what_is_found_can_be_exported(system, cluster):
    problem = asked(cluster, system)
    found = plan(problem, compare=False).best
    assert export_refusal(found.plan, problem.model, cluster, system) == ""
    pools = {pool for _, _, stage in found.plan.stages() for pool in stage.chips.pools}
    joins = SYSTEMS[system].joins_vendors
    assert len(pools) == (len(cluster.pools) if joins else 1)


def test_a_short_memory_has_an_exportable_answer_too():
    """The free search moves states to the host here, which neither system can say."""
    cluster = a800(1)
    (pool,) = cluster.pools
    free = asked(cluster, None)
    states = 18.0 * free.model.num_parameters
    chip = replace(pool.chip, memory_bytes=0.5 * states + 3e9)
    tight = replace(cluster, pools=(replace(pool, node=replace(pool.node, chip=chip)),))
    for system in SYSTEMS:
        problem = asked(tight, system)
        found = plan(problem, compare=False).best
        assert export_refusal(found.plan, problem.model, tight, system) == ""
        assert found.estimate.fits


def test_what_a_system_cannot_say_at_all_is_refused_before_the_search():
    with pytest.raises(InputError, match="Megatron-LM: model 'gemma-2-9b'"):
        make_problem("gemma-2-9b", a800(1), limits=Limits(exportable="megatron"))
    with pytest.raises(InputError, match="--exportable: 'megatrn'; did you mean 'megatron'"):
        make_problem("llama-2-7b", a800(1), limits=Limits(exportable="megatrn"))
    only = Limits(exportable="flagscale", schedules=("interleaved",))
    with pytest.raises(InputError, match="FlagScale has none of what --schedule leaves"):
        make_problem("llama-2-7b", a800(1), limits=only)


def test_the_space_is_narrowed_to_what_a_system_has():
    job = Job(sequence_length=2048, global_batch=64)
    space = exportable_space(Space(), "flagscale", load_model("llama-2-7b"), job)
    assert space.schedules == (ScheduleKind.ONE_F_ONE_B,)
    assert (space.shard, space.offload, space.max_pipelines) == ((0, 1), (), 1)
