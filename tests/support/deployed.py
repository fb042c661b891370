"""`tutti serve --plan` on emulated chips: a cluster of them, and plans over it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.support.packing import random_folder
from tests.support.served import write_tokenizer
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.plan.chips import ChipSet
from tutti.plan.files import refer_to_cluster, refer_to_model, save_plan
from tutti.plan.job import Job
from tutti.plan.plan import Pipeline, Plan, Replica, Stage
from tutti.plan.serving import Engine, Lengths, Role, Route, Service, Traffic

CLUSTER = """
name: emulated-4-4
chips:
  - name: Declared-F
    vendor: emulated
    architecture: declared time
    emulated: true
    peak: {fp32: 960 GFLOP/s, bf16: 960 GFLOP/s}
    memory_bytes: 4 GiB
    memory_bandwidth: 960 GB/s
    launch_overhead_s: 125 ns
  - {name: Declared-S, base: Declared-F, peak: {fp32: 320 GFLOP/s, bf16: 320 GFLOP/s}}
nodes:
  - name: node-f
    chip: Declared-F
    num_chips: 4
    islands: [{kind: shared memory, slots: 0-3, bandwidth: 2 GB/s, latency_s: 30 us}]
    host:
      {cores: 2, memory_bytes: 16 GiB, memory_bandwidth: 16 GB/s, device_bandwidth: 4 GB/s}
  - {name: node-s, base: node-f, chip: Declared-S}
pools:
  - {name: fast, node: node-f}
  - {name: slow, node: node-s}
fabric:
  links:
    - {pools: [fast, slow], bandwidth: 1 GB/s, latency_s: 50 us, same_host: true}
"""


def cluster(folder: Path) -> Cluster:
    path = folder / "cluster.yaml"
    path.write_text(CLUSTER)
    return Cluster.load(str(path))


def pipeline(
    *stages: tuple[tuple[int, int], str],
    slots: int = 8,
    page_size: int = 16,
    role: Role = Role.BOTH,
    share: float = 1.0,
    chunk: int = 64,
) -> Pipeline:
    """Return an engine of stages, each given by its units and its chips, with a lane for each."""
    made = tuple(
        Stage(
            units=(units,),
            replicas=(Replica(chips=(own := ChipSet.of(chips)), tp=len(own), sequences=slots),),
        )
        for units, chips in stages
    )
    return Pipeline(
        micro_batch=slots,
        micro_batches=len(stages),
        stages=made,
        engine=Engine(
            role=role, pages=len(stages) * 2048 // page_size, page_size=page_size, share=share,
            chunk=chunk,
        ),
    )  # fmt: skip


def write_plan(
    path: Path, model: Path, *pipelines: Pipeline, routes: tuple[Route, ...] = ()
) -> Plan:
    """Write a plan for a model folder, and return it."""
    lengths = Lengths(mean=64, longest=256)
    plan = Plan(
        model=refer_to_model(load_model(str(model))),
        cluster=refer_to_cluster(cluster(path.parent)),
        job=Job(
            sequence_length=1024,
            global_batch=sum(p.sequences for p in pipelines),
            serving=Service(traffic=Traffic(prompt=lengths, output=lengths)),
        ),
        pipelines=pipelines,
        routes=routes,
    )
    save_plan(replace(plan), path)
    return plan


def write_folder(folder: Path, layers: int = 4) -> Path:
    """Write a folder of a tiny llama with random weights, and a tokenizer."""
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 512,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 1024, "eos_token_id": 1,
    }  # fmt: skip
    return write_tokenizer(random_folder(folder, config))
