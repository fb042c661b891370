"""Whole workloads on one engine beside their simulation from a profile that saw none of them.

python benchmarks/serve_predicted.py --model qwen3-8b --profile h200
python benchmarks/serve_predicted.py --model qwen3-8b --profile h200 --simulate-only --chip H200
python benchmarks/serve_predicted.py --model smollm2-135m --device cpu --dtype fp32 --minutes 4

Short chats at once, chats arriving at random, long prompts, prompts that share their beginning:
output tokens a second, the median time per token, the first token's 99th percentile.

With `--minutes`, which a CPU needs, requests come as fast as a share of what the simulation says is
possible (`--load`), lengths are a quarter, and counts are such that all of it ends in time. Without
`--profile` the chip is profiled first, in a third of the time. `--clock processor` counts seconds
of the processor, and skips idle ones: on one thread of a busy machine it is the better clock.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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
PROFILED = 1 / 3  # of the minutes, where no profile is given
SHORT = 0.25  # lengths on a CPU, of those on a GPU
AT_ONCE = 32  # requests whose simulation tells what is possible
FEWEST = 24  # requests of a workload


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


@dataclass(frozen=True)
class Kind:
    """How a workload's requests are drawn."""

    name: str
    per_s: float | None  # as they come on an H200; None: all at once
    count: int
    prompt: tuple[int, int] | None  # lengths, from and to; None: as people chat
    output: tuple[int, int] | None
    shared: int = 0
    seed: int = 7


KINDS = (
    Kind("chats at once", None, 256, None, None),
    Kind("chats at random", 20.0, 256, None, None, seed=8),  # none is stored from before
    Kind("long prompts", 6.0, 96, (1500, 3500), (32, 160)),
    Kind("shared beginnings", 25.0, 256, (64, 256), (32, 128), shared=1024),
)


def drawn(kind: Kind, count: int, per_s: float | None, short: float, vocabulary: int) -> Workload:
    """Return so many requests; `short`: their lengths, of those on a GPU."""
    r = np.random.default_rng(11 + kind.seed)

    def lengths(bounds: tuple[int, int]) -> list[int]:
        return [max(4, int(short * n)) for n in r.integers(*bounds, count)]

    def tokens(length: int) -> list[int]:
        return r.integers(3, vocabulary, length).tolist()

    times = np.zeros(count) if per_s is None else np.cumsum(r.exponential(1 / per_s, count))
    if kind.prompt is None or kind.output is None:
        chats = trace("chat", count, vocabulary, seed=kind.seed)
        prompts = [list(c.prompt)[: max(4, int(short * len(c.prompt)))] for c in chats]
        return Workload(kind.name, times, prompts, [max(4, int(short * c.new)) for c in chats])
    shared = int(short * kind.shared)
    beginning = tokens(shared)
    prompts = [beginning + tokens(n) for n in lengths(kind.prompt)]
    return Workload(kind.name, times, prompts, lengths(kind.output), shared=shared)


def within(
    seconds: float, load: float, short: float, vocabulary: int, tell: Callable[[Workload], Figures]
) -> list[Workload]:
    """Return the workloads that arrive, each as long as `seconds` at a share of what is possible.

    `tell` simulates: what is possible is what it says of requests that come at once.
    """
    works = []
    for kind in KINDS[1:]:
        trial = drawn(kind, AT_ONCE, None, short, vocabulary)
        per_s = load * tell(trial).tokens_per_s * AT_ONCE / sum(trial.outputs)
        works.append(drawn(kind, max(FEWEST, int(seconds * per_s)), per_s, short, vocabulary))
    return works


class Clock:
    """Seconds since its start: of the day, or of this process with idle ones skipped."""

    def __init__(self, kind: str) -> None:
        self._read = time.process_time if kind == "processor" else time.perf_counter
        self._sleeps, self._skipped, self._began = kind != "processor", 0.0, self._read()

    def now(self) -> float:
        """Return the time."""
        return self._read() - self._began + self._skipped

    def wait_until(self, moment: float) -> None:
        """Let the time pass."""
        lacking = max(0.0, moment - self.now())
        if self._sleeps:
            time.sleep(lacking)
        else:
            self._skipped += lacking


def measured(engine: object, work: Workload, clock: Clock) -> Figures:
    """Run a workload on an engine."""
    from tutti.serve import SamplingParameters

    first: dict[int, float] = {}
    last: dict[int, float] = {}
    begun: dict[int, float] = {}
    counts: dict[int, int] = {}
    at = 0
    while len(last) < len(work.prompts) or not engine.is_idle:  # type: ignore[attr-defined]
        while at < len(work.prompts) and work.times[at] <= clock.now():
            wish = SamplingParameters(max_tokens=int(work.outputs[at]), ignore_end=True)
            number = engine.add(work.prompts[at], wish)  # type: ignore[attr-defined]
            begun[number], at = float(work.times[at]), at + 1
        if engine.is_idle:  # type: ignore[attr-defined]
            if at >= len(work.prompts):
                break
            clock.wait_until(float(work.times[at]))
            continue
        for piece in engine.step():  # type: ignore[attr-defined]
            if piece.tokens:
                now = clock.now()
                first.setdefault(piece.request, now - begun[piece.request])
                counts[piece.request] = counts.get(piece.request, 0) + len(piece.tokens)
                last[piece.request] = now
    seconds = clock.now()
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


def engine_of(model: ModelSpec, device: str | None, dtype: Dtype, slots: int) -> object:
    """Return an engine of random weights, warm."""
    from tutti.accelerator import open_accelerator
    from tutti.bench.serving_steps import serving_worker
    from tutti.serve import Engine, SamplingParameters

    engine = Engine(serving_worker(model, open_accelerator(device), dtype, slots, LONGEST))
    engine.warm_up()
    wish = SamplingParameters(max_tokens=8, ignore_end=True)  # what is made at first use
    engine.generate([list(range(3, 3 + n)) for n in (1, 5, 70)], wish)
    return engine


def profiled(given: argparse.Namespace, seconds: float) -> Path:
    """Profile what servers run on this chip, as users do."""
    file = Path(tempfile.mkdtemp()) / "profile.json"
    command = [sys.executable, "-m", "tutti", "profile", given.model, "--serve"]
    command += ["--device", given.device, "--dtype", given.dtype, "--budget", f"{seconds:.0f}s"]
    command += ["--output", str(file)]
    if given.threads:
        command += ["--threads", str(given.threads)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return file


def arguments() -> argparse.Namespace:
    """Return what was asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--profile")
    parser.add_argument("--chip", help="of the catalog; default H200, or CPU")
    parser.add_argument("--device")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument(
        "--scale", type=float, default=1.0, help="counts of requests, without --minutes"
    )
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--load", type=float, default=0.6)
    parser.add_argument("--clock", choices=("day", "processor"), default="day")
    parser.add_argument("--simulate-only", action="store_true")
    given = parser.parse_args()
    given.cpu = given.device == "cpu"
    given.chip = given.chip or ("CPU" if given.cpu else "H200")
    if given.cpu:
        given.threads = given.threads or 1
    if given.profile is None and not given.cpu:
        given.profile = "h200"
    return given


def main() -> None:
    """Print both, workload by workload: as words, and as lines of JSON."""
    given = arguments()
    if given.threads:
        os.environ["OMP_NUM_THREADS"] = str(given.threads)  # before torch is imported
    from tutti.bench.serving_steps import cut

    model, dtype = cut(load_model(given.model), given.layers), Dtype(given.dtype)
    left_s = 60.0 * (given.minutes or 3.0)
    profile = given.profile or str(profiled(given, PROFILED * left_s))
    pool = {"name": "pool", "chip": given.chip, "nodes": 1}
    cluster = Cluster.from_document({"name": "one", "pools": [pool]}, Place("one"))
    file = Path(profile)
    chip = MeasuredChip(Profile.load(file) if file.exists() else Profile.find(profile), dtype)
    engine = None if given.simulate_only else engine_of(model, given.device, dtype, given.slots)
    pages = given.slots * 96 + LONGEST // 16
    plan = plan_of(model, cluster, given.slots, pages, 2048)
    vocabulary = min(model.vocab, 32000)
    if given.minutes:
        share = left_s * (1.0 - (0.0 if given.profile else PROFILED)) * 0.9 / (len(KINDS) - 1)
        works = within(share, given.load, SHORT if given.cpu else 1.0, vocabulary,
                       lambda work: simulated(plan, chip, "pool", work))  # fmt: skip
    else:
        works = [drawn(k, max(4, int(k.count * given.scale)), k.per_s, 1.0, vocabulary)
                 for k in KINDS]  # fmt: skip
    for work in works:
        predicted = simulated(plan, chip, "pool", work)
        real = None if engine is None else measured(engine, work, Clock(given.clock))
        show(work, predicted, real)


def show(work: Workload, predicted: Figures, real: Figures | None) -> None:
    """Print a workload's row."""
    print(f"{work.name}: simulated {predicted.tokens_per_s:,.0f} tokens/s, "
          f"{1e3 * predicted.per_token_s:.2f} ms a token, first token p99 "
          f"{1e3 * predicted.first_p99_s:.0f} ms", flush=True)  # fmt: skip
    row = {"workload": work.name, "requests": len(work.prompts), "simulated": vars(predicted)}
    if real is not None:
        pairs = zip(vars(predicted).values(), vars(real).values(), strict=True)
        errors = [p / r - 1 for p, r in pairs]
        print(f"{'':{len(work.name)}}  measured  {real.tokens_per_s:,.0f} tokens/s, "
              f"{1e3 * real.per_token_s:.2f} ms, {1e3 * real.first_p99_s:.0f} ms; error "
              + ", ".join(f"{e:+.1%}" for e in errors), flush=True)  # fmt: skip
        row |= {"measured": vars(real), "errors": [round(e, 4) for e in errors]}
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
