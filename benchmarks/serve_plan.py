"""A planned deployment against an even split, on emulated chips of speeds 3:1, with real messages.

Two engines, one on a chip three times as fast as the other's; requests over HTTP through the
router, real tokens of a small model, each step on the chip's declared time. All requests come at
once, so that what counts is how long the last engine works. Measured: the planned shares, the same
corrected by queues, and an even split; each beside what the simulator says. A run counts if the
host kept up with the chips (overrun at most 5 %).

    python benchmarks/serve_plan.py [--requests 64] [--output 8] [--step-s 0.2] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tutti.bench.serving_load import load
from tutti.bench.traces import Asked
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.plan.chips import ChipSet
from tutti.plan.files import refer_to_cluster, refer_to_model
from tutti.plan.job import Job
from tutti.plan.plan import Pipeline, Plan, Replica, Stage
from tutti.plan.serving import Engine, Lengths, Service, Traffic
from tutti.server.messages import ServerConfig
from tutti.server.supervisor import Supervisor
from tutti.simulate.serving.requests import Requests
from tutti.simulate.serving.run import Deployment, simulate_serving

PROMPT, SLOTS, SPEED = 24, 4, 3
MODEL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}  # fmt: skip
# chips so slow that a step of the small model takes 0.2 and 0.6 s; the host computes it in a few ms
CLUSTER = """
name: emulated-3-1-slow
chips:
  - name: Slow-3
    vendor: emulated
    architecture: declared time
    emulated: true
    peak: {fp32: PEAK_FAST, bf16: PEAK_FAST}
    memory_bytes: 4 GiB
    memory_bandwidth: BANDWIDTH_FAST
    launch_overhead_s: 125 ns
  - name: Slow-1
    base: Slow-3
    peak: {fp32: PEAK_SLOW, bf16: PEAK_SLOW}
    memory_bandwidth: BANDWIDTH_SLOW
    launch_overhead_s: 375 ns
nodes:
  - name: one
    chip: Slow-3
    num_chips: 1
    host:
      {cores: 2, memory_bytes: 16 GiB, memory_bandwidth: 16 GB/s, device_bandwidth: 4 GB/s}
  - {name: other, base: one, chip: Slow-1}
pools:
  - {name: fast, node: one}
  - {name: slow, node: other}
fabric:
  links:
    - {pools: [fast, slow], bandwidth: 1 GB/s, latency_s: 50 us, same_host: true}
"""


def write_folder(folder: Path) -> Path:
    """Write the model with random weights."""
    import torch
    from safetensors.torch import save_file

    from tutti.huggingface.maps import key_table
    from tutti.models import read_config

    table = key_table(read_config(MODEL, "model"))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        key: torch.randn(parts[0][1].shape, generator=generator) * 0.1
        for key, parts in table.stored.items()
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def deployment(folder: Path, shares: tuple[float, float], output: int, step_s: float = 0.2) -> Plan:
    """Return one engine on each chip, with these shares of the requests.

    `step_s`: what a step takes on the fast one.
    """
    path = folder.parent / "cluster.yaml"
    text = CLUSTER
    for name, part in (("FAST", step_s), ("SLOW", SPEED * step_s)):
        text = text.replace(f"PEAK_{name}", f"{0.878 / part} GFLOP/s")
        text = text.replace(f"BANDWIDTH_{name}", f"{219.5 / part} MB/s")
    path.write_text(text)
    spec = load_model(str(folder))
    pipelines = tuple(
        Pipeline(
            micro_batch=SLOTS,
            micro_batches=1,
            stages=(
                Stage(
                    units=((0, spec.num_units),),
                    replicas=(Replica(chips=ChipSet.of(chip), sequences=SLOTS),),
                ),
            ),
            engine=Engine(pages=SLOTS * 16, share=share, chunk=64),
        )
        for chip, share in zip(("fast/0/0", "slow/0/0"), shares, strict=True)
    )
    lengths = Lengths(mean=PROMPT, longest=PROMPT), Lengths(mean=output, longest=output)
    return Plan(
        model=refer_to_model(spec),
        cluster=refer_to_cluster(Cluster.load(str(path))),
        job=Job(
            sequence_length=256,
            global_batch=2 * SLOTS,
            serving=Service(traffic=Traffic(prompt=lengths[0], output=lengths[1])),
        ),
        pipelines=pipelines,
    )


def predicted(plan: Plan, requests: int, output: int) -> float:
    """Return the simulator's requests per second, from the first arrival to the last token."""
    asked = Requests(
        times=np.zeros(requests),
        prompts=np.full(requests, PROMPT, np.int64),
        outputs=np.full(requests, output, np.int64),
    )
    return requests / simulate_serving(Deployment.of(plan), asked, every_engine=True).seconds


def measured(folder: Path, plan: Plan, routing: str, requests: int, output: int) -> dict[str, Any]:
    """Serve requests with a plan; return what came of it."""
    random.seed(1)
    asked = [
        Asked(prompt=[random.randrange(2, 500) for _ in range(PROMPT)], new=output)
        for _ in range(requests)
    ]
    config = ServerConfig(
        folder=str(folder), name="small", engine={"dtype": "fp32"}, port=0, queue=2 * requests,
        routing=routing,  # type: ignore[arg-type]
    )  # fmt: skip
    with Supervisor(config, plan=plan) as server:
        watching = threading.Event()

        def watch() -> None:
            while not watching.is_set():
                server.look()
                time.sleep(0.1)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            while sum(engine.ready for engine in server.state.engines) < 2:
                time.sleep(0.1)
            time.sleep(1.0)  # for the API process to hear of both
            url = f"http://127.0.0.1:{server.port}"
            few = [replace(one, new=1) for one in asked[: 4 * SLOTS]]  # some for each engine
            warm = asyncio.run(load(url, "small", few, [0.0] * len(few)))
            assert not warm.failed, warm.first_error
            time.sleep(1.0)
            before = overrun(server.folder.path)
            found = asyncio.run(load(url, "small", asked, [0.0] * requests))
            time.sleep(1.0)
            after = overrun(server.folder.path)
        finally:
            watching.set()
            watcher.join()
    assert not found.failed, found.first_error
    return {"requests_per_s": found.request_rate, "tokens_per_s": found.output_rate,
            "seconds": found.seconds, "overrun": late_share(before, after)}  # fmt: skip


def overrun(folder: Path) -> list[tuple[float, float]]:
    """Return the seconds that each chip worked, and by how many the host was late."""
    return [
        msgspec.json.decode(path.read_bytes(), type=tuple[float, float])
        for path in sorted(folder.glob("overrun*.json"))
    ]


def late_share(before: list[tuple[float, float]], after: list[tuple[float, float]]) -> float:
    """Return how late the host was meanwhile, as a share of the chips' time."""
    pairs = zip(before, after, strict=True)
    return max((b[1] - a[1]) / max(b[0] - a[0], 1e-9) for a, b in pairs)


def main() -> None:
    """Measure, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--output", type=int, default=8)
    parser.add_argument("--step-s", type=float, default=0.2, help="longer, on a busy host")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    part = 1.0 / (SPEED + 1)
    cases = {
        "even split": ((0.5, 0.5), "shares"),
        "planned": ((1.0 - part, part), "shares"),
        "planned, corrected by queues": ((1.0 - part, part), "queues"),
    }
    rows = {}
    with tempfile.TemporaryDirectory() as room:
        folder = write_folder(Path(room) / "model")
        for name, (shares, routing) in cases.items():
            plan = deployment(folder, shares, given.output, given.step_s)
            said = predicted(plan, given.requests, given.output)
            row = measured(folder, replace(plan), routing, given.requests, given.output)
            row["predicted"] = said
            row["error"] = abs(said / row["requests_per_s"] - 1.0)
            rows[name] = row
            print(
                f"{name:30} {row['requests_per_s']:6.2f} requests/s, predicted {said:6.2f} "
                f"({100 * row['error']:.1f} %), overrun {100 * row['overrun']:.1f} %",
                flush=True,
            )
    even = rows["even split"]["requests_per_s"]
    for name in list(rows)[1:]:
        print(f"{name}: {rows[name]['requests_per_s'] / even:.2f} times the even split")
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
