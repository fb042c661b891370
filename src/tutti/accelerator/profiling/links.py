"""Links of a device: its memory, the way to and from the host, and to other ranks.

Each is α + bytes ÷ β: α of the smallest transfer, β of what a large one takes beyond it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch

from tutti.accelerator.accelerator import Accelerator
from tutti.accelerator.profiling.timer import Run, Samples, Timer
from tutti.hardware.profile import LinkFigure
from tutti.launch.secret import all_here

SMALL_BYTES = 4096
LARGE_BYTES = 1 << 28
HOST_LARGE_BYTES = 1 << 26  # where the host's own memory is the device's
SAMPLES = 7
PEER_BYTES = 1 << 24
PEER_ROUNDS = 20


def device_links(accelerator: Accelerator, timer: Timer) -> list[LinkFigure]:
    """Return memory bandwidth and, where there is a host beside the device, the copies."""
    large = LARGE_BYTES if timer.issues else HOST_LARGE_BYTES
    large = min(large, max(1 << 20, accelerator.memory().total // 64))
    device = accelerator.device

    def on_device(size: int) -> Run:
        source = torch.zeros(size // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    figures = [_figure("memory", timer, on_device, large)]
    if not timer.issues:
        return figures

    def to_device(size: int) -> Run:
        host = accelerator.pinned((size,), torch.uint8)
        target = torch.empty(size, dtype=torch.uint8, device=device)
        return lambda: target.copy_(host, non_blocking=True)

    def to_host(size: int) -> Run:
        host = accelerator.pinned((size,), torch.uint8)
        source = torch.zeros(size, dtype=torch.uint8, device=device)
        return lambda: host.copy_(source, non_blocking=True)

    figures.append(_figure("host_to_device", timer, to_device, large))
    figures.append(_figure("device_to_host", timer, to_host, large))
    return figures


def _figure(kind: str, timer: Timer, make: Callable[[int], Run], large: int) -> LinkFigure:
    times = []
    for size in (SMALL_BYTES, large):
        run, samples = make(size), Samples()
        run()
        calls = 20 if size == SMALL_BYTES else 1
        for _ in range(SAMPLES):
            timer.sample(run, calls, samples)
        times.append(samples.median)
    small, whole = times
    return LinkFigure(
        kind=kind,
        latency_s=small,
        bandwidth=(large - SMALL_BYTES) / max(whole - small, 0.05 * whole),
    )


# --- ranks -----------------------------------------------------------------------------------


def num_ranks() -> int:
    """Return how many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Return the number of this process."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Return the number of this process on its node."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def peer_links(accelerator: Accelerator) -> list[LinkFigure]:
    """Return point-to-point figures between rank 0 and the others, each measured alone.

    "peer" is between ranks of one node, "peer_node" between nodes. All ranks must call it.
    """
    from torch import distributed

    if all_here(os.environ):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(accelerator.collective_backend)
    try:
        own, count = distributed.get_rank(), distributed.get_world_size()
        node = torch.tensor([int(os.environ.get("GROUP_RANK", "0"))], device=accelerator.device)
        gathered = [torch.zeros_like(node) for _ in range(count)]
        distributed.all_gather(gathered, node)
        nodes = [int(node) for node in gathered]
        pairs_by_kind: dict[str, list[tuple[float, float]]] = {}
        for other in range(1, count):
            distributed.barrier()
            if own in (0, other):
                kind = "peer" if nodes[0] == nodes[other] else "peer_node"
                pairs_by_kind.setdefault(kind, []).append(_ping_pong(accelerator, own, other - own))
        distributed.barrier()
    finally:
        distributed.destroy_process_group()
    return [
        LinkFigure(
            kind=kind,
            latency_s=statistics.median(latency for latency, _ in pairs),
            bandwidth=statistics.median(bandwidth for _, bandwidth in pairs),
        )
        for kind, pairs in pairs_by_kind.items()
    ]


def _ping_pong(accelerator: Accelerator, own: int, other: int) -> tuple[float, float]:
    """Return latency and bandwidth of one direction: half of there and back."""
    from torch import distributed

    times = []
    for size, rounds in ((8, PEER_ROUNDS), (PEER_BYTES, PEER_ROUNDS // 4)):
        tensor = torch.zeros(size, dtype=torch.uint8, device=accelerator.device)
        samples = []
        for _ in range(rounds + 2):
            start = time.perf_counter()
            for sends in (True, False):
                if sends == (own == 0):
                    distributed.send(tensor, other)
                else:
                    distributed.recv(tensor, other)
            accelerator.synchronize()
            samples.append((time.perf_counter() - start) / 2)
        times.append(statistics.median(samples[2:]))
    small, whole = times
    return small, PEER_BYTES / max(whole - small, 0.05 * whole)
