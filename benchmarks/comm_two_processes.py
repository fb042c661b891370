"""Two processes on one GPU (NVIDIA MPS): all-reduce through pinned shared memory, gloo beside it.

    python benchmarks/comm_two_processes.py [--mib 64] [--repeats 20] [--device cuda]

NCCL refuses two ranks on one GPU; gloo copies whole buffers. Ours goes device → pinned ring →
device in pieces, without CUDA IPC. Results must be equal to the last bit to one addition on the
device. First the defaults, then other pieces, rings and chunks; contestants take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any


@dataclass(frozen=True)
class Variant:
    """How ours runs; None: as it chooses itself."""

    fragment_mib: int | None = None
    ring_mib: int | None = None
    chunks: int | None = None

    @property
    def name(self) -> str:
        if self.fragment_mib is None:
            return "ours, defaults"
        chunks = "" if self.chunks is None else f", {self.chunks} chunks"
        return f"ours, pieces {self.fragment_mib} MiB, ring {self.ring_mib} MiB{chunks}"


VARIANTS = (
    Variant(),
    *(Variant(fragment_mib=f, ring_mib=32) for f in (1, 2, 4, 8)),
    *(Variant(fragment_mib=2, ring_mib=32, chunks=c) for c in (2, 4, 8)),
    Variant(fragment_mib=4, ring_mib=64),
)


class Rank:
    """One of the two processes."""

    def __init__(self, rank: int, folder: str, options: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist

        from tutti.accelerator import open_accelerator

        self.rank, self.folder, self.options = rank, folder, options
        self.accelerator = open_accelerator(options.device)
        store = dist.FileStore(f"{folder}/gloo", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        elements = (options.mib << 20) // 4
        inputs = [torch.randn(elements, generator=_seeded(r)) for r in range(2)]
        self.mine = inputs[rank].to(self.accelerator.device)
        self.due = self.mine + inputs[1 - rank].to(self.accelerator.device)
        self.tensor = self.mine.clone()

    def connect(self, variant: Variant, *, sockets: bool = False) -> Any:
        """Return a communicator; `sockets`: as if the two were on different hosts."""
        import torch.distributed as dist

        from tutti.comm import Place, Settings, connect
        from tutti.comm.choice import Named

        settings = Settings()
        if variant.fragment_mib is not None and variant.ring_mib is not None:
            settings = Settings(
                device_fragment_bytes=variant.fragment_mib << 20,
                device_ring_bytes=variant.ring_mib << 20,
            )
        comm = connect(
            dist.FileStore(f"{self.folder}/{variant.name}{sockets}", 2),
            self.rank,
            2,
            place=Place(device="the same", host=f"host{self.rank}" if sockets else ""),
            accelerator=self.accelerator,
            settings=settings,
            timeout_s=60.0,
        )
        if variant.chunks is not None:
            comm.chooser.obey("all_reduce", Named(algorithm="ring", chunks=variant.chunks))
        return comm

    def timed(self, comm: Any, call: Callable[[], object]) -> float:
        """Return how long a call takes on fresh input, the device's part included."""
        self.tensor.copy_(self.mine)
        self.accelerator.synchronize()
        comm.barrier().wait()
        started = time.perf_counter()
        call()
        self.accelerator.synchronize()
        return time.perf_counter() - started

    def measure(self, variant: Variant, *, beside_gloo: bool, sockets: bool = False) -> None:
        """Measure one variant and say what was found."""
        import torch
        import torch.distributed as dist

        comm = self.connect(variant, sockets=sockets)
        calls: dict[str, Callable[[], object]] = {
            variant.name: lambda: comm.all_reduce(self.tensor).wait()
        }
        if beside_gloo:
            calls["gloo"] = lambda: dist.all_reduce(self.tensor)
        samples: dict[str, list[float]] = {name: [] for name in calls}
        equal = True
        for repeat in range(self.options.repeats + 2):
            for name, call in calls.items():
                seconds = self.timed(comm, call)
                equal &= name == "gloo" or bool(torch.equal(self.tensor, self.due))
                if repeat >= 2:  # the first pin memory
                    samples[name].append(seconds)
        comm.close()
        for name, found in samples.items():
            self.say(name, found, sockets, equal=None if name == "gloo" else equal)

    def say(self, name: str, seconds: list[float], sockets: bool, equal: bool | None) -> None:
        """Print a figure as one line of JSON."""
        if self.rank:
            return
        row = {
            "what": name + (" over sockets" if sockets else ""),
            "mib": self.options.mib,
            "median_ms": round(statistics.median(seconds) * 1e3, 2),
            "best_ms": round(min(seconds) * 1e3, 2),
            "worst_ms": round(max(seconds) * 1e3, 2),
            "bit_equal": equal,
        }
        print(json.dumps(row), flush=True)


def _seeded(rank: int) -> Any:
    import torch

    return torch.Generator().manual_seed(rank)


def rank_main(rank: int, folder: str, options: argparse.Namespace) -> None:
    """Run one rank."""
    import torch.distributed as dist

    one = Rank(rank, folder, options)
    for number, variant in enumerate(VARIANTS):
        one.measure(variant, beside_gloo=number == 0)
    one.measure(Variant(), beside_gloo=False, sockets=True)
    dist.destroy_process_group()


@contextlib.contextmanager
def mps() -> Iterator[bool]:
    """Run NVIDIA's multi-process service, where it is installed."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("PIPE", "LOG"):
            os.environ[f"CUDA_MPS_{name}_DIRECTORY"] = folder
        os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = "50"
        try:
            subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
        except (OSError, subprocess.CalledProcessError):
            yield False
            return
        try:
            yield True
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=False)


def main() -> None:
    """Start both ranks."""
    os.environ.setdefault("TUTTI_SECRET", secrets.token_hex(32))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default=None, help="cuda, cpu; the best that is here")
    options = parser.parse_args()
    context = get_context("spawn")
    with mps() as shared, tempfile.TemporaryDirectory() as folder:
        print(json.dumps({"mps": shared}), flush=True)
        ranks = [
            context.Process(target=rank_main, args=(rank, folder, options)) for rank in range(2)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    raise SystemExit(max(abs(process.exitcode or 0) for process in ranks))


if __name__ == "__main__":
    main()
