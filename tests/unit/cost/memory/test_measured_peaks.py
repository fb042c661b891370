"""Predicted memory beside peaks that were measured on an H200 (`tutti bench train`, pure bf16)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tutti.cost.kernels import Kernels
from tutti.cost.plan.sources import Sources
from tutti.document import Place
from tutti.hardware.cluster import Cluster
from tutti.hardware.library import shipped
from tutti.hardware.pool import Pool
from tutti.models import read_config
from tutti.models.load import catalog_config
from tutti.plan.job import PRECISIONS, Job
from tutti.plan.uniform import Degrees, uniform_plan
from tutti.simulate.estimate import estimate

GIB = 2.0**30
NODE = shipped().node("HGX-H200", Place("test"))
CLUSTER = Cluster(name="one", pools=(Pool(name="h200", node=NODE),))


def predicted(model: str, layers: int | None, sequences: int, sources: Sources) -> float:
    config = dict(catalog_config(model)) | ({"num_hidden_layers": layers} if layers else {})
    spec = read_config(config, model)
    job = Job(sequence_length=4096, global_batch=sequences, precision=PRECISIONS["pure_bf16"])
    plan = uniform_plan(spec, CLUSTER, job, Degrees(micro_batch=sequences, dp=1))
    (memory,) = estimate(plan, spec, CLUSTER, sources).memory
    return (memory.total - memory.runtime) / GIB


@pytest.mark.parametrize(
    ("model", "layers", "sequences", "gib"),
    [
        ("llama-3-8b", None, 2, 81.2),
        ("llama-3.2-1b", None, 4, 26.9),
        ("mixtral-8x7b", 4, 2, 46.7),
        ("qwen3-30b-a3b", 12, 2, 61.1),
        ("gpt-oss-20b", 10, 2, 70.9),
    ],
)
def test_peaks_of_an_h200(model: str, layers: int | None, sequences: int, gib: float) -> None:
    assert predicted(model, layers, sequences, Sources()) == pytest.approx(gib, rel=0.02)


def test_a_stack_that_holds_all_logits_needs_room_for_them() -> None:
    """16,384 × 128,256 logits: 2 bytes of each beside what a fused loss of tutti's own holds."""
    whole = Sources(kernels=replace(Kernels(), logit_chunk_bytes=math.inf))
    more = predicted("llama-3.2-1b", None, 4, whole) - predicted("llama-3.2-1b", None, 4, Sources())
    assert more == pytest.approx((2 * 16384 * 128256 - 2**29) / GIB, rel=0.35)
    unfused = Sources(kernels=replace(Kernels(), fused_cross_entropy=False))
    most = predicted("llama-3.2-1b", None, 4, unfused)
    assert most > predicted("llama-3.2-1b", None, 4, whole)
