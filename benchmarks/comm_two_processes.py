"""Two processes on one GPU (NVIDIA MPS): all-reduce through pinned shared memory, gloo beside it.

    python benchmarks/comm_two_processes.py [--mib 64] [--repeats 20]

NCCL refuses two ranks on one GPU; gloo copies whole buffers. Ours goes device → pinned ring →
device in pieces. Results must be equal to the last bit to one addition on the device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import get_context
from typing import Any


def rank_main(rank: int, folder: str, mib: int, repeats: int, answers: Any) -> None:
    os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = "50"
    import torch
    import torch.distributed as dist

    from tutti.accelerator import open_accelerator
    from tutti.comm import Place, Settings, connect

    accelerator = open_accelerator()
    device = accelerator.device
    elements = (mib << 20) // 4
    store = dist.FileStore(f"{folder}/gloo", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    figures = {}
    mine = [
        torch.randn(elements, generator=torch.Generator().manual_seed(r)).to(device)
        for r in range(2)
    ]
    due = mine[0] + mine[1]
    for fragment in (1, 2, 4):
        comm = connect(
            dist.FileStore(f"{folder}/ours{fragment}", 2),
            rank,
            2,
            place=Place(device="the same"),
            accelerator=accelerator,
            settings=Settings(fragment_bytes=fragment << 20, ring_bytes=32 << 20),
            timeout_s=60.0,
        )
        tensor = mine[rank].clone()
        comm.all_reduce(tensor).wait()
        figures[f"ours_bit_equal_{fragment}mib"] = bool(torch.equal(tensor, due))
        samples: dict[str, list[float]] = {"ours": [], "gloo": []}
        for _ in range(repeats):
            for name in samples if fragment == 2 else ("ours",):
                tensor.copy_(mine[rank])
                torch.cuda.synchronize()
                comm.barrier().wait()
                started = time.perf_counter()
                if name == "ours":
                    comm.all_reduce(tensor).wait()
                else:
                    dist.all_reduce(tensor)
                torch.cuda.synchronize()
                samples[name].append(time.perf_counter() - started)
        figures[f"ours_ms_{fragment}mib_pieces"] = statistics.median(samples["ours"]) * 1e3
        if samples["gloo"]:
            figures["gloo_ms"] = statistics.median(samples["gloo"]) * 1e3
        comm.close()
    dist.destroy_process_group()
    answers.put((rank, figures))


@contextlib.contextmanager
def mps() -> Iterator[bool]:
    """Run NVIDIA's multi-process service, where it is installed."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("PIPE", "LOG"):
            os.environ[f"CUDA_MPS_{name}_DIRECTORY"] = folder
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    context = get_context("spawn")
    with mps() as shared, tempfile.TemporaryDirectory() as folder:
        answers = context.Queue()
        ranks = [
            context.Process(
                target=rank_main, args=(rank, folder, options.mib, options.repeats, answers)
            )
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        found = dict(answers.get(timeout=300) for _ in ranks)
        for process in ranks:
            process.join()
    print(json.dumps({"mib": options.mib, "mps": shared, "ranks": found}, indent=1))


if __name__ == "__main__":
    main()
