"""Ranks that restore from a server of limited rate: each for itself, or one for all.

Real ranks, real engines: replicas of one small model, whose state every rank needs whole. Both
ways must fill them with the same bits as were saved.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch._C._distributed_c10d import FileStore

from tutti.accelerator import open_accelerator
from tutti.bench.storage.slow_server import SlowServer
from tutti.comm import connect
from tutti.document import Place
from tutti.hardware.cluster import Cluster
from tutti.launch.secret import SECRET, new_secret
from tutti.models import ModelSpec, load_model
from tutti.nn.initialize import initialize
from tutti.plan.job import PRECISIONS, Job
from tutti.plan.plan import Plan
from tutti.plan.uniform import Degrees, uniform_plan
from tutti.ranks.links import Links
from tutti.ranks.standing_processes import StandingRanks
from tutti.train.checkpoint import Alone, Checkpointer, CheckpointSettings, Processes, Progress
from tutti.train.checkpoint.contents import kept_pieces
from tutti.train.checkpoint.restore import Reading
from tutti.train.engine.engine import Engine

WAYS: tuple[Reading, ...] = ("each", "broadcast")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a way of restoring took."""

    way: str
    seconds: float  # of the slowest rank
    read_bytes: int  # from the server, by all ranks
    equal: bool  # whether every rank has the bits that were saved


def measure_restores(
    folder: Path, rate: float, ranks: int = 4, layers: int = 1, vocab: int = 4096
) -> list[Restored]:
    """Save a checkpoint to a URL, and restore it on so many replicas in both ways."""
    os.environ.setdefault(SECRET, new_secret())
    shape = (layers, vocab)
    store = folder / "store"
    saved = _save(folder / "run", f"file://{store}", shape)
    with SlowServer(store, rate) as server:
        pool = StandingRanks(ranks)
        try:
            args = (ranks, str(folder), server.url, shape)
            pool.start(_rank_main, range(ranks), *args)
            answers = [pool.answer(rank, 300.0) for rank in range(ranks)]
        finally:
            pool.close()
    return [
        Restored(
            way=way,
            seconds=max(one[way][0] for one in answers),
            read_bytes=sum(one[way][1] for one in answers),
            equal=all(one[way][2] == saved for one in answers),
        )
        for way in WAYS
    ]


def _plan(ranks: int, shape: tuple[int, int]) -> tuple[Plan, ModelSpec]:
    layers, vocab = shape
    spec = replace(load_model("smollm2-135m"), num_layers=layers, vocab=vocab)
    document = {"name": "replicas", "pools": [{"name": "chips", "node": "HGX-A800", "nodes": 1}]}
    cluster = Cluster.from_document(document, Place("benchmark"))
    job = Job(sequence_length=128, global_batch=8, precision=PRECISIONS["bf16"])
    return uniform_plan(spec, cluster, job, Degrees.parse(f"tp=1,pp=1,dp={ranks},shard=0")), spec


def replica_engine(rank: int, ranks: int, shape: tuple[int, int]) -> Engine:
    """Return one of so many equal engines: a small model of (layers, vocabulary)."""
    plan, spec = _plan(ranks, shape)
    links = cast(Links, None)  # nothing is sent: no step is made
    return Engine(plan, spec, rank, open_accelerator("cpu"), links)


def _save(folder: Path, url: str, shape: tuple[int, int]) -> str:
    engine = with_state(replica_engine(0, 1, shape))
    settings = CheckpointSettings(asynchronous=False, stop_on_failure=True, to=url)
    Checkpointer(folder, settings, Alone()).save(engine, Progress(step=1))
    return _digest(engine)


def with_state(engine: Engine) -> Engine:
    """Return an engine with numbers in all that it keeps."""
    initialize(engine.model)
    engine.take_masters()
    for piece in kept_pieces(engine):
        piece.memory.add_(torch.rand(piece.memory.shape))
    return engine


def _digest(engine: Engine) -> str:
    digest = hashlib.sha256()
    for piece in sorted(kept_pieces(engine), key=lambda p: (p.key, p.rectangle.offsets)):
        digest.update(piece.memory.detach().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _rank_main(
    rank: int, ranks: int, folder: str, url: str, shape: tuple[int, int]
) -> dict[str, Any]:
    torch.set_num_threads(1)
    comm = connect(FileStore(f"{folder}/meeting", ranks), rank, ranks)
    together = Processes(comm)
    engine = replica_engine(rank, ranks, shape)
    restored: dict[str, Any] = {}
    for way in WAYS:
        settings = CheckpointSettings(to=url, restore=way)
        keeper = Checkpointer(Path(folder) / f"empty-{way}", settings, together)
        for piece in kept_pieces(engine):
            piece.memory.zero_()
        comm.barrier().wait()
        began = time.perf_counter()
        keeper.load(engine)
        seconds = time.perf_counter() - began
        comm.barrier().wait()
        restored[way] = (seconds, keeper.read_bytes, _digest(engine))
    comm.close()
    return restored
