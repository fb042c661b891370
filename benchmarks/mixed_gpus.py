"""One GPU as a real mixed cluster: MPS splits it into unequal chips that run at the same time.

    python benchmarks/mixed_gpus.py --parts 75,25            # on a machine with one large GPU
    python benchmarks/mixed_gpus.py --rehearse               # the same script on CPU ranks, tiny

Profiles each part while the others are busy, plans, trains planned and uniform, each part alone (at
the same time: they share one device), and the same batch on the whole GPU; prints JSON with
predicted beside measured. Boundaries and gradients go through host memory, not CUDA IPC.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tutti.document import Place, build
from tutti.hardware.profile import Profile
from tutti.train.run.config import TrainConfig
from tutti.train.run.planning import Job, prepare
from tutti.train.run.trainer import TrainResult, run_local

PEAK, MEMORY = 989e12, 141e9
NAMES = ("first", "second", "third")


def cluster_text(parts: list[int], *, rehearse: bool, memory: float = MEMORY) -> str:
    """Return the cluster file: one pool of one chip per part, with its part of the memory."""
    lines = ["name: one-gpu", "chips:"]
    for part in parts:
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
            "device_bandwidth: 40e9, numa_nodes: 1}",
        ]
    lines.append("pools:")
    lines += [f"  - {{name: {NAMES[i]}, node: node-{i}}}" for i in range(len(parts))]
    if len(parts) > 1:
        lines += ["fabric:", "  links:"]
    for i in range(len(parts)):
        for j in range(i):
            lines.append(
                f"    - {{pools: [{NAMES[j]}, {NAMES[i]}], bandwidth: 6e9, latency_s: 100e-6, "
                "same_host: true}"
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


def profiles(parts: list[int], scratch: Path, args: argparse.Namespace) -> list[str]:
    """Measure all parts at the same time; return the profile files."""
    code = "from tutti.cli.main import run; run()"
    running = []
    for i, part in enumerate(parts):
        command = [
            sys.executable, "-c", code, "profile", args.model, "-o", str(scratch / f"raw-{i}.json"),
            "--device", "cpu" if args.rehearse else "cuda", "--budget", f"{args.profile_s}s",
            "--tokens", str(args.length), "--sequence-length", str(args.length), "--json",
        ]  # fmt: skip
        environment = {**os.environ, **limits(part)}
        running.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
    found = []
    for i, (part, process) in enumerate(zip(parts, running, strict=True)):
        if process.wait():
            raise SystemExit(f"profiling part {part} failed")
        measured = dataclasses.replace(Profile.load(scratch / f"raw-{i}.json"), chip=f"part-{part}")
        measured.save(scratch / f"part-{part}.json")
        found.append(str(scratch / f"part-{part}.json"))
    return list(dict.fromkeys(found))


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
        options = {
            "sequence_length": self.args.length, "global_batch": batch, "precision": precision,
            "chip_profiles": self.profiles, "use_all_pools": True, "offload": False, **more,
        }  # fmt: skip
        written = {
            "model": self.args.model, "cluster": str(self.cluster), "steps": steps, "job": options,
            "data": {"train": [{"kind": "synthetic"}]}, "start": "random",
            "optimizer": {"learning_rate": 1e-4, "schedule": "constant"},
            "checkpoints": {"final": False}, "output": str(self.scratch / name),
        }  # fmt: skip
        return prepare(build(TrainConfig, written, Place(name)))

    def run(self, job: Job) -> TrainResult:
        of = {NAMES[i]: part for i, part in enumerate(self.parts)}
        chips = [c for _, _, s in job.plan.stages() for r in s.replicas for c in r.chips]
        environment = {rank: limits(of[chip.pool]) for rank, chip in enumerate(chips)}
        return run_local(job, environment=environment, listener=self.hear)

    def hear(self, event: object) -> None:
        if getattr(event, "kind", "") in ("step", "warning") and event.rank == 0:
            values = dict(event.values)
            shown = {k: values[k] for k in ("step", "loss", "seconds", "text") if k in values}
            if values.get("step", 0) in (2, 5) and "pools" in values:
                shown["pools"] = values["pools"]
            print(shown, file=sys.stderr, flush=True)


def compare(args: argparse.Namespace, scratch: Path) -> dict[str, object]:
    parts = [int(part) for part in args.parts.split(",")]
    runs = Runs(scratch, args, parts)
    runs.profiles = profiles(parts, scratch, args)
    planned_job = runs.job("planned", args.batch, args.steps)
    for pipeline in planned_job.plan.pipelines:
        stages = [(s.units, str(s.chips)) for s in pipeline.stages]
        print(pipeline.micro_batch, pipeline.micro_batches, stages, file=sys.stderr)
    begin = time.perf_counter()
    try:
        planned = runs.run(planned_job)
    except Exception:
        for log in sorted((scratch / "planned" / "logs").iterdir()):
            print(log.name, log.read_text()[-3000:], file=sys.stderr)
        raise
    print(f"planned took {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    uniform = runs.run(runs.job("uniform", args.batch, args.few, uniform=True))
    alone: dict[str, TrainResult] = {}

    def one(i: int) -> None:
        share = -(-args.batch * parts[i] // 100)
        only = [p for p in runs.profiles if p.endswith(f"part-{parts[i]}.json")]
        # only the profiles of chips in the plan may be given
        job = runs.job(f"alone-{i}", share, args.few, pools=[NAMES[i]], chip_profiles=only)
        alone[NAMES[i]] = runs.run(job)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole = Runs(Path(tempfile.mkdtemp(dir=scratch)), args, [100])
    single = whole.run(whole.job("whole", args.batch, args.steps))
    together = sum(found.tokens_per_s for found in alone.values())
    worst = max(abs(a - b) / b for a, b in zip(planned.losses, single.losses, strict=True))
    return {
        "parts": parts,
        "planned_s": planned.seconds_per_step,
        "predicted_s": planned.predicted_s,
        "error": planned.predicted_s / planned.seconds_per_step - 1,
        "uniform_s": uniform.seconds_per_step,
        "planned_over_uniform": uniform.seconds_per_step / planned.seconds_per_step,
        "alone_tokens_per_s": {name: found.tokens_per_s for name, found in alone.items()},
        "mixed_efficiency": planned.tokens_per_s / together,
        "whole_gpu_s": single.seconds_per_step,
        "largest_loss_difference": worst,
        "losses": planned.losses,
        "losses_whole": single.losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="75,25")
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--few", type=int, default=6)
    parser.add_argument("--profile-s", type=int, default=20)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        scratch = Path(folder)
        if not args.rehearse:
            stack.enter_context(shared_device(scratch))
        print(json.dumps(compare(args, scratch), indent=1))


if __name__ == "__main__":
    main()
