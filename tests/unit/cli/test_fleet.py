"""`tutti fleet` as a user types it: tables, JSON, the page, and what is wrong in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tutti.cli import main
from tutti.fleet.model_jobs import ModelJob
from tutti.hardware.cluster import Cluster

JOBS = """job,submit_s,duration_s,nodes,tenant
a,0,600,4,x
b,10,3600,12,y
c,20,300,6,x
d,30,900,16,y
"""
LARGE = ("simulate", "jobs.csv", "oversubscribed")


def tutti(capfd: Any, *arguments: str) -> tuple[int, str, str]:
    code = 0
    try:
        main.run(list(arguments))
    except SystemExit as ended:
        code = int(ended.code or 0)
    out, err = capfd.readouterr()
    return code, out, err


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: Any) -> Path:
    monkeypatch.delenv("TUTTI_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "jobs.csv"
    path.write_text(JOBS)
    return path


def test_policies_side_by_side_and_a_page(jobs: Path, capfd: Any) -> None:
    code, out, err = tutti(
        capfd, "fleet", "simulate", str(jobs), "oversubscribed", "--policy", "fifo/first",
        "--policy", "fair/tightest/wait/move", "--traffic", "all_to_all", "--html", "f.html",
        "--json", "--mtbf", "1000",
    )  # fmt: skip
    assert code == 0, err
    found = json.loads(out)
    assert [row["policy"] for row in found["policies"]] == ["fifo/first", "fair/tightest/wait/move"]
    assert all(row["jobs"] == 4 for row in found["policies"])
    page = Path("f.html").read_text()
    assert page.count("<svg") == 2
    assert "a: 4 nodes in 1 group" in page


def test_a_generated_trace(jobs: Path, capfd: Any) -> None:
    code, out, _ = tutti(
        capfd,
        "fleet",
        "simulate",
        "helios",
        "small-mixed",
        "--jobs",
        "60",
        "--policy",
        "fifo/first",
    )
    assert code == 0
    assert "helios (generated): 60 jobs" in out


def test_places_with_reasons(jobs: Path, capfd: Any) -> None:
    code, out, _ = tutti(capfd, "fleet", "place", str(jobs), "oversubscribed", "--busy",
                         "h800/0-15", "--until", "600", "--json")  # fmt: skip
    assert code == 0
    found = json.loads(out)["jobs"]
    assert found[0] == {
        "job": "a", "starts": True, "nodes": "h800/16-19", "groups": 1, "fewest_groups": 1,
        "promised_s": 0.0, "why": "all in one group",
    }  # fmt: skip
    assert [one["starts"] for one in found] == [True, True, True, False]
    assert found[3]["promised_s"] == 600.0


def test_jobs_that_share_links_are_offered_turns(jobs: Path, capfd: Any) -> None:
    words = ("fleet", "place", str(jobs), "oversubscribed", "--policy", "fifo/random",
             "--traffic", "all_to_all", "--share", "0.3")  # fmt: skip
    code, out, err = tutti(capfd, *words, "--json")
    assert code == 0, err
    (turn,) = json.loads(out)["turns"]
    assert min(turn["later_s"].values()) == 0.0 < max(turn["later_s"].values())
    assert 0.0 < turn["saves"] < 0.5
    code, out, _ = tutti(capfd, *words)
    assert "they send by turns" in out


def test_jobs_of_models_are_dealt_out(jobs: Path, monkeypatch: Any, capfd: Any) -> None:
    def speed(job: ModelJob, part: Cluster) -> float | None:
        """Chips count alike, a second pool costs a tenth; fewer than 16 chips are too few."""
        chips = part.num_chips * (1.0 - 0.1 * (len(part.pools) - 1))
        return 100.0 * chips if part.num_chips >= 16 else None

    monkeypatch.setattr("tutti.fleet.model_jobs.ask_planner", speed)
    jobs.write_text("job,model,tokens,least_nodes,most_nodes\n"
                    "a,llama-2-7b,1e6,2,2\nb,llama-2-7b,1e6,2,2\n")  # fmt: skip
    # S32 has two nodes of each pool: with one of each down, only a mix of both is left
    told = ("fleet", "mix", str(jobs), "S32", "--mixes", "mixes.json", "--without", "a800/0",
            "--without", "v100/1")  # fmt: skip
    code, out, err = tutti(capfd, *told, "--json")
    assert code == 0, err
    answer = json.loads(out)
    placed = [row["nodes"] for row in answer["jobs"]]
    assert sorted(placed, key=str) == [None, {"a800": 1, "v100": 1}]
    assert answer["single"]["jobs_running"] == 0
    assert answer["mixed"]["jobs_running"] == 1
    assert answer["mixed"]["tokens_per_s"] == pytest.approx(1440.0)
    code, out, err = tutti(capfd, *told[:6])
    assert code == 0, err
    assert "2 of 2 jobs run, 2.00 in all; one pool each: 2 run, 2.00 (mixes 1.000×)" in out
    assert "2 a800" in out
    assert "2 v100" in out
    # the kept answers serve the other verbs, without the planner
    monkeypatch.setattr("tutti.fleet.model_jobs.ask_planner", None)
    code, out, err = tutti(capfd, "fleet", "place", str(jobs), "S32", "--mixes", "mixes.json")
    assert code == 0, err
    assert "2 of 2 start now" in out
    code, out, err = tutti(capfd, "fleet", "simulate", str(jobs), "S32", "--mixes", "mixes.json",
                           "--policy", "fifo/first", "--json")  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["policies"][0]["completion_mean_s"] == pytest.approx(1e6 / 1600)


def test_there_and_back(jobs: Path, capfd: Any) -> None:
    code, out, _ = tutti(capfd, "fleet", "export", "oversubscribed", "--to", "hosts", "-o", "h.csv")
    assert (code, out) == (0, "written to h.csv\n")
    code, out, _ = tutti(capfd, "fleet", "import", "h.csv", "--node", "h800=HGX-H800", "--node",
                         "a100=HGX-A100-80", "-o", "c.yaml")  # fmt: skip
    assert out.startswith("c: 40 nodes in 2 pools, 5 leaves under 3 spines")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("simulate", "jobs.csv", "small-mixed"), "job 'a' asks for 4 nodes, more than"),
        (("simulate", "helois", "small-mixed"), "no trace 'helois'; did you mean 'helios'?"),
        ((*LARGE, "--policy", "lifo"), "policy 'lifo'"),
        (
            ("simulate", "jobs.csv", "oversubscribed", "--quota", "x"),
            "--quota: 'x'; write a tenant",
        ),
        ((*LARGE, "--quota", "x=16"), "the quota of 'x' is 16; raise it to 32"),
        ((*LARGE, "--quota", "xy=16"), "no job of jobs.csv is of tenant 'xy'; "),
        ((*LARGE, "--quota", "x=0"), "quota of 'x': 0 chips"),
        (
            ("place", "jobs.csv", "oversubscribed", "--busy", "h800/0-3", "--busy", "h800/3"),
            "node h800/3 is named twice",
        ),
        ((*LARGE, "--traffic", "rings"), "did you mean 'ring'?"),
        (
            ("simulate", "jobs.csv", "oversubscribed", "--traffic", "ring", "--share", "2"),
            "--share",
        ),
        ((*LARGE, "--mtbf", "0"), "--mtbf: 0 hours"),
        ((*LARGE, "--denser", "0"), "0 times denser"),
        (("place", "jobs.csv", "oversubscribed", "--busy", "h800/40"), "--busy: no node 40"),
        (("export", "oversubscribed", "--to", "kueue", "--api", "v1"), "--api: 'v1'"),
        (("export", "oversubscribed", "--to", "slurm-tre"), "did you mean 'slurm-tree'?"),
        (("import", "jobs.csv"), "no column 'host'"),
        (("mix", "jobs.csv", "S32"), "jobs.csv: has no models; write the columns job, model"),
        (("mix", "jobs.csv", "S32", "--count", "evn"), "--count: 'evn'; did you mean 'even'?"),
    ],
)
def test_what_is_wrong_is_one_line(
    words: tuple[str, ...], said: str, jobs: Path, capfd: Any
) -> None:
    code, _, err = tutti(capfd, "fleet", *words)
    assert code == 2
    assert len(err.splitlines()) == 1
    assert said in err
