"""Whole workloads on one engine beside their simulation from a profile that saw none of them.

python benchmarks/serve_predicted.py --model qwen3-8b --profile h200
python benchmarks/serve_predicted.py --model qwen3-8b --profile h200 --simulate-only --chip H200

Short chats at once, chats arriving at random, long prompts, prompts that share their beginning:
output tokens a second, the median time per token, the first token's 99th percentile.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np

from tutti.bench.traces import trace
from tutti.cost.measured.chip import MeasuredChip
from tutti.document import Place
from tutti.hardware.chip import Dtype
from tutti.hardware.cluster import Cluster
from tutti.hardware.profile import Profile
from tutti.models.load import load_model
from tutti.models.spec import ModelSpec
from tutti.plan.chips import ChipSet
from tutti.plan.files import refer_to_cluster, refer_to_model
from tutti.plan.job import Job
from tutti.plan.plan import Pipeline, Plan, Replica, Stage
from tutti.plan.serving import Engine as EnginePlan
from tutti.plan.serving import Lengths, Role, Service, Traffic
from tutti.simulate.serving.requests import Requests
from tutti.simulate.serving.run import Deployment, simulate_serving

LONGEST = 4096


@dataclass(frozen=True)
class Workload:
    """Requests: when they come, what they ask."""

    name: str
    times: np.ndarray
    prompts: list[list[int]]
    outputs: list[int]
    shared: int = 0


@dataclass(frozen=True)
class Figures:
    """What users see."""

    tokens_per_s: float
    per_token_s: float  # median
    first_p99_s: float


def workloads(scale: float, vocabulary: int) -> list[Workload]:
    """Return the workloads; `scale` multiplies counts of requests, lengths stay."""
    r = np.random.default_rng(11)

    def tokens(count: int) -> list[int]:
        return r.integers(3, vocabulary, count).tolist()

    chats = trace("chat", max(4, int(256 * scale)), vocabulary, seed=7)
    others = trace("chat", len(chats), vocabulary, seed=8)  # none is stored from before
    few = max(4, int(96 * scale))
    own = max(4, int(256 * scale))
    beginning = tokens(1024)
    return [
        Workload("chats at once", np.zeros(len(chats)), [list(c.prompt) for c in chats],
                 [c.new for c in chats]),
        Workload("chats at random", np.cumsum(r.exponential(1 / 20.0, len(chats))),
                 [list(c.prompt) for c in others], [c.new for c in others]),
        Workload("long prompts", np.cumsum(r.exponential(1 / 6.0, few)),
                 [tokens(int(n)) for n in r.integers(1500, 3500, few)],
                 r.integers(32, 160, few).tolist()),
        Workload("shared beginnings", np.cumsum(r.exponential(1 / 25.0, own)),
                 [beginning + tokens(int(n)) for n in r.integers(64, 256, own)],
                 r.integers(32, 128, own).tolist(), shared=1024),
    ]  # fmt: skip


def measured(engine: object, work: Workload) -> Figures:
    """Run a workload on an engine."""
    from tutti.serve import SamplingParameters

    first: dict[int, float] = {}
    last: dict[int, float] = {}
    begun: dict[int, float] = {}
    counts: dict[int, int] = {}
    at, started = 0, time.perf_counter()
    while len(last) < len(work.prompts) or not engine.is_idle:  # type: ignore[attr-defined]
        now = time.perf_counter() - started
        while at < len(work.prompts) and work.times[at] <= now:
            wish = SamplingParameters(max_tokens=int(work.outputs[at]), ignore_end=True)
            number = engine.add(work.prompts[at], wish)  # type: ignore[attr-defined]
            begun[number], at = float(work.times[at]), at + 1
        if engine.is_idle:  # type: ignore[attr-defined]
            if at >= len(work.prompts):
                break
            time.sleep(max(0.0, work.times[at] - (time.perf_counter() - started)))
            continue
        for piece in engine.step():  # type: ignore[attr-defined]
            if piece.tokens:
                now = time.perf_counter() - started
                first.setdefault(piece.request, now - begun[piece.request])
                counts[piece.request] = counts.get(piece.request, 0) + len(piece.tokens)
                last[piece.request] = now
    seconds = time.perf_counter() - started
    per = [(last[n] - begun[n] - first[n]) / (counts[n] - 1) for n in last if counts[n] > 1]
    return Figures(
        sum(counts.values()) / seconds,
        float(np.median(per)),
        float(np.percentile(list(first.values()), 99)),
    )


def simulated(plan: Plan, chip: MeasuredChip, pool: str, work: Workload) -> Figures:
    """Simulate a workload."""
    requests = Requests(
        times=work.times.astype(np.float64),
        prompts=np.array([len(p) for p in work.prompts], np.int64),
        outputs=np.array(work.outputs, np.int64),
        shared_prefix=work.shared,
    )
    found = simulate_serving(Deployment.of(plan, {pool: chip}), requests)
    return Figures(
        found.output_tokens / found.seconds,
        found.percentiles("per_token_s")["p50"],
        found.percentiles("first_s")["p99"],
    )


def plan_of(model: ModelSpec, cluster: Cluster, slots: int, pages: int, chunk: int) -> Plan:
    """Return one engine on one chip."""
    pool = cluster.pools[0].name
    replica = Replica(chips=ChipSet.of(f"{pool}/0/0"), count=1, tp=1, sequences=slots)
    pipeline = Pipeline(
        micro_batch=slots, micro_batches=1,
        stages=(Stage(units=((0, model.num_units),), replicas=(replica,)),),
        engine=EnginePlan(role=Role.BOTH, pages=pages, share=1.0, chunk=chunk),
    )  # fmt: skip
    lengths = Lengths(mean=161, sigma=1.0, longest=LONGEST // 2)
    traffic = Traffic(prompt=lengths, output=lengths, requests_per_s=8.0)
    return Plan(
        model=refer_to_model(model), cluster=refer_to_cluster(cluster),
        job=Job(sequence_length=LONGEST, global_batch=slots, serving=Service(traffic=traffic)),
        pipelines=(pipeline,),
    )  # fmt: skip


def engine_of(model: ModelSpec, dtype: Dtype, slots: int) -> object:
    """Return an engine of random weights, warm."""
    from tutti.accelerator import open_accelerator
    from tutti.bench.serving_steps import serving_worker
    from tutti.serve import Engine

    engine = Engine(serving_worker(model, open_accelerator(), dtype, slots, LONGEST))
    engine.warm_up()
    return engine


def main() -> None:
    """Print both, workload by workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--profile", default="h200")
    parser.add_argument("--chip", default="H200")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--simulate-only", action="store_true")
    asked = parser.parse_args()
    from tutti.bench.serving_steps import cut

    model, dtype = cut(load_model(asked.model), asked.layers), Dtype(asked.dtype)
    pool = {"name": "pool", "chip": asked.chip, "nodes": 1}
    cluster = Cluster.from_document({"name": "one", "pools": [pool]}, Place("one"))
    chip = MeasuredChip(Profile.find(asked.profile), dtype)
    engine = None if asked.simulate_only else engine_of(model, dtype, asked.slots)
    pages = asked.slots * 96 + LONGEST // 16
    plan = plan_of(model, cluster, asked.slots, pages, 2048)
    for work in workloads(asked.scale, min(model.vocab, 32000)):
        predicted = simulated(plan, chip, "pool", work)
        print(f"{work.name}: simulated {predicted.tokens_per_s:,.0f} tokens/s, "
              f"{1e3 * predicted.per_token_s:.2f} ms a token, first token p99 "
              f"{1e3 * predicted.first_p99_s:.0f} ms", flush=True)  # fmt: skip
        if engine is None:
            continue
        real = measured(engine, work)
        errors = [p / r - 1 for p, r in zip(vars(predicted).values(), vars(real).values(),
                                            strict=True)]  # fmt: skip
        print(f"{'':{len(work.name)}}  measured  {real.tokens_per_s:,.0f} tokens/s, "
              f"{1e3 * real.per_token_s:.2f} ms, {1e3 * real.first_p99_s:.0f} ms; error "
              + ", ".join(f"{e:+.1%}" for e in errors), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
