"""Traces: ours and others' columns, generated ones, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.fleet_machine import small_cluster
from tutti.errors import InputError
from tutti.fleet.chips import Grounds
from tutti.fleet.model_jobs import MixTable, ModelJob
from tutti.fleet.policy import Policy
from tutti.fleet.simulate import Simulation
from tutti.fleet.traces.generate import chip_weights, generate, moments
from tutti.fleet.traces.trace import read_trace, requests_of
from tutti.hardware.cluster import Cluster

GROUNDS = Grounds.of(small_cluster())
MODELS = "job,model,tokens\n"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


OTHERS = {
    "Acme": (
        "job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,duration\n"
        "a,u1,2,16,96,pretrain,COMPLETED,2023-05-01 10:00:10+08:00,2023-05-01 10:00:20+08:00,"
        "2023-05-01 10:05:20+08:00,300\n"
        "b,u2,1,0,8,other,COMPLETED,2023-05-01 10:00:00+08:00,,,5\n"
        "c,u2,1,3,8,debug,FAILED,2023-05-01 10:00:00+08:00,,,5\n"
    ),
    "Helios": (
        "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration\n"
        "a,u1,vc1,16,32,2,COMPLETED,2020-04-01 10:00:10,2020-04-01 10:00:20,,300\n"
        "b,u1,vc1,0,32,1,COMPLETED,2020-04-01 10:00:00,,,3\n"
        "c,u2,vc2,3,4,1,CANCELLED,2020-04-01 10:00:00,2020-04-01 10:00:00,2020-04-01 10:00:05,5\n"
    ),
    "Philly": (
        "jobid,vc,user,submitted_time,start_time,end_time,gpus\n"
        "a,v,u,2017-10-01 10:00:10,2017-10-01 10:00:20,2017-10-01 10:05:20,16\n"
        "b,v,u,2017-10-01 10:00:00,None,None,4\n"
        "c,v,u,2017-10-01 10:00:00,2017-10-01 10:00:00,2017-10-01 10:00:05,3\n"
    ),
    "PAI": (
        "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type\n"
        "a,worker,16,Terminated,20,320,600,29,100,V100\n"
        "b,ps,1,Terminated,10,320,600,29,,MISC\n"
        "c,worker,3,Terminated,10,15,600,29,25,T4\n"
    ),
    "sacct": (
        "JobID|User|Submit|Elapsed|NNodes|AllocTRES|Timelimit\n"
        "1|u|2024-01-01T10:00:10|00:05:00|2|billing=1,gres/gpu=16,node=2|1-00:00:00\n"
        "1.batch|u|2024-01-01T10:00:10|00:05:00|1||\n"
        "2|u|2024-01-01T10:00:00|00:00:05|1|gres/gpu:a100=3|UNLIMITED\n"
        "3|u|2024-01-01T10:00:00|00:00:00|1||\n"
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_columns_of_others_are_read(name: str, tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, OTHERS[name]))
    assert trace.kind == name
    assert [(row.submit_s, row.duration_s, row.chips) for row in trace.rows] == [
        (0.0, 5.0, 3), (10.0, 300.0, 16),
    ]  # fmt: skip
    assert trace.left_out == (2 if name == "sacct" else 1)
    requests = requests_of(trace, GROUNDS)
    assert [request.shapes[0].num_nodes for _, request in requests] == [1, 2]
    assert requests[0][1].shapes[0].chips_per_node == 3
    if name == "sacct":
        assert trace.rows[1].estimate_s == 86400.0


OURS = "job,submit_s,duration_s,nodes\n"
GROUPED = "job,submit_s,duration_s,nodes,one_group\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        (OURS + "a,0,-5,1\n", "line 2: job 'a': duration_s is -5; give 0 or more"),
        (OURS + "a,-1,5,1\n", "submit_s is -1"),
        (OURS + "a,,5,1\n", "line 2: 'submit_s' is missing"),
        (OURS + "a,soon,5,1\n", "'submit_s' is 'soon'; expected a number"),
        (OURS + "a,9,5,1\nb,3,5,1\n", "line 3: job 'b' came at 3 s, before the line above (9 s)"),
        (OURS + "a,0,5,1\na,1,5,1\n", "line 3: job 'a' stands on line 2, too"),
        (OURS + "a,0,5\n", "another number of columns"),
        (OURS + "a,0,5,0\n", "job 'a' asks for nothing"),
        (OURS, "has a header and no job"),
        (GROUPED + "a,0,5,1,perhaps\n", "'one_group' is 'perhaps'; expected true or false"),
        (
            "JobID|Submit|Elapsed|NNodes|AllocTRES\n1|Unknown|00:10:00|2|gres/gpu=16\n",
            "no job ran; 1 row without a start, an end or chips left out",
        ),
        ("job,submit_s,duration_s,nods\n", "unknown column 'nods'; did you mean 'nodes'?"),
        ("job,submit_s,duration_s\na,0,1\n", "no column 'nodes' and none 'chips'"),
        ("job,submit,duration_s,nodes\n", "no column 'submit_s'; it looks most like tutti"),
        ("this,that\n1,2\n", "no column"),
        (MODELS + "a,m,0\n", "line 2: 'tokens' is 0; give more than 0"),
        (MODELS + "a,m,inf\n", "line 2: 'tokens' is 'inf'; expected a finite number"),
        ("job,model,tokens,batch\na,m,5,inf\n", "'batch' is 'inf'; expected a finite number"),
        (MODELS + "a,,5\n", "line 2: 'model' is missing"),
        ("job,model,tokens,nodes\n", "unknown column 'nodes'; did you mean"),
        ("job,model,tokens,least_nodes,most_nodes\na,m,5,4,2\n", "from 4 to 2 nodes"),
        ("job,model,tokens,batch\na,m,5,1.5\n", "'batch' is 1.5; expected a whole number"),
    ],
)
def test_a_wrong_trace_is_one_line(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        read_trace(written(tmp_path, text))


def test_jobs_of_models_take_what_the_planner_says(tmp_path: Path) -> None:
    def ask(job: ModelJob, part: Cluster) -> float | None:
        return 100.0 * part.num_nodes if job.model == "llama-2-7b" else None

    text = (
        MODELS.strip()
        + ",submit_s,most_nodes,priority\na,llama-2-7b,8000,0,2,3\nb,llama-2-13b,10,7,1,\n"
    )
    trace = read_trace(written(tmp_path, text))
    assert trace.kind == "models"
    mixes = MixTable(GROUNDS.cluster, ask=ask)
    with pytest.raises(InputError, match="no plan for llama-2-13b fits any"):
        requests_of(trace, GROUNDS, mixes=mixes)
    ((time, request),) = requests_of(replace(trace, rows=trace.rows[:1]), GROUNDS, mixes=mixes)
    assert (time, request.job, request.priority, request.seconds) == (0.0, "a", 3, 40.0)
    assert {shape.num_nodes: shape.pace for shape in request.shapes} == {2: 1.0, 1: 0.5}


def test_a_job_larger_than_the_cluster_is_refused(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, OURS + "a,0,5,12\n"))
    said = "job 'a' asks for 12 nodes, more than 'small' has in one pool; nearest is 'p0' with 11 "
    with pytest.raises(InputError, match=said + "nodes, 88 chips"):
        requests_of(trace, GROUNDS)


def test_a_job_may_ask_for_one_group_and_gets_it_or_is_told_the_largest(tmp_path: Path) -> None:
    rows = "b,0,50,2,no\nc,0,5,2,0\na,0,5,4,true\n"
    requests = requests_of(read_trace(written(tmp_path, GROUPED + rows)), GROUNDS)
    assert [request.one_group for _, request in requests] == [False, False, True]
    history = Simulation(GROUNDS, Policy.parse("fifo/first"), requests).run()
    lain = [GROUNDS.spread(spell.allocation.mask) for spell in history.jobs["a"].spells]
    assert lain == [1]
    large = requests_of(read_trace(written(tmp_path, GROUPED + "a,0,5,5,yes\n")), GROUNDS)
    with pytest.raises(InputError, match="in one group, but the largest has 4 of pool 'p0'"):
        Simulation(GROUNDS, Policy(), large).run()


@pytest.mark.parametrize("name", moments())
def test_a_generated_trace_has_the_published_moments(name: str) -> None:
    one = moments()[name]
    sizes, weights = chip_weights(one, one.largest)
    assert float((sizes * weights).sum()) == pytest.approx(one.mean_chips, rel=1e-3)
    assert weights[0] >= 0.5 - 1e-6  # the median
    trace = generate(name, 5000, chips=4096, load=0.5, seed=1)
    logs = np.log([row.duration_s for row in trace.rows])
    assert np.exp(np.median(logs)) == pytest.approx(one.median_s, rel=0.15)
    # of a log-normal distribution; the mean of a sample hangs on its few longest
    assert np.exp(logs.mean() + logs.var() / 2) == pytest.approx(one.mean_s, rel=0.3)
    assert trace == generate(name, 5000, chips=4096, load=0.5, seed=1)
