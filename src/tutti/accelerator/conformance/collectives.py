"""Checks of a device's collective backend: a world of one, and of two where there are two devices.

Each world runs in processes of its own, so that a backend that hangs or crashes is an outcome and
not the end of the check, and so that a process group of the caller is left alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import FileStore

from tutti.accelerator.accelerator import Accelerator
from tutti.accelerator.conformance.device import Unsupported, checked
from tutti.accelerator.conformance.report import Outcome
from tutti.accelerator.find import count, kinds, open_accelerator

PATIENCE_S = 120
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def check(accelerator: Accelerator) -> Iterator[Outcome]:
    """Yield an outcome per size of the world."""
    for world in (1, 2):
        name = f"collectives among {world}, {accelerator.collective_backend}"
        yield checked(name, lambda world=world: _world(accelerator, world))  # type: ignore[misc]


def _world(accelerator: Accelerator, world: int) -> str | None:
    if accelerator.name not in kinds():
        raise Unsupported(f"kind '{accelerator.name}' cannot be opened by name in another process")
    shared = accelerator.device.type == "cpu"
    if not shared and count(accelerator.name) < world:
        raise Unsupported(f"needs {world} devices; this machine has {count(accelerator.name)}")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [
                    sys.executable, "-m", __name__,
                    accelerator.name if shared else f"{accelerator.name}:{rank}",
                    str(rank), str(world), str(Path(folder) / "store"),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(world)
        ]  # fmt: skip
        return _ended(ranks)


def _ended(ranks: list[subprocess.Popen[str]]) -> str | None:
    """Wait for all ranks and say what the first one that failed says."""
    wrong: list[str] = []
    try:
        for number, rank in enumerate(ranks):
            out, err = rank.communicate(timeout=PATIENCE_S)
            if rank.returncode:
                last = (err or out).strip().splitlines()
                wrong.append(f"rank {number}: {last[-1] if last else f'exit {rank.returncode}'}")
    except subprocess.TimeoutExpired:
        wrong.append(f"not done after {PATIENCE_S} s")
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.communicate()
    return wrong[0] if wrong else None


# --- in the ranks ----------------------------------------------------------------------------


def _newest(*names: str) -> Callable[..., Any]:
    """Return the first of torch's functions that there is: newer releases renamed some."""
    newest: Callable[..., Any] = next(
        getattr(distributed, name) for name in names if hasattr(distributed, name)
    )
    return newest


def _filled(accelerator: Accelerator, size: int, value: float, dtype: torch.dtype) -> Tensor:
    return torch.full((size,), value, dtype=dtype, device=accelerator.device)


def _all_reduce(accelerator: Accelerator, rank: int, world: int, dtype: torch.dtype) -> None:
    for operation, wanted in (
        (distributed.ReduceOp.SUM, world * (world + 1) / 2),
        (distributed.ReduceOp.MAX, float(world)),
    ):
        tensor = _filled(accelerator, 5, rank + 1, dtype)
        distributed.all_reduce(tensor, op=operation)
        _expect(tensor, [wanted] * 5)


def _broadcast(accelerator: Accelerator, rank: int, world: int, dtype: torch.dtype) -> None:
    tensor = _filled(accelerator, 3, rank, dtype)
    distributed.broadcast(tensor, src=world - 1)
    _expect(tensor, [world - 1] * 3)


def _all_gather(accelerator: Accelerator, rank: int, world: int, dtype: torch.dtype) -> None:
    into = _filled(accelerator, 2 * world, 0, dtype)
    _newest("all_gather_single", "all_gather_into_tensor")(
        into, _filled(accelerator, 2, rank + 1, dtype)
    )
    _expect(into, [float(r + 1) for r in range(world) for _ in range(2)])


def _reduce_scatter(accelerator: Accelerator, rank: int, world: int, dtype: torch.dtype) -> None:
    into = _filled(accelerator, 2, 0, dtype)
    parts = torch.arange(2 * world, device=accelerator.device).to(dtype)
    _newest("reduce_scatter_single", "reduce_scatter_tensor")(into, parts)
    _expect(into, [world * (2 * rank), world * (2 * rank + 1)])


def _all_to_all(accelerator: Accelerator, rank: int, world: int, dtype: torch.dtype) -> None:
    """Send rank r r + 1 elements: unequal parts, as experts have them."""
    counts = [r + 1 for r in range(world)]
    send = _filled(accelerator, sum(counts), rank, dtype)
    into = _filled(accelerator, world * (rank + 1), -1, dtype)
    distributed.all_to_all_single(into, send, [rank + 1] * world, counts)
    _expect(into, [float(r) for r in range(world) for _ in range(rank + 1)])


def _point_to_point(accelerator: Accelerator, rank: int, world: int, dtype: torch.dtype) -> None:
    if world == 1:
        return
    into = _filled(accelerator, 4, 0, dtype)
    own = _filled(accelerator, 4, rank + 1, dtype)
    work = distributed.batch_isend_irecv(
        [
            distributed.P2POp(distributed.isend, own, (rank + 1) % world),
            distributed.P2POp(distributed.irecv, into, (rank - 1) % world),
        ]
    )
    for one in work:
        one.wait()
    _expect(into, [float((rank - 1) % world + 1)] * 4)


COLLECTIVES: dict[str, Callable[[Accelerator, int, int, torch.dtype], None]] = {
    "all-reduce": _all_reduce,
    "broadcast": _broadcast,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
    "send and receive": _point_to_point,
}


def _expect(tensor: Tensor, wanted: list[float]) -> None:
    values = tensor.cpu().double().tolist()
    if values != wanted:
        raise ValueError(f"{values}, expected {wanted}")


def rank_main(device: str, rank: int, world: int, store: str) -> None:
    """Run every collective in every dtype as one rank."""
    accelerator = open_accelerator(device)
    distributed.init_process_group(
        accelerator.collective_backend,
        store=FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=PATIENCE_S / 2),
    )
    for name, collective in COLLECTIVES.items():
        for dtype in DTYPES:
            try:
                collective(accelerator, rank, world, dtype)
            except Exception as error:
                text = str(error).splitlines()[0] if str(error) else type(error).__name__
                sys.exit(f"{name} of {str(dtype).removeprefix('torch.')}: {text}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    rank_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
