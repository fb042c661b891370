"""Collectives beside products over real connections: the bits of those in turn, no byte more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import FileStore

from tests.support.rank_pool import SECRET, RankPool
from tests.support.rank_training import joined
from tutti.bench.emulated_network import BedSpec, bed_ranks, why_not
from tutti.bench.overlap import same_bits
from tutti.comm import connect

CASES: tuple[tuple[Any, int], ...] = (
    ("products", 1), ("products", 2), ("products", 4), ("products", 7), ("experts", 1),
)  # fmt: skip


def compare(rank: int, port: int, job: str, size: int) -> list[bool]:
    torch.set_num_threads(1)
    comm = joined(rank, port, job, size)
    # 5 tokens: some ranks have nothing to give to some pieces
    found = [
        same_bits(comm, subject, chunks, tokens=tokens, hidden=256)
        for subject, chunks in CASES
        for tokens in (90, 5)
    ]
    comm.barrier().wait()
    comm.close()
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_pieces_beside_each_other_have_the_bits_of_those_in_turn(pool: RankPool, size: int) -> None:
    for found in pool.meet(compare, size, size, timeout_s=120.0):
        assert found == [True] * 2 * len(CASES)


def on_wires(rank: int, spec: BedSpec, folder: str, chunks: int, tokens: int, hidden: int) -> bool:
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/{chunks}", spec.world)
    comm = connect(store, rank, spec.world, place=spec.place(rank), timeout_s=120.0, secret=SECRET)
    found = same_bits(comm, "products", chunks, tokens=tokens, hidden=hidden)
    comm.barrier().wait()
    comm.close()
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("ranks", [2, 4])
def test_bits_and_bytes_on_rate_limited_wires(tmp_path: Path, ranks: int) -> None:
    """Two runs of a block: 8 collectives each, and two more where inputs are gathered again."""
    spec = BedSpec(name="overlap", nics=((200,),) * ranks)
    tokens, hidden = 512, 256
    once = tokens * hidden * 2 * (ranks - 1) / ranks
    with bed_ranks(spec) as (bed, processes):
        for chunks in (1, 2, 4, 8):
            before = bed.sent_bytes()
            arguments = (spec, str(tmp_path), chunks, tokens, hidden)
            answers = processes.run(on_wires, range(ranks), *arguments, timeout_s=300)
            after = bed.sent_bytes()
            assert answers == [True] * ranks
            due = 2 * (8 if chunks == 1 else 10) * once
            for host in range(ranks):
                sent = after[f"{host}/0"] - before[f"{host}/0"]
                assert due <= sent < 1.1 * due + 100_000, (chunks, host)
