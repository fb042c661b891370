"""Saving and loading about 1 GiB of training state, with torch.save and torch's own beside it.

    python benchmarks/checkpoint_speed.py [--folder .] [--repeats 3]

SmolLM2-135M's first layers with AdamW's moments, in one process and in two that shard it. All
sides wait until the bytes are on the disk. "stall" is how long training stands still when a save
goes on in the background.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from tutti.accelerator import open_accelerator
from tutti.comm import connect
from tutti.hardware.cluster import Cluster
from tutti.launch.secret import SECRET, new_secret
from tutti.models import ModelSpec, load_model
from tutti.nn.initialize import initialize
from tutti.plan.job import PRECISIONS, Job
from tutti.plan.plan import Plan
from tutti.plan.uniform import Degrees, uniform_plan
from tutti.ranks.links import Links
from tutti.ranks.standing_processes import StandingRanks
from tutti.train.checkpoint import Checkpointer, CheckpointSettings, Processes, Progress
from tutti.train.checkpoint.contents import kept_pieces
from tutti.train.engine.engine import Engine

GIB = 1 << 30


def model() -> ModelSpec:
    return replace(load_model("smollm2-135m"), num_layers=18)


def plan_for(ranks: int) -> Plan:
    document = {"name": "two", "pools": [{"name": "chips", "node": "HGX-A800", "nodes": 1}]}
    from tutti.document import Place

    cluster = Cluster.from_document(document, Place("benchmark"))
    job = Job(sequence_length=128, global_batch=8, precision=PRECISIONS["bf16"])
    words = f"tp=1,pp=1,dp={ranks},shard={1 if ranks > 1 else 0}"
    return uniform_plan(model(), cluster, job, Degrees.parse(words))


def rank_main(rank: int, ranks: int, port: int, folder: str, repeats: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    store = dist.PrefixStore(f"job-{ranks}", dist.TCPStore("127.0.0.1", port))
    comm = connect(store, rank, ranks)
    plan = plan_for(ranks)
    links = cast(Links, None)  # nothing is sent: no step is made
    engine = Engine(plan, model(), rank, open_accelerator("cpu"), links)
    initialize(engine.model)
    engine.take_masters()
    figures: dict[str, Any] = {"bytes": sum(p.memory.nbytes for p in kept_pieces(engine))}
    together = Processes(comm)
    target = Path(folder) / f"ranks-{ranks}"
    for name, asynchronous in (("synchronous", False), ("asynchronous", True)):
        settings = CheckpointSettings(keep_last=1, asynchronous=asynchronous)
        keeper = Checkpointer(target, settings, together)
        for step in range(1, repeats + 2):
            comm.barrier().wait()
            keeper.save(engine, Progress(step=step))
        keeper.close()
        figures[name] = [saved.writing_s for saved in keeper.history[1:]]
        if asynchronous:
            figures["stall"] = [saved.staging_s for saved in keeper.history]
    figures["load"] = [
        timed(lambda: keeper.load(engine), comm.barrier().wait) for _ in range(repeats)
    ]
    if ranks == 1:
        figures |= peers(engine, Path(folder) / "peers", repeats)
    comm.close()
    return figures


def timed(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    before()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def peers(engine: Engine, folder: Path, repeats: int) -> dict[str, list[float]]:
    """The same tensors through torch.save, and through torch.distributed.checkpoint as it is."""
    import torch.distributed.checkpoint as dcp

    folder.mkdir()
    state = {
        f"{piece.key} {piece.rectangle.offsets}": piece.memory.clone()
        for piece in kept_pieces(engine)
    }

    def plain() -> None:
        with (folder / "state.pt").open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())

    def stock() -> None:
        shutil.rmtree(folder / "dcp", ignore_errors=True)
        dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "torch.save": [timed(plain) for _ in range(repeats)],
            "torch.load": [timed(lambda: torch.load(folder / "state.pt")) for _ in range(repeats)],
            "dcp.save": [timed(stock) for _ in range(repeats)],
            "dcp.load": [
                timed(lambda: dcp.load(state, checkpoint_id=folder / "dcp", no_dist=True))
                for _ in range(repeats)
            ],
        }


def main() -> None:
    os.environ.setdefault(SECRET, new_secret())
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--folder", type=Path, default=Path())
    words.add_argument("--repeats", type=int, default=3)
    given = words.parse_args()
    results: dict[str, Any] = {}
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
            pool = StandingRanks(ranks)
            try:
                pool.start(rank_main, range(ranks), ranks, store.port, folder, given.repeats)
                found = [pool.answer(rank, 900.0) for rank in range(ranks)]
            finally:
                pool.close()
        results[f"{ranks} ranks"] = found
        total = sum(one["bytes"] for one in found)
        print(f"{ranks} rank(s), {total / GIB:.2f} GiB in all")
        for name in [key for key in found[0] if key != "bytes"]:
            slowest = [max(times) for times in zip(*(one[name] for one in found), strict=True)]
            middle = statistics.median(slowest)
            each = ", ".join(f"{s:.2f}" for s in slowest)
            print(f"  {name:14} {middle:6.2f} s  {total / middle / GIB:5.2f} GiB/s  ({each})")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
