"""What all ranks of a training job must agree on before it begins."""

from __future__ import annotations

import json

import torch

from tutti.document import plain
from tutti.plan.files import plan_hash, refer_to_cluster, refer_to_model
from tutti.train.run.planning import Job
from tutti.version import code_version


def job_facts(job: Job) -> dict[str, str]:
    """Return what all ranks must agree on."""
    config = job.config
    return {
        "tutti version": code_version(),
        "torch version": torch.__version__.partition("+")[0],
        "plan": plan_hash(job.plan),
        "model": refer_to_model(job.spec).hash,
        "cluster": refer_to_cluster(job.cluster).hash,
        "seed": str(config.seed),
        "steps": str(config.steps),
        "optimizer": str(config.optimizer),
        "start": config.start,
        "checkpoint settings": json.dumps(plain(config.checkpoints)),
        "validation settings": json.dumps(plain(config.validation)),
    }
