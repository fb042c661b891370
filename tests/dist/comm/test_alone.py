"""A job of one rank: every operation is a copy, and nothing is sent."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tutti.comm import connect


def test_one_rank_alone() -> None:
    comm = connect(dist.HashStore(), 0, 1)
    try:
        tensor = torch.arange(5.0)
        assert torch.equal(comm.all_reduce(tensor.clone()).wait(), tensor)
        assert torch.equal(comm.all_gather(tensor).wait(), tensor)
        assert torch.equal(comm.reduce_scatter(tensor).wait(), tensor)
        assert torch.equal(comm.all_to_all(tensor).wait(), tensor)
        assert torch.equal(comm.broadcast(tensor.clone(), 0).wait(), tensor)
        assert torch.equal(comm.gather(tensor, 0).wait(), tensor)
        out = torch.empty(5)
        assert torch.equal(comm.scatter(out, 0, tensor).wait(), tensor)
        comm.barrier().wait()
        assert comm.gather_values({"x": [1, None]}) == [{"x": [1, None]}]
        assert comm.gather_values("x", root=0) == ["x"]
        assert comm.broadcast_value("y", 0) == "y"
        again = comm.subgroup([0])
        assert again is not None
        assert again.all_reduce(torch.ones(2), accumulate=torch.float64).wait().tolist() == [1, 1]
    finally:
        comm.close()
