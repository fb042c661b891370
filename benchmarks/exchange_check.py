"""Many large messages in flight between two processes on one device, each checked to the bit.

    python benchmarks/exchange_check.py [cpu]

The sender computes what it sends just before (so that a copy that does not wait for compute shows),
the receiver's buffers are memory that compute has just let go.
"""

from __future__ import annotations

import os
import sys
import time

import torch

from tutti.accelerator import open_accelerator
from tutti.comm.connect import connect
from tutti.launch.secret import SECRET, new_secret
from tutti.ranks.local_processes import free_port
from tutti.ranks.standing_processes import StandingRanks


def one(
    rank: int, port: int, device: str, rows: int, count: int, busy: int
) -> tuple[int, float, str]:
    from datetime import timedelta

    from torch._C._distributed_c10d import TCPStore

    accelerator = open_accelerator(device)
    store = TCPStore("127.0.0.1", port, None, is_master=rank == 0, wait_for_workers=False,
                     timeout=timedelta(seconds=60))  # fmt: skip
    comm = connect(store, rank, 2, accelerator=accelerator, timeout_s=60)
    bad, first = 0, ""
    base = torch.arange(rows * 2048, device=accelerator.device).view(rows, 2048) % 251
    weight = torch.randn(2048, 2048, device=accelerator.device, dtype=torch.bfloat16) * 0.01
    begin = time.perf_counter()
    works, got = [], []
    for i in range(count):
        x = torch.randn(rows, 2048, device=accelerator.device, dtype=torch.bfloat16)
        for _ in range(busy):
            x = torch.tanh(x @ weight)
        if rank == 0:
            message = (base + i).to(torch.bfloat16) + 0 * x
            works.append(comm.exchange([(message, 1)], [], channel="a"))
            answer = torch.empty_like(message)
            works.append(comm.exchange([], [(answer, 1)], channel="b"))
            got.append((works[-1], answer, i))
        else:
            arrived = torch.empty(rows, 2048, device=accelerator.device, dtype=torch.bfloat16)
            work = comm.exchange([], [(arrived, 0)], channel="a")
            work.wait()
            expected = (base + i).to(torch.bfloat16)
            wrong = int((arrived != expected).sum())
            if wrong and not first:
                where = (arrived != expected).nonzero()[0].tolist()
                first = f"message {i}: {wrong} wrong, first at {where}: {arrived[tuple(where)]}"
            bad += wrong > 0
            works.append(comm.exchange([(arrived + 1, 0)], [], channel="b"))
    for work, answer, i in got:
        work.wait()
        expected = (base + i).to(torch.bfloat16) + 1
        wrong = int((answer != expected).sum())
        if wrong and not first:
            first = f"answer {i}: {wrong} wrong"
        bad += wrong > 0
    for work in works:
        work.wait()
    comm.barrier().wait()
    comm.close()
    return bad, time.perf_counter() - begin, first


def main() -> None:
    os.environ.setdefault(SECRET, new_secret())
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    ranks = StandingRanks(2)
    for rows, count, busy in ((16, 50, 2), (512, 40, 4), (4096, 40, 4)):
        print(rows, ranks.run(one, [0, 1], free_port(), device, rows, count, busy, timeout_s=120))
    ranks.close()


if __name__ == "__main__":
    main()
