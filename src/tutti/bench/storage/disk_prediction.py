"""A checkpoint's time on this machine's disk: predicted from a profile of it, and measured.

First the disk is measured as `tutti profile --storage` does; then a real checkpoint is saved and
loaded by one rank, from a cold page cache, and held against what the cost model says of it.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from tutti.bench.storage.restores import replica_engine, with_state
from tutti.cost.storage.checkpoints import (
    CheckpointFacts,
    restore_seconds,
    tier_times,
)
from tutti.cost.storage.targets import Clients, checksum_rate, measured_storage
from tutti.hardware.profile import Profile
from tutti.hardware.storage import Storage, StorageTier
from tutti.storage.disk import DiskQuestion, measure_disk
from tutti.train.checkpoint import Alone, Checkpointer, CheckpointSettings, Progress
from tutti.train.checkpoint.storage import prepare_format

_MEMORY_RATE = 10e9  # of copies that one process makes on a host; of no weight here


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPrediction:
    """A prediction beside what was measured."""

    what: str
    num_bytes: int
    predicted_s: float
    measured_s: float  # median of repeats

    @property
    def error(self) -> float:
        """|predicted − measured| ÷ measured."""
        return abs(self.predicted_s - self.measured_s) / self.measured_s


def measure_disk_prediction(
    folder: Path, *, layers: int = 6, vocab: int = 16384, repeats: int = 5
) -> list[TransferPrediction]:
    """Profile a disk, then save and load a checkpoint on it."""
    question = DiskQuestion(folder=folder, processes=1, repeats=repeats, small_operations=20)
    profile = Profile(
        chip="CPU", origin="bench", launch_floor_s=0.0, storage=measure_disk(question)
    )
    prepare_format()
    engine = with_state(replica_engine(0, 1, (layers, vocab)))
    settings = CheckpointSettings(asynchronous=False, stop_on_failure=True, keep_last=repeats)
    keeper = Checkpointer(folder / "run", settings, Alone())
    writes, reads = [], []
    for step in range(1, repeats + 1):
        keeper.save(engine, Progress(step=step))
        writes.append(keeper.history[-1].writing_s)
        drop_from_cache(folder / "run")
        began = time.perf_counter()
        keeper.load(engine)
        reads.append(time.perf_counter() - began)
    size = keeper.history[-1].num_bytes
    storage = measured_storage(Storage(), (profile,), 1)
    facts = CheckpointFacts(
        num_bytes=size, kept_bytes=size, ranks=1, clients=Clients(nodes=1),
        copy_rate=_MEMORY_RATE, network_rate=_MEMORY_RATE,
        checksum_rate=checksum_rate((profile,)),
    )  # fmt: skip
    assert storage.file_system is not None
    written = next(t for t in tier_times(storage, facts) if t.tier is StorageTier.FILE_SYSTEM)
    read = restore_seconds(storage.file_system, facts)
    return [
        TransferPrediction(what="write", num_bytes=size, predicted_s=written.seconds,
                  measured_s=statistics.median(writes)),
        TransferPrediction(what="read", num_bytes=size, predicted_s=read.each_s,
                  measured_s=statistics.median(reads)),
    ]  # fmt: skip


def drop_from_cache(folder: Path) -> None:
    """Let the system forget the files of a folder, which are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file() and hasattr(os, "posix_fadvise"):
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
