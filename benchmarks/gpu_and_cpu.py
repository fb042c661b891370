"""One job with a GPU rank and a CPU rank: is it the training that CPU ranks alone would give?

    python benchmarks/gpu_and_cpu.py                 # on a machine with a GPU
    python benchmarks/gpu_and_cpu.py --rehearse      # both ranks on the CPU

A small model in fp32, as planned twice: both chips in one stage with unequal shares, and one stage
each. Every plan runs on both devices and again on the CPU alone; losses are set beside each other.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

from tutti.document import Place, build
from tutti.plan.chips import ChipSet
from tutti.plan.files import save_plan
from tutti.plan.plan import Pipeline, Plan, Replica, Stage
from tutti.ranks.local_capacity import DEVICE
from tutti.train.run.config import TrainConfig
from tutti.train.run.planning import Job, prepare
from tutti.train.run.trainer import run_local

CONFIG = {
    "model_type": "llama", "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
CLUSTER = """
name: gpu-and-cpu
chips:
  - {name: a-gpu, vendor: NVIDIA, peak: {fp32: 2e11}, memory_bytes: 8e9, memory_bandwidth: 2e10}
  - {name: a-cpu, vendor: generic, peak: {fp32: 1e11}, memory_bytes: 8e9, memory_bandwidth: 2e10}
nodes:
  - name: with-gpu
    chip: a-gpu
    num_chips: 1
    host: {cores: 8, memory_bytes: 64e9, memory_bandwidth: 2e10, device_bandwidth: 1e10}
  - name: without
    chip: a-cpu
    num_chips: 1
    host: {cores: 8, memory_bytes: 64e9, memory_bandwidth: 2e10, device_bandwidth: 1e10}
pools:
  - {name: gpu, node: with-gpu}
  - {name: cpu, node: without}
fabric:
  links:
    - {pools: [gpu, cpu], bandwidth: 2e9, latency_s: 100e-6, same_host: true}
"""
PLANS = ("one stage, unequal shares", "one stage each")


def one_stage_each(plan: Plan) -> Plan:
    """Return the plan as a pipeline: five units on the GPU, three on the CPU."""
    stages = tuple(
        Stage(units=(units,), replicas=(Replica(chips=ChipSet.of(f"{pool}/0/0"), sequences=2),))
        for pool, units in (("gpu", (0, 5)), ("cpu", (5, 8)))
    )
    pipeline = Pipeline(micro_batch=2, micro_batches=6, stages=stages)
    return replace(plan, pipelines=(pipeline,))


def job(folder: Path, name: str, plan: Plan | None = None) -> Job:
    written: dict[str, object] = {
        "model": str(folder / "config.json"), "cluster": str(folder / "cluster.yaml"), "steps": 4,
        "job": {"sequence_length": 128, "global_batch": 12, "precision": "fp32",
                "use_all_pools": True, "max_stages": 1},
        "data": {"train": [{"kind": "synthetic"}]}, "start": "random",
        "optimizer": {"learning_rate": 1e-3, "schedule": "constant"},
        "checkpoints": {"final": False}, "output": str(folder / name),
    }  # fmt: skip
    if plan is not None:
        save_plan(plan, folder / f"{name}.json")
        written["plan"] = str(folder / f"{name}.json")
    return prepare(build(TrainConfig, written, Place(name)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / "cluster.yaml").write_text(CLUSTER)
        for name in PLANS:
            planned = job(folder, f"{name} both")
            plan = one_stage_each(planned.plan) if name == PLANS[1] else planned.plan
            planned = job(folder, f"{name} both", plan)
            chips = [c for _, _, s in planned.plan.stages() for r in s.replicas for c in r.chips]
            assert {chip.pool for chip in chips} == {"gpu", "cpu"}
            device = "cpu" if args.rehearse else "cuda"
            places = {
                rank: {DEVICE: device if chip.pool == "gpu" else "cpu"}
                for rank, chip in enumerate(chips)
            }
            both = run_local(planned, environment=places)
            alone = run_local(
                job(folder, f"{name} cpu", plan),
                environment={rank: {DEVICE: "cpu"} for rank in places},
            )
            worst = max(abs(a - b) / b for a, b in zip(both.losses, alone.losses, strict=True))
            stages = [
                [(s.units, [r.sequences for r in s.replicas]) for s in p.stages]
                for p in planned.plan.pipelines
            ]
            found[name] = {
                "plan": stages, "devices": [places[r][DEVICE] for r in sorted(places)],
                "losses": both.losses, "losses_cpu": alone.losses, "largest_difference": worst,
            }  # fmt: skip
            assert worst < 1e-4, found
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
