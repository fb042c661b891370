"""Plans for serving: written, read, checked, drawn; training ones load as they did."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from tests.support.deployments import mixed_plan, separated_plan
from tutti.errors import InputError
from tutti.plan.check import check_plan
from tutti.plan.drawing import draw_plan
from tutti.plan.files import plan_from_document, plan_to_document
from tutti.plan.plan import Plan, Recompute, Synchronisation
from tutti.plan.serving import Lengths, Role, Route, Traffic
from tutti.schedule.schedule import build_schedule


def _engine(plan: Plan, number: int, **changes: object) -> Plan:
    pipelines = list(plan.pipelines)
    engine = pipelines[number].engine
    assert engine is not None
    pipelines[number] = replace(pipelines[number], engine=replace(engine, **changes))
    return replace(plan, pipelines=tuple(pipelines))


def _codes(plan: Plan) -> set[str]:
    return {problem.code for problem in check_plan(plan)}


@pytest.mark.parametrize("plan", [mixed_plan(), separated_plan()], ids=["mixed", "separated"])
def test_a_plan_for_serving_is_valid_and_reads_back(plan: Plan):
    assert check_plan(plan) == []
    assert plan_from_document(plan_to_document(plan), "plan.json") == plan


def test_slots_are_an_engines_own():
    pipeline = mixed_plan().pipelines[0]
    assert (pipeline.copies, pipeline.slots, pipeline.sequences) == (2, 64, 128)


def _replica(plan: Plan, **changes: object) -> Plan:
    first, *others = plan.pipelines
    stage = first.stages[0]
    changed = replace(stage, replicas=(replace(stage.replicas[0], **changes),))
    return replace(plan, pipelines=(replace(first, stages=(changed,)), *others))


MIXED, SEPARATED = mixed_plan(), separated_plan()
NO_ENGINE = replace(MIXED, pipelines=(replace(MIXED.pipelines[0], engine=None), MIXED.pipelines[1]))
TOO_LONG = Traffic(prompt=Lengths(mean=10, longest=4096), output=Lengths(mean=10, longest=10))


@pytest.mark.parametrize(
    ("plan", "code"),
    [
        (NO_ENGINE, "engine"),
        (replace(MIXED, job=replace(MIXED.job, serving=None)), "engine"),
        (_engine(MIXED, 0, share=0.5), "shares"),
        (_engine(MIXED, 0, pages=64), "pages"),
        (_engine(MIXED, 0, role=Role.PREFILL), "routes"),
        (_engine(SEPARATED, 1, share=0.5), "shares"),
        (replace(SEPARATED, routes=()), "routes"),
        (replace(SEPARATED, routes=(Route(prefill=0, decode=7),)), "routes"),
        (replace(SEPARATED, routes=(Route(prefill=1, decode=0),)), "routes"),
        (replace(SEPARATED, routes=(Route(prefill=0, decode=1, share=0.4),)), "routes"),
        (replace(MIXED, routes=(Route(prefill=0, decode=1),)), "routes"),
        (replace(MIXED, synchronisation=(Synchronisation(units=(0, 1)),)), "synchronisation"),
        (_replica(MIXED, recompute=Recompute(full=((0, 1),))), "engine"),
        (_replica(MIXED, cp=2, count=1), "engine"),
        (
            replace(
                MIXED,
                job=replace(
                    MIXED.job,
                    serving=replace(MIXED.job.serving, traffic=TOO_LONG),  # type: ignore[type-var]
                ),
            ),
            "length",
        ),
        (
            replace(
                MIXED,
                pipelines=(MIXED.pipelines[0], MIXED.pipelines[0]),
                job=replace(MIXED.job, global_batch=256),
            ),
            "canonical",
        ),
    ],
)
def test_what_is_wrong_is_named(plan: Plan, code: str):
    assert code in _codes(plan)


def test_malformed_service_is_refused_in_one_line():
    document = plan_to_document(mixed_plan())
    document["job"]["serving"]["traffic"]["promt"] = 3  # type: ignore[index]
    with pytest.raises(InputError, match=r"unknown key 'promt'.*prompt"):
        plan_from_document(document, "plan.json")
    document = plan_to_document(mixed_plan())
    document["job"]["serving"]["traffic"]["prompt"]["mean"] = 4096  # type: ignore[index]
    with pytest.raises(InputError, match=r"mean of 4096 tokens is above the longest, 1024"):
        plan_from_document(document, "plan.json")


def test_no_training_step_is_made_of_it():
    with pytest.raises(InputError, match="is for serving"):
        build_schedule(mixed_plan())


def test_the_drawing_names_engines_and_routes():
    console = Console(file=io.StringIO(), width=160)
    console.print(draw_plan(separated_plan()))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "8 requests/s (poisson)" in said
    assert "2 equal engines, decode" in said
    assert "routes of keys and values" in said
