"""Questions out of plain values: defaults, limits, and what makes no sense."""

from __future__ import annotations

import pytest

import tutti
from tests.support.tiny import write_cluster, write_model
from tutti.document import Place
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.plan.job import PRECISIONS, ScheduleKind
from tutti.search.answer.result import Objective
from tutti.search.ask_from_values import Limits, default_batch, make_problem
from tutti.search.question.space import Space


def test_what_is_left_out_is_filled_in():
    problem = make_problem("llama-2-13b", "S16")
    assert problem.job.global_batch == 128
    assert problem.job.sequence_length == 4096
    assert problem.space == Space()
    assert problem.objective is Objective.STEP_TIME
    assert make_problem("gpt2", "S16").job.sequence_length == 1024


def test_8_bits_need_chips_that_have_them():
    with pytest.raises(InputError, match=r"--precision: chip 'A800.*' cannot compute in fp8; it"):
        make_problem("llama-2-13b", "S16", precision="fp8")
    assert make_problem("llama-2-13b", "S16", precision="pure_bf16").job.precision.master is None
    mixed = make_problem("llama-2-13b", "small-mixed", precision="fp8")  # of its H100
    assert mixed.job.precision == PRECISIONS["fp8"]


@pytest.mark.parametrize(("name", "batch"), [("laptop", 32), ("small-mixed", 256), ("S16", 128)])
def test_the_default_batch(name, batch):
    assert default_batch(Cluster.load(name)) == batch


def test_limits_narrow_the_space():
    limits = Limits(
        tp_max=4, cp_max=1, max_stages=3, micro_batch=(4, 1, 4), schedules=("1f1b",), shard=(1, 0),
        pools=("a800",), offload=False, recompute=False, mixed_stages=False, mixed_pipelines=False,
        idle=False,
    )  # fmt: skip
    space = make_problem("llama-2-13b", "S16", limits=limits).space
    assert space == Space(
        tp=(1, 2, 4), cp=(1,), max_stages=3, sequences=(1, 4),
        schedules=(ScheduleKind.ONE_F_ONE_B,), shard=(0, 1), pools=("a800",), offload=(),
        recompute=("none",), mixed_stages=False, mixed_pipelines=False, idle=False,
    )  # fmt: skip


def test_limits_that_limit_nothing_leave_the_space_alone():
    limits = Limits(tp_max=64, cp_max=64)
    assert make_problem("llama-2-13b", "S16", limits=limits).space == Space()


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"tp_max": 0}, "--tp-max: 0 is too small"),
        ({"cp_max": -1}, "--cp-max: -1 is too small"),
        ({"max_stages": 0}, "--max-stages: 0 is too small"),
        ({"micro_batch": (0,)}, "--micro-batch: 0 is too small"),
        ({"micro_batch": (999,)}, "999 sequences are more than the global batch of 128"),
        ({"shard": (4,)}, "--shard: no level 4"),
        ({"schedules": ("1f1",)}, "did you mean '1f1b'?"),
        ({"pools": ("a801",)}, "did you mean 'a800'?"),
    ],
)
def test_limits_that_make_no_sense(limits, said):
    with pytest.raises(InputError, match=said.replace("?", r"\?")):
        make_problem("llama-2-13b", "S16", limits=Limits(**limits))


def test_objectives_need_figures(tmp_path):
    with pytest.raises(InputError, match="pool 'a800' has no 'price_per_chip_hour'"):
        make_problem("llama-2-13b", "S16", objective="cost")
    path = write_cluster(tmp_path / "pair.yaml")
    with pytest.raises(InputError, match="pool 'old' has no 'price_per_chip_hour'"):
        make_problem("llama-2-13b", path, objective="cost")
    limits = Limits(pools=("new",))
    assert make_problem("llama-2-13b", path, objective="cost", limits=limits)
    with pytest.raises(InputError, match="did you mean 'energy'"):
        make_problem("llama-2-13b", "S16", objective="enrgy")


# --- three lines of Python -------------------------------------------------------------------


def test_plan_from_python(tmp_path):
    cluster = tutti.Cluster.load(write_cluster(tmp_path / "pair.yaml"))
    found = tutti.plan(
        write_model(tmp_path / "tiny"), cluster, sequence_length=512, global_batch=16,
        tp_max=1, max_stages=2, schedules=("1f1b",), compare=False,
    )  # fmt: skip
    assert found.best.plan.job.global_batch == 16
    assert found.lower_bound_seconds <= found.best.step_seconds
    assert found.uniform is None


def test_the_package_is_still_a_package():
    import tutti.plan.files

    assert tutti.plan.files.load_plan is not None
    with pytest.raises(AttributeError, match="has no attribute 'Clusters'"):
        _ = tutti.Clusters


def test_unknown_options_are_named():
    with pytest.raises(InputError, match="unknown option 'tp_mx'; did you mean 'tp_max'"):
        tutti.plan("llama-2-13b", "S16", tp_mx=4)


@pytest.mark.parametrize(
    ("most", "first", "every"), [(None, (1, 2), (1, 2, 4, 8)), (2, (1, 2), (1, 2)), (1, (1,), (1,))]
)
def test_shorter_parts_of_a_sequence_are_left_to_the_local_search(most, first, every):
    problem = make_problem(
        "llama-2-13b", "S16", sequence_length=4096, global_batch=16, limits=Limits(cp_max=most)
    )
    assert problem.context_degrees() == first
    assert problem.all_context_degrees() == every


@pytest.mark.parametrize(("limits", "every"), [(Limits(), (1, 2, 4)), (Limits(tp_max=2), (1,))])
def test_copies_that_leave_chips_of_a_node_are_left_to_the_local_search(limits, every):
    """A node of seven chips divides by 7 only, which no model's heads do; pairs are faster."""
    pool = {"name": "seven", "chip": "A100-80", "chips_per_node": 7}
    cluster = Cluster.from_document({"name": "odd", "pools": [pool]}, Place("odd"))
    problem = make_problem(
        "llama-3.2-1b", cluster, sequence_length=1024, global_batch=8, limits=limits
    )
    assert problem.tensor_degrees(cluster.pools[0]) == (1,)
    assert problem.all_tensor_degrees(cluster.pools[0]) == every
