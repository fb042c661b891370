"""One GPU as a real mixed cluster: MPS splits it into unequal chips that run at the same time.

    python benchmarks/mixed_gpus.py --parts 75,25            # on a machine with one large GPU
    python benchmarks/mixed_gpus.py --rehearse               # the same script on CPU ranks, tiny

Profiles each part while the others train, plans, trains planned and uniform, each part alone (at
the same time: they share one device), and the same batch on the whole GPU; prints JSON with
predicted beside measured. Boundaries and gradients go through host memory, not CUDA IPC. With
`--only` and a folder of `--profiles` the comparison can be made in several calls.

Not every part can be used: under MPS cuBLAS multiplies wrongly on some numbers of processors, among
them 98 (75 %), as `mps_check.py --probe` shows. 25, 33 and 50 % are right on an H200, 66 % only on
some cards: the profile refuses it there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tutti.document import Place, build
from tutti.errors import InputError
from tutti.hardware.profile import Profile
from tutti.train.run.config import TrainConfig
from tutti.train.run.planning import Job, prepare
from tutti.train.run.result import TrainResult
from tutti.train.run.trainer import run_local

PEAK, MEMORY = 989e12, 141e9
# Bytes/s between two processes through host memory: with it the model prices the all-reduce of
# 64 MiB at the 5.5 ms that comm_two_processes.py measures.
LINK = 15.4e9
MOST_SEQUENCES = 4  # of a micro-batch, whose shapes are measured
RUNS = ("planned", "uniform", "alone", "whole")
BEGIN = time.perf_counter()
NAMES = ("first", "second", "third")


def say(text: object) -> None:
    """Print with the time that has passed."""
    print(f"{time.perf_counter() - BEGIN:6.1f} s  {text}", file=sys.stderr, flush=True)


def cluster_text(parts: list[int], *, rehearse: bool, memory: float = MEMORY) -> str:
    """Return the cluster file: one pool of one chip per part, with its part of the memory."""
    lines = ["name: one-gpu", "chips:"]
    for part in dict.fromkeys(parts):
        share = part / 100
        peak = f"{(2e11 if rehearse else PEAK) * share:.4g}"
        own = 8e9 if rehearse and memory == MEMORY else memory * share * 0.93
        lines += [
            f"  - name: part-{part}",
            f"    vendor: {'generic' if rehearse else 'NVIDIA'}",
            f"    peak: {{bf16: {peak}, fp32: {peak}}}",
            f"    memory_bytes: {own:.4g}",
            f"    memory_bandwidth: {4.8e12 * share:.4g}",
            f"    compute_units: {max(1, round(132 * share))}",
        ]
    lines.append("nodes:")
    for i, part in enumerate(parts):
        lines += [
            f"  - name: node-{i}",
            f"    chip: part-{part}",
            "    num_chips: 1",
            "    host: {cores: 16, memory_bytes: 128e9, memory_bandwidth: 200e9, "
            "device_bandwidth: 55e9, numa_nodes: 1}",
        ]
    lines.append("pools:")
    lines += [f"  - {{name: {NAMES[i]}, node: node-{i}}}" for i in range(len(parts))]
    if len(parts) > 1:
        lines += ["fabric:", "  links:"]
    for i in range(len(parts)):
        for j in range(i):
            lines.append(
                f"    - {{pools: [{NAMES[j]}, {NAMES[i]}], bandwidth: {LINK:.4g}, "
                "latency_s: 100e-6, same_host: true}"
            )
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def shared_device(scratch: Path):
    """Run NVIDIA's multi-process service while the block runs."""
    places = {
        "CUDA_MPS_PIPE_DIRECTORY": str(scratch / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(scratch / "log"),
    }
    for folder in places.values():
        Path(folder).mkdir()
    os.environ.update(places)
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
    try:
        yield
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=False)


def limits(part: int) -> dict[str, str]:
    """Return the environment of a process that may use a part of the device."""
    return {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(part)}


class Neighbours:
    """Processes that keep each part of the device busy, as it is when all of them train."""

    def __init__(self, parts: list[int], args: argparse.Namespace) -> None:
        command = [
            sys.executable, str(Path(__file__).with_name("neighbour.py")), "--model", args.model,
            "--tokens", str(MOST_SEQUENCES * args.length),
            "--device", "cpu" if args.rehearse else "cuda",
        ]  # fmt: skip
        self.processes = [
            subprocess.Popen(
                command, env={**os.environ, **limits(part)}, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )
            for part in parts
        ]  # fmt: skip

    def __enter__(self) -> Neighbours:
        for process in self.processes:
            assert process.stdout is not None
            if process.stdout.readline() != "busy\n":
                raise SystemExit("a neighbour does not train")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @contextlib.contextmanager
    def without(self, index: int):
        """Let one of them rest while the block runs."""
        self.processes[index].send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.processes[index].send_signal(signal.SIGCONT)


def profiles(parts: list[int], scratch: Path, args: argparse.Namespace) -> list[str]:
    """Measure each kind of part while the others train; return the profile files."""
    kept = {part: scratch / f"part-{part}.json" for part in dict.fromkeys(parts)}
    if not all(path.exists() for path in kept.values()):
        with Neighbours(parts, args) as neighbours:
            say("neighbours train")
            for part, path in kept.items():
                with neighbours.without(parts.index(part)):
                    profile(part, path, args)
                say(f"part {part} profiled")
    return [str(path) for path in kept.values()]


def profile(part: int, path: Path, args: argparse.Namespace) -> None:
    """Measure a part into a file."""
    command = [
        sys.executable, "-c", "from tutti.cli.main import run; run()", "profile", args.model,
        "-o", str(path), "--device", "cpu" if args.rehearse else "cuda",
        "--budget", f"{args.profile_s}s",
        "--tokens", f"{MOST_SEQUENCES * args.length},{args.length}",
        "--sequence-length", str(args.length), "--json",
    ]  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, **limits(part)}, stdout=subprocess.DEVNULL, check=False
    )
    if done.returncode:
        raise SystemExit(f"profiling part {part} failed")
    dataclasses.replace(Profile.load(path), chip=f"part-{part}").save(path)


def keep_traces(run: Path, folder: str, name: str) -> None:
    """Copy the traces of a run to a folder, if one was named."""
    for trace in sorted(run.rglob("*trace*.json*")) if folder else ():
        Path(folder).mkdir(parents=True, exist_ok=True)
        shutil.copy(trace, Path(folder) / f"{name}-{trace.name}")


def show(job: Job) -> None:
    """Print a plan in a line per pipeline."""
    for pipeline in job.plan.pipelines:
        stages = [(s.units, str(s.chips)) for s in pipeline.stages]
        say(f"{pipeline.micro_batches} micro-batches of {pipeline.micro_batch}: {stages}")


def learn(runs: Runs, args: argparse.Namespace) -> None:
    """Run the plan for a few steps and scale the profiles by what a step of it took."""
    job = runs.job("learning", args.batch, 3, trace_steps=[3])
    show(job)
    done = runs.run(job)
    say(f"learning: {done.seconds_per_step:.3f} s, predicted {done.predicted_s:.3f} s")
    found = []
    for part, name in {part: n for n, part in zip(NAMES, runs.parts, strict=False)}.items():
        path = runs.scratch / f"learned-part-{part}.json"
        command = [
            sys.executable, "-c", "from tutti.cli.main import run; run()", "validate", "--run",
            str(runs.scratch / "learning"), "--pool", name, "-o", str(path),
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        say(json.loads(path.read_text())["origin"])
        found.append(str(path))
    runs.profiles = found


class Runs:
    """The jobs of one comparison."""

    def __init__(
        self, scratch: Path, args: argparse.Namespace, parts: list[int], memory: float = MEMORY
    ) -> None:
        self.scratch, self.args, self.parts = scratch, args, parts
        self.cluster = scratch / "cluster.yaml"
        text = cluster_text(parts, rehearse=args.rehearse, memory=memory)
        self.cluster.write_text(text)
        self.profiles: list[str] = []

    def job(self, name: str, batch: int, steps: int, **more: object) -> Job:
        precision = "fp32" if self.args.rehearse else "bf16"
        traced = more.pop("trace_steps", [])
        options = {
            "sequence_length": self.args.length, "global_batch": batch, "precision": precision,
            "chip_profiles": self.profiles, "use_all_pools": True, "offload": False, **more,
        }  # fmt: skip
        written = {
            "model": self.args.model, "cluster": str(self.cluster), "steps": steps, "job": options,
            "data": {"train": [{"kind": "synthetic", "vocabulary": self.args.vocabulary}]},
            "start": "random",
            "optimizer": {"learning_rate": self.args.learning_rate, "schedule": "constant"},
            "checkpoints": {"final": False}, "output": str(self.scratch / name),
            "measure": {"trace_steps": traced},
        }  # fmt: skip
        return prepare(build(TrainConfig, written, Place(name)))

    def run(self, job: Job, steps: list[float] | None = None) -> TrainResult:
        """Run a job; its steps' seconds are added to the list."""
        of = {NAMES[i]: part for i, part in enumerate(self.parts)}
        chips = [c for _, _, s in job.plan.stages() for r in s.replicas for c in r.chips]
        threads = str(max(1, (os.cpu_count() or 1) // (2 * len(self.parts))))
        few = {"OMP_NUM_THREADS": threads}  # other jobs run at the same time
        environment = {rank: few | limits(of[chip.pool]) for rank, chip in enumerate(chips)}
        hear = functools.partial(self.hear, steps)
        return run_local(job, environment=environment, listener=hear, overwrite=True)

    def hear(self, steps: list[float] | None, event: object) -> None:
        if getattr(event, "kind", "") not in ("step", "warning") or event.rank != 0:
            return
        values = dict(event.values)
        if steps is not None and event.kind == "step":
            steps.append(values["seconds"])
        shown = {k: values[k] for k in ("step", "loss", "seconds", "text") if k in values}
        if values.get("step", 0) == 3:
            shown |= {
                pool: {k: round(v, 3) for k, v in found.items() if k.endswith("_s")}
                for pool, found in values.get("pools", {}).items()
            }
        say(shown)


def alone(runs: Runs, args: argparse.Namespace) -> dict[str, float]:
    """Run every part by itself, all at the same time; return the tokens per second of each.

    Each has a batch that takes it as long as the others theirs. Whole fours of sequences: an odd
    number would allow no micro-batch but one. Some begin earlier and some end later, by less than a
    step: the first and the last step of each, which may have the device to themselves, do not
    count. A part whose memory does not hold the model has what the parts leave over, too: alone it
    could not run at all otherwise.
    """
    found: dict[str, float] = {}
    named = list(zip(NAMES, runs.parts, strict=False))
    spare = 0.95 * MEMORY * (100 - sum(runs.parts)) / 100

    def job(name: str, part: int, batch: float) -> Job:
        # only the profiles of chips in the plan may be given
        only = [p for p in runs.profiles if p.endswith(f"part-{part}.json")]
        whole = max(4, 4 * round(batch / 4))
        asked = f"alone-{name}", whole, max(args.few, 4)
        try:
            return runs.job(*asked, pools=[name], chip_profiles=only)
        except InputError:
            folder = Path(tempfile.mkdtemp(dir=runs.scratch))
            larger = Runs(folder, args, runs.parts, MEMORY + spare * 100 / part)
            made = larger.job(*asked, pools=[name], chip_profiles=only)
            say(f"{name} alone has {made.cluster.pool(name).chip.memory_bytes / 1e9:.0f} GB")
            return made

    tried = {part: job(name, part, args.batch / len(named)) for name, part in named}
    paces = {part: trial.predicted().tokens_per_second for part, trial in tried.items()}
    every = sum(paces[part] for part in runs.parts)
    jobs = [job(name, part, args.batch * paces[part] / every) for name, part in named]
    say(f"alone: {[made.plan.job.global_batch for made in jobs]} sequences")

    def one(name: str, job: Job) -> None:
        seconds: list[float] = []
        runs.run(job, seconds)
        asked = job.plan.job
        tokens = asked.global_batch * asked.sequence_length
        found[name] = tokens / statistics.fmean(seconds[1:-1])

    threads = [threading.Thread(target=one, args=pair) for pair in zip(NAMES, jobs, strict=False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def compare(args: argparse.Namespace, scratch: Path) -> dict[str, object]:
    parts = [int(part) for part in args.parts.split(",")]
    runs = Runs(scratch, args, parts)
    kept = Path(args.profiles) if args.profiles else scratch
    kept.mkdir(parents=True, exist_ok=True)
    runs.profiles = profiles(parts, kept, args)
    say("profiled")
    result: dict[str, object] = {"parts": parts, "batch": args.batch}
    for _ in range(args.learn):
        learn(runs, args)
    if "planned" in args.only:
        narrowed = {"max_stages": args.max_stages} if args.max_stages else {}
        traced = [3] if args.traces else []
        job = runs.job("planned", args.batch, args.steps, trace_steps=traced, **narrowed)
        show(job)
        try:
            planned = runs.run(job)
        except Exception:
            for log in sorted((scratch / "planned" / "logs").iterdir()):
                print(log.name, log.read_text()[-3000:], file=sys.stderr)
            raise
        keep_traces(scratch / "planned", args.traces, "planned")
        result |= {
            "planned_s": planned.seconds_per_step,
            "predicted_s": planned.predicted_s,
            "error": planned.predicted_s / planned.seconds_per_step - 1,
            "losses": planned.losses,
        }
        say(f"planned: {planned.seconds_per_step:.3f} s, predicted {planned.predicted_s:.3f} s")
    if "alone" in args.only:
        by_name = alone(runs, args)
        together = sum(by_name.values())
        result["alone_tokens_per_s"] = by_name
        if "planned" in args.only:
            result["mixed_efficiency"] = planned.tokens_per_s / together
        say(f"alone: {together:.0f} tokens/s together; {result.get('mixed_efficiency')}")
    if "uniform" in args.only:
        uniform = runs.run(runs.job("uniform", args.batch, args.few, uniform=True))
        result["uniform_s"] = uniform.seconds_per_step
        if "planned" in args.only:
            result["planned_over_uniform"] = uniform.seconds_per_step / planned.seconds_per_step
        say(f"uniform: {uniform.seconds_per_step:.3f} s")
    if "whole" in args.only:
        whole = Runs(Path(tempfile.mkdtemp(dir=scratch)), args, [100])
        single = whole.run(whole.job("whole", args.batch, args.steps))
        result |= {"whole_gpu_s": single.seconds_per_step, "losses_whole": single.losses}
        if "planned" in args.only:
            result["largest_loss_difference"] = max(
                abs(a - b) / b for a, b in zip(planned.losses, single.losses, strict=True)
            )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="75,25")
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--vocabulary", type=int, default=0, help="of the data; few are learnt fast"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--few", type=int, default=6)
    parser.add_argument("--profile-s", type=int, default=30)
    parser.add_argument("--profiles", default="", help="keep profiles here, and use those there")
    parser.add_argument("--learn", type=int, default=1, help="short runs that scale the profiles")
    parser.add_argument("--only", default=",".join(RUNS), help=f"some of {', '.join(RUNS)}")
    parser.add_argument("--max-stages", type=int, default=0, help="of the plan; 0: as many as pay")
    parser.add_argument("--traces", default="", help="keep traces of the planned run here")
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    args.only = args.only.split(",")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        scratch = Path(folder)
        if not args.rehearse:
            stack.enter_context(shared_device(scratch))
        print(json.dumps(compare(args, scratch), indent=1))


if __name__ == "__main__":
    main()
