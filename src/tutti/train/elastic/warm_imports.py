"""What every rank of a run would do first, done once in the process that all are forked from.

No device is opened there, and no thread started: children could not open theirs any more.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from tutti.accelerator.find import register_kernels
from tutti.hardware.profile import shipped_profiles
from tutti.observe.folder import RUN_FILE
from tutti.train.data.open_data import PackedData, open_data
from tutti.train.run.agreement import job_facts
from tutti.train.run.planning import Job
from tutti.train.run.weights import model_folder

_warm: dict[Path, tuple[Job, PackedData]] = {}


def warm(folder: Path) -> None:
    """Load a run's job, data and prices, and the modules that its ranks need."""
    importlib.import_module("torch._dynamo")  # comes with the first tensor otherwise, for 2 s
    shipped_profiles()
    job = Job.load(folder / RUN_FILE)
    for vendor in {pool.chip.vendor for pool in job.cluster.pools}:
        register_kernels(vendor)
    job_facts(job)
    job.chip_profiles()
    job.predicted()
    _warm[folder] = (job, data_of(job))


def warmed(folder: Path) -> tuple[Job, PackedData] | None:
    """Return what was loaded for a run; None: nothing was."""
    return _warm.get(folder)


def data_of(job: Job) -> PackedData:
    """Return a job's data."""
    return open_data(
        job.config.data,
        sequence_length=job.plan.job.sequence_length,
        vocabulary=job.spec.vocab,
        model_folder=model_folder(job.config.model),
    )
