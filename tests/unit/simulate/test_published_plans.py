"""Published runs as plans: the whole path, from Plan through schedule and simulator, against them.

`tutti validate` scores the vectorised prices; this holds the instruction-by-instruction estimate
against the dense 8×B200 runs, which come with memory.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tutti.document import Place
from tutti.hardware.cluster import Cluster
from tutti.models.plain import plain_gpt
from tutti.plan.job import Job
from tutti.plan.uniform import Degrees, uniform_plan
from tutti.simulate.estimate import estimate

RUNS = Path(__file__).parents[4] / "shared" / "data" / "published_runs.csv"


@pytest.mark.skipif(not RUNS.is_file(), reason="the published runs are not beside this checkout")
def test_dense_b200_runs_as_plans():
    document = {"name": "b200", "pools": [{"name": "b200", "chip": "B200", "nodes": 1}]}
    cluster = Cluster.from_document(document, Place("b200"))
    time_errors, memory_errors = [], []
    with RUNS.open() as file:
        rows = [r for r in csv.DictReader(file) if r["group"] == "SimuMax-B200"]
    for row in (r for r in rows if not r["experts"] and r["cp"] == "1"):
        shape = {key: int(row[key]) for key in ("layers", "hidden", "heads", "kv_heads", "ffn")}
        length = int(row["seq"])
        model = plain_gpt(**shape, gated_mlp=True, vocab=int(row["vocab"]), sequence_length=length)
        job = Job(sequence_length=length, global_batch=int(row["gbs"]))
        degrees = Degrees(
            tp=int(row["tp"]),
            pp=int(row["pp"]),
            micro_batch=int(row["mbs"]),
            shard=1,
            sequence_parallel=row["seq_par"] == "1",
        )
        found = estimate(uniform_plan(model, cluster, job, degrees))
        time_errors.append(abs(found.step_seconds / float(row["step_time_s"]) - 1))
        overheads = found.priced.overheads
        tensors = found.tightest.total - found.tightest.runtime + overheads.workspace_bytes
        memory_errors.append(abs(tensors / 2**30 / float(row["peak_mem_GiB"]) - 1))
    assert len(time_errors) >= 10
    assert sum(time_errors) / len(time_errors) < 0.06
    assert sum(memory_errors) / len(memory_errors) < 0.03
