"""A fault at any instruction of a step: the job ends soon, names the rank, leaves no process.

Numbers that are not finite and exceptions end a job whatever its time-out is; a stopped process is
noticed by its time-out.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.launching import plan_of
from tutti.document import Place, build
from tutti.errors import TuttiError
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.models.spec import ModelSpec
from tutti.plan.check import require_valid
from tutti.plan.chips import ChipSet
from tutti.plan.plan import ExpertGroup, Offload, Plan, Recompute, Replica, Synchronisation
from tutti.ranks import local_processes
from tutti.ranks.rank_places import Seats, class_of
from tutti.schedule.instruction import Op, What
from tutti.schedule.schedule import build_schedule
from tutti.train.run.config import TrainConfig
from tutti.train.run.planning import prepared
from tutti.train.run.trainer import run_local

ROOT = Path(__file__).parents[3]
HOW = ("nan", "exception", "stop")
LONG_S, SHORT_S = 600.0, 8.0  # time-outs: one that must not matter, one that must
LIMIT_S = 30.0

DENSE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 64,
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
SPARSE = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 64,
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_local_experts": 4, "max_position_embeddings": 64,
}  # fmt: skip


def pp(cluster: Cluster, spec: ModelSpec) -> Plan:
    """Two stages; blocks recomputed, a block's gradients on the host, tied weights apart."""
    first = Replica(
        chips=ChipSet.of("fast/0/0"),
        recompute=Recompute(full=((1, 3),)),
        offload=Offload(gradients=((1, 2),)),
    )
    second = Replica(chips=ChipSet.of("fast/0/1"), recompute=Recompute(full=((3, 5),)))
    return plan_of(cluster, [[first], [second]], spec, tied_owner=0)


def tp(cluster: Cluster, spec: ModelSpec) -> Plan:
    """One key-value head and norms of heads on two ranks; the optimizer's state is shared out."""
    rules = (Synchronisation(units=(0, spec.num_units), shard_level=1),)
    chips = ChipSet.of("fast/0/0-1")
    return plan_of(cluster, [[Replica(chips=chips, tp=2)]], spec, synchronisation=rules)


def ep(cluster: Cluster, spec: ModelSpec) -> Plan:
    """Two copies that share the experts out; all else sharded, parameters too."""
    rules = (Synchronisation(units=(0, spec.num_units), shard_level=3),)
    chips = ChipSet.of("fast/0/0-1")
    plan = plan_of(cluster, [[Replica(chips=chips, count=2)]], spec, synchronisation=rules)
    line = plan.pipelines[0]
    stage = replace(line.stages[0], experts=(ExpertGroup(chips=2),))
    plan = replace(plan, pipelines=(replace(line, stages=(stage,)),))
    require_valid(plan)
    return plan


PLANS = {"pp": (pp, DENSE), "tp": (tp, DENSE), "ep": (ep, SPARSE)}


def plan_for(name: str, folder: Path) -> Plan:
    make, config = PLANS[name]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return make(Cluster.load("laptop"), load_model(str(folder)))


def victim(plan: Plan, op: Op, how: str) -> int | None:
    """Return the last rank that runs such an instruction; batches cannot be NaN."""
    assert plan.model.spec is not None
    schedule, seats = build_schedule(plan), Seats(plan, plan.model.spec)
    ranks = [
        rank
        for rank in range(plan.num_ranks)
        if any(
            entry.op is op and not (how == "nan" and entry.what is What.BATCH)
            for entry in schedule.classes[class_of(schedule, seats[rank])].instructions
        )
    ]
    return max(ranks, default=None)


class Jobs:
    """Runs jobs with a fault; knows all processes that were started."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.pids = folder, list[int]()
        self.patch, popen = monkeypatch, subprocess.Popen

        def start(command: list[str], **options: Any) -> Any:
            assert command[1:3] == ["-m", "tutti.train.run.rank"]
            process = popen(
                [sys.executable, "-m", "tests.support.faulty_rank", *command[3:]], **options
            )
            self.pids.append(process.pid)
            return process

        monkeypatch.setattr(local_processes.subprocess, "Popen", start)
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
        monkeypatch.setenv("PYTHONPATH", path)

    def run(self, plan: Plan, op: Op, how: str, rank: int) -> tuple[str, float]:
        """Return what the user reads, and how long the job lived on after the fault."""
        mark = self.folder / "mark"
        fault = {"rank": rank, "op": op.value, "how": how, "step": 1, "mark": str(mark)}
        self.patch.setenv("FAULT", json.dumps(fault))
        written = {
            "model": str(self.folder), "steps": 3, "output": str(self.folder / "out"),
            "data": {"train": [{"kind": "synthetic"}]},
            "timeout_s": SHORT_S if how == "stop" else LONG_S,
        }  # fmt: skip
        job = prepared(build(TrainConfig, written, Place("test")), plan)
        with pytest.raises(TuttiError) as caught:
            run_local(job)
        assert mark.exists(), f"the fault was never reached: {caught.value}"
        return str(caught.value), time.time() - float(mark.read_text(encoding="ascii"))


def check(folder: Path, patch: pytest.MonkeyPatch, name: str, op: Op, how: str) -> float:
    plan = plan_for(name, folder)
    rank = victim(plan, op, how)
    if rank is None:
        pytest.skip(f"the {name} plan has no {op} that can be {how}")
    jobs = Jobs(folder, patch)
    said, seconds = jobs.run(plan, op, how, rank)
    assert not [pid for pid in jobs.pids if psutil.pid_exists(pid)], "processes are left over"
    if how == "nan":
        named = rf"\b(on|and) rank {rank} \(fast/0/\d\)"
        if op in (Op.SEND, Op.REDUCE_GRADIENTS):  # sound where it was made, not where it came to
            named = rf"what came with '.*' from rank {rank} was not finite"
        assert re.search(rf"not finite; .*{named}", said), said
    elif how == "exception":
        assert said.startswith(f"rank {rank}: InjectedError: at {op.value}"), said
    else:
        assert re.search(rf"no progress for 8 s; rank {rank} does not answer", said), said
    assert "\n" not in said
    return seconds


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("name", "op", "how"),
    [
        ("pp", Op.STEP, "nan"),  # a broken weight: the next step is repeated by nobody
        ("pp", Op.SEND, "nan"),  # what is not finite only between two ranks
        ("tp", Op.BACKWARD_INPUT, "exception"),
        pytest.param("ep", Op.FORWARD, "stop", marks=pytest.mark.slow),  # as test_links asks
    ],
)
def test_a_fault_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, op: Op, how: str
) -> None:
    check(tmp_path, monkeypatch, name, op, how)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("name", PLANS)
def test_a_fault_at_every_instruction_ends_the_job_within_half_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, op: Op, how: str
) -> None:
    seconds = check(tmp_path, monkeypatch, name, op, how)
    print(f"{name} {op} {how}: ended after {seconds:.1f} s")
    assert seconds < LIMIT_S


def test_every_kind_of_instruction_is_in_some_plan(tmp_path: Path) -> None:
    found = {
        entry.op
        for name in PLANS
        for c in build_schedule(plan_for(name, tmp_path)).classes
        for entry in c.instructions
    }
    assert found == set(Op)
