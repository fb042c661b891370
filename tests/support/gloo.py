"""Groups of gloo processes as `nn` takes them, and a way to run a function in several processes."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from tests.support.rank_pool import IMPORTS
from tutti.nn.parallel.groups import Pending, Ready


class World:
    """All processes as one group, or some of them."""

    def __init__(self, ranks: Sequence[int] | None = None) -> None:
        self._group = None
        if ranks is not None:
            self._group = dist.new_group(list(ranks), use_local_synchronization=True)
        self.size, self.rank = dist.get_world_size(self._group), dist.get_rank(self._group)

    def all_reduce(self, x: Tensor, *, maximum: bool = False) -> Tensor:
        how = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        dist.all_reduce(x, op=how, group=self._group)
        return x

    def all_gather(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        assert x.shape[0] == rows[self.rank]
        parts = [x.new_zeros(max(rows), *x.shape[1:]) for _ in rows]
        padded = x.new_zeros(parts[0].shape)
        padded[: x.shape[0]] = x
        dist.all_gather(parts, padded, group=self._group)
        return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])

    def reduce_scatter(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        assert x.shape[0] == sum(rows)
        return self.all_reduce(x.clone()).split(list(rows))[self.rank].clone()

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        assert x.shape[0] == sum(send)
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x, list(receive), list(send), group=self._group)
        return out

    def start_all_reduce(self, x: Tensor) -> Pending:
        return Ready(self.all_reduce(x))

    def start_all_gather(self, x: Tensor, rows: Sequence[int]) -> Pending:
        return Ready(self.all_gather(x, rows))

    def start_reduce_scatter(self, x: Tensor, rows: Sequence[int]) -> Pending:
        return Ready(self.reduce_scatter(x, rows))

    def start_all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        return Ready(self.all_to_all(x, send, receive))


class GlooLinks:
    """Messages between processes, as far as serving needs them; tags tell channels apart."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        channel: str,
    ) -> Any:
        tag = zlib.crc32(channel.encode()) % 1000
        under_way = [dist.isend(tensor.contiguous(), peer, tag=tag) for peer, tensor in sends]
        under_way += [dist.irecv(tensor, peer, tag=tag) for peer, tensor in receives]
        return _All(under_way)

    def group(self, ranks: Sequence[int], *, use: str = "block") -> World:
        del use
        return World() if len(ranks) == dist.get_world_size() else World(ranks)


class _All:
    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()


def run_processes(function: Callable[[int], Any], count: int, folder: Path) -> list[Any]:
    """Return what the function (of a module) gives in each of `count` processes."""
    context = multiprocessing.get_context("forkserver")  # imports once for all processes
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context.set_forkserver_preload(list(IMPORTS))
    start = (function, count, port, str(folder))
    mp.start_processes(_entry, start, nprocs=count, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]


def _entry(rank: int, function: Callable[[int], Any], count: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, count, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    try:
        found = function(rank)
    except Exception:
        traceback.print_exc()
        raise
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
