"""The benchmark of the planner: rows of tiny instances, tables, placements."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.support.tiny import write_cluster, write_model
from tests.unit.cost.layer_folder import PUBLISHED, write_folder
from tutti.bench.plan_instances import INSTANCES, OPT_PEERS, OPT_SIZES, QUICK, Instance
from tutti.bench.plan_opt import metis_plan, opt_problem, opt_table, run_opt, stage_texts
from tutti.bench.plan_placement import (
    chips_round_robin,
    groups_round_robin,
    placed,
    placement_table,
    run_placement,
    shuffled_chips,
    shuffled_nodes,
)
from tutti.bench.plan_worker import main, run_instance
from tutti.cli.bench.plan import plan_table
from tutti.cli.shared.output import print_rich
from tutti.cost.measured.layer_profiles import LayerProfiles
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.plan.check import check_plan
from tutti.plan.job import Job
from tutti.plan.plan import Plan
from tutti.plan.uniform import Degrees, uniform_plan


def test_every_instance_names_what_ships():
    assert list(INSTANCES) == [
        "S16", "S32", "S64", "S128", "E100", "E1000", "E1536", "B1024", "M1024", "H16384"
    ]  # fmt: skip
    assert QUICK == ("S16", "S32", "S64", "S128", "E100")
    for instance in INSTANCES.values():
        assert load_model(instance.model).num_layers
        assert Cluster.load(instance.cluster).num_chips
        assert instance.bar


@pytest.mark.slow
def test_a_row_has_every_figure(tmp_path, capsys):
    instance = Instance(
        name="T6", cluster=str(write_cluster(tmp_path / "pair.yaml")),
        model=str(write_model(tmp_path / "tiny")), sequence_length=512, global_batch=16,
        bar="≤ 1 s", half_links=True, lose_node=True,
    )  # fmt: skip
    row = json.loads(json.dumps(run_instance(instance)))
    assert row["lower_bound_s"] <= row["step_time_s"]
    assert row["peak_mib"] > 10
    assert row["search_cpu_s"] > 0
    assert row["replan_cpu_s"] > 0
    assert row["nominal"] in ([], ["old"])
    assert row["efficiency_half_links_pct"] <= 1.02 * row["mixed_efficiency_pct"]
    print_rich(plan_table([row, {"instance": "X", "why": "does not fit"}]))
    out = capsys.readouterr().out
    assert "T6" in out
    assert f"{row['mixed_efficiency_pct']:.1f} %" in out
    assert f"{row['replan_cpu_s']:.2f} s → {row['replan_step_time_s']:.4g} s" in out


def test_the_longest_figures_are_not_cut_off(capsys):
    figures = {
        "instance": "H16384", "search_cpu_s": 123.45, "peak_mib": 1234.5, "step_time_s": 0.012346,
        "mfu": 0.4567, "gap_pct": 123.4, "mixed_efficiency_pct": 102.34,
        "efficiency_half_links_pct": 101.23, "uniform_step_time_s": 0.023456, "speedup": 12.345,
        "replan_cpu_s": 12.345, "replan_step_time_s": 0.012468, "unlimited_memory": ["A800"],
    }  # fmt: skip
    print_rich(plan_table([figures]))
    line = next(line for line in capsys.readouterr().out.splitlines() if "H16384" in line)
    assert " ".join(line.split()) == (
        "H16384 123.45 s 1,234 0.01235 s 45.7% 123.4 % 102.3 %* 101.2 % 0.02346 s 12.35× "
        "12.35 s → 0.01247 s"
    )


def test_a_worker_says_why_there_is_no_row(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("tutti.bench.plan_worker.warm_up", lambda: None)
    main(["OPT-8", str(tmp_path / "nowhere")])
    row = json.loads(capsys.readouterr().out)
    assert row["instance"] == "OPT-8"
    assert "no such folder" in row["why"]


# --- placement -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide_plan() -> tuple[Plan, Cluster]:
    model, cluster = load_model("llama-2-7b"), Cluster.load("E100")
    job = Job(sequence_length=2048, global_batch=256)
    return uniform_plan(model, cluster, job, Degrees.parse("tp=4,pp=4")), cluster


@pytest.mark.parametrize(
    "order", [chips_round_robin, groups_round_robin, shuffled_nodes(1), shuffled_chips(1)]
)
def test_placements_change_only_where(wide_plan, order):
    plan, cluster = wide_plan
    moved = placed(plan, cluster, order)
    assert check_plan(moved) == []
    assert moved != plan
    for (_, _, before), (_, _, after) in zip(plan.stages(), moved.stages(), strict=True):
        assert before.units == after.units
        assert [r.count for r in before.replicas] == [r.count for r in after.replicas]
        pools = [Counter(chip.pool for chip in stage.chips) for stage in (before, after)]
        assert pools[0] == pools[1]


def test_groups_stay_in_their_node_and_chips_do_not(wide_plan):
    plan, cluster = wide_plan
    for order, nodes_of_a_group in ((groups_round_robin, 1), (chips_round_robin, 4)):
        chips = list(placed(plan, cluster, order).pipelines[0].stages[0].chips)
        assert len({chip.node for chip in chips[:4]}) == nodes_of_a_group
        assert chips[0].node != chips[4 if nodes_of_a_group == 1 else 1].node


def test_the_same_seed_gives_the_same_placement(wide_plan):
    plan, cluster = wide_plan
    assert placed(plan, cluster, shuffled_chips(3)) == placed(plan, cluster, shuffled_chips(3))
    assert placed(plan, cluster, shuffled_chips(3)) != placed(plan, cluster, shuffled_chips(4))


def test_planned_places_are_no_worse(tmp_path, capsys):
    cluster, model = write_cluster(tmp_path / "pair.yaml"), write_model(tmp_path / "tiny")
    rows = run_placement(str(cluster), str(model), 512, 16)
    assert len(rows) == 5
    assert all(row["best_s"] >= rows[0]["step_time_s"] * 0.999 for row in rows)
    print_rich(placement_table(rows))
    assert "chips in random order" in capsys.readouterr().out


# --- OPT-350M --------------------------------------------------------------------------------


def test_opt_rows_on_made_up_layers(tmp_path, capsys):
    row = run_opt(8, write_folder(tmp_path / "layers"))
    assert row["micro_batch"] * 1 == sum(
        int(part.split(" × ")[0]) * int(part.split(", ")[-1].split(" ")[0])
        for part in row["stages"][0].split(": ")[1].split(" + ")
    )
    assert row["tutti_ms"] is None or row["tutti_ms"] <= row["metis_ms"] * 1.001
    print_rich(opt_table([row]))
    assert "OPT-8" in capsys.readouterr().out


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason=f"the published profiles are not in {PUBLISHED}")
@pytest.mark.parametrize("size", OPT_SIZES)
def test_metis_plan_is_a_plan(size):
    problem = opt_problem(size, LayerProfiles.load(PUBLISHED))
    plan = metis_plan(problem.model, problem.cluster)
    problems = [p for p in check_plan(plan) if p.code != "tied"]
    assert problems == []
    assert size in OPT_PEERS
    first = f"units 0-6: {size} × (v100, tp 1, 2 sequences)"
    assert stage_texts(plan)[0] == first
