"""Any plan loads any plan's checkpoint, bit for bit, and training goes on as if nothing was."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.any_plan import (
    EXPERTS,
    FOUR,
    GPIPE,
    INTERLEAVED,
    MOE,
    ONE,
    PLAIN,
    Draft,
    level,
)
from tests.support.checkpointing import kept, run, whole
from tests.support.training import in_fp32
from tutti.models.parameters import ParameterClass
from tutti.plan.check import check_plan
from tutti.plan.job import PRECISIONS
from tutti.plan.plan import ExpertGroup, Offload, Plan, Share

TIED = {"tied": True}
SLOW_PRECISIONS = [pytest.param(p, marks=pytest.mark.slow) for p in ("fp32", "pure_bf16")]


def of_job(plan: Plan, precision: str, optimizer: str = "adamw", batch: int = 6) -> Plan:
    job = replace(plan.job, precision=PRECISIONS[precision], optimizer=optimizer)
    assert job.global_batch == batch, "all plans train on the same samples"
    return replace(plan, job=job)


DENSE: dict[str, Plan] = {
    "one chip": Draft(**TIED).line((FOUR, [{"sequences": 3}])).plan(),
    "level 0, tied apart, tensor parallel": Draft(**TIED)
    .line((((0, 2),), [{"tp": 2, "sequences": 3}]), (((2, 4),), [{"sequences": 2}, ONE]))
    .plan(),
    "level 1, ragged": Draft(**TIED)
    .line((FOUR, [{"sequences": 2}, {"pool": "slow"}]))
    .plan(PLAIN, level(1, shares=(Share(pipeline=0, stage=0, replica=0, weight=3),
                                  Share(pipeline=0, stage=0, replica=1, weight=1)))),
    "levels 2 and 3, pipelines that shard inside": Draft(**TIED)
    .line((FOUR, [{"count": 2, "sequences": 1}]))
    .line((FOUR, [{"tp": 2, "sequences": 2}]), micro_batches=1)
    .plan(GPIPE, level(2, (0, 2)), level(3, (2, 4))),
    "unequal pipelines": Draft(**TIED)
    .line((((0, 1),), [ONE]), (((1, 4),), [{"tp": 2}]), micro_batches=4)
    .line((((0, 3),), [ONE]), (((3, 4),), [ONE])).plan(PLAIN, level(1)),
    "interleaved, owned by the head": replace(
        Draft(**TIED)
        .line((((0, 1), (2, 3)), [{"count": 3}]), (((1, 2), (3, 4)), [{"tp": 2, "sequences": 3}]))
        .plan(INTERLEAVED, level(2)), tied_owner=3),
}  # fmt: skip
SPARSE: dict[str, Plan] = {
    "one chip": Draft(**MOE).line((FOUR, [{"sequences": 2}])).plan(),
    "experts shared out unequally": Draft(**MOE)
    .line((FOUR, [{"count": 2}]), experts={0: (ExpertGroup(chips=2, experts=(EXPERTS - 3, 3)),)})
    .plan(PLAIN, level(3)),
    "experts over tensor and data parallel": Draft(**MOE)
    .line((FOUR, [{"count": 2, "tp": 2, "sequence_parallel": True}]),
          experts={0: (ExpertGroup(chips=2, count=2),)})
    .plan(PLAIN, level(2), level(1, parameter_class=ParameterClass.EXPERT)),
}  # fmt: skip


def cases(plans: dict[str, Plan], batch: int) -> list[Any]:
    """All ordered pairs; those that follow each other always run, the others are slow."""
    names = list(plans)
    ring = set(zip(names, [*names[1:], names[0]], strict=True))
    return [
        pytest.param(
            plans,
            batch,
            *pair,
            marks=() if pair in ring else pytest.mark.slow,
            id=" → ".join(pair),
        )
        for pair in itertools.permutations(names, 2)
    ]


CASES = [*cases(DENSE, 6), *cases(SPARSE, 4)]


def test_of_the_plans_every_level_and_both_forms_of_tying_appear():
    levels = {rule.shard_level for plan in DENSE.values() for rule in plan.synchronisation}
    assert levels >= {1, 2, 3}
    assert {plan.tied_owner for plan in DENSE.values()} == {None, 0, 3}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """What each plan saved after two steps, and the loss of its third."""
    return {"folder": tmp_path_factory.mktemp("saved")}


def trained(saved: dict[Any, Any], plan: Plan, name: str) -> tuple[Path, dict, list[float]]:
    if name not in saved:
        folder = saved["folder"] / str(len(saved))

        def work(one):
            one.begin()
            one.train(2)
            one.save(samples=12, tokens=768, seed=1, data={"epoch": 0})
            before = kept(one.engine)
            return before, one.train(2)

        ranks = run(plan, folder, work)
        spec = plan.model.spec
        assert spec is not None
        saved[name] = folder, whole(spec, [rank[0] for rank in ranks]), ranks[0][1]
    found: tuple[Path, dict, list[float]] = saved[name]
    return found


@pytest.mark.parametrize(("plans", "batch", "first", "second"), CASES)
def test_what_one_plan_saved_another_loads(plans, batch, first, second, saved):
    loads_elsewhere(plans, batch, first, second, saved, "adamw")


MEANS = [
    (DENSE, 6, "levels 2 and 3, pipelines that shard inside", "level 1, ragged"),
    (DENSE, 6, "level 1, ragged", "interleaved, owned by the head"),
    (SPARSE, 4, "experts over tensor and data parallel", "experts shared out unequally"),
]


@pytest.mark.parametrize(("plans", "batch", "first", "second"), MEANS)
def test_means_of_rows_and_columns_go_along(plans, batch, first, second, saved):
    loads_elsewhere(plans, batch, first, second, saved, "adafactor")


def loads_elsewhere(plans, batch, first, second, saved, optimizer):
    before = of_job(plans[first], "fp32", optimizer, batch=batch)
    after = of_job(plans[second], "fp32", optimizer, batch=batch)
    folder, state, losses = trained(saved, before, f"{optimizer} {id(plans)} {first}")

    def work(one):
        one.begin(seed=2)
        progress = one.checkpointer.load(one.engine)
        assert (progress.step, progress.samples, progress.tokens) == (2, 12, 768)
        assert progress.data == {"epoch": 0}
        assert one.engine.step_number == 2
        assert one.lines == []
        return kept(one.engine), one.train(2)

    ranks = run(after, folder, work)
    loaded = whole(after.model.spec, [rank[0] for rank in ranks])
    assert loaded.keys() == state.keys()
    for key, value in state.items():
        assert torch.equal(loaded[key], value), key
    assert ranks[0][1] == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("precision", ["bf16", *SLOW_PRECISIONS])
def test_the_same_plan_goes_on_to_the_same_bits(name, precision, tmp_path):
    same_bits(of_job(DENSE[name], precision), tmp_path)


def same_bits(plan: Plan, folder: Path) -> None:
    """Save, go on, and go on once more from what was saved."""

    def work(one):
        one.begin()
        one.train(1)
        one.save()
        return one.train(2), kept(one.engine)

    def resumed(one):
        one.begin(seed=3)
        one.checkpointer.load(one.engine)
        return one.train(2), kept(one.engine)

    pairs = zip(run(plan, folder, work), run(plan, folder, resumed), strict=True)
    for (losses, after), (again, found) in pairs:
        assert again == losses
        for (key, _, value), (_, _, expected) in zip(found, after, strict=True):
            assert torch.equal(value, expected), key


AWAY = Offload(optimizer=((0, 4),), parameters=((1, 3),))
HOSTS: dict[str, Plan] = {
    "level 0": Draft().line((FOUR, [{"count": 2, "offload": AWAY}])).plan(),
    "level 2": Draft()
    .line((FOUR, [{"count": 2, "offload": Offload(optimizer=((0, 4),))}])).plan(PLAIN, level(2)),
    "level 3": Draft().line((FOUR, [{"count": 2, "offload": AWAY}])).plan(PLAIN, level(3)),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTS)
def test_state_on_the_host_is_saved_and_loaded_as_any_other(name, tmp_path):
    plan = of_job(HOSTS[name], "bf16", batch=4)
    assert check_plan(plan) == []
    same_bits(plan, tmp_path)
    device = of_job(Draft().line((FOUR, [{"sequences": 2}])).plan(), "bf16", batch=4)

    def resumed(one):
        one.checkpointer.load(one.engine)
        return kept(one.engine)

    ranks = [run(each, tmp_path, resumed) for each in (plan, device)]
    found, expected = (whole(plan.model.spec, each) for each in ranks)
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_the_loss_scale_comes_back(tmp_path):
    plan = of_job(DENSE["one chip"], "fp16")

    def work(one):
        one.begin()
        one.train(1)
        one.engine.scaling.scale = 1024.0
        one.save()
        one.engine.scaling.scale = 2.0
        progress = one.checkpointer.load(one.engine)
        assert progress.loss_scale["scale"] == one.engine.scaling.scale == 1024.0

    run(plan, tmp_path, work)


def test_plans_are_valid():
    for plan in (*DENSE.values(), *SPARSE.values()):
        assert check_plan(in_fp32(plan, "adamw")) == []
