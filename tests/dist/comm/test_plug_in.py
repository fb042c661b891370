"""A transport that is not ours carries messages between the ranks that have it."""

from __future__ import annotations

from typing import Any

import torch

from tests.dist.comm.calls import SETTINGS
from tests.support.rank_pool import SECRET, RankPool
from tutti.comm import Place, connect, register_transport
from tutti.comm.frames import Tag
from tutti.comm.spans import Spans
from tutti.comm.transport.link import LinkOwner
from tutti.comm.transport.tcp import TcpLink

carried: list[int] = []


class CountingLink(TcpLink):
    """A link of somebody else's: it counts what it carries."""

    def send(self, tag: Tag, spans: Spans, done: Any, connections: int) -> None:
        carried.append(spans.num_bytes)
        super().send(tag, spans, done, connections)


def opens(owner: LinkOwner, peer: int, home: Place, away: Place) -> CountingLink:
    return CountingLink(owner, peer, home, away)


def reduced(rank: int, port: int, with_it: tuple[int, ...]) -> int:
    import torch.distributed as dist

    carried.clear()
    register_transport("direct-rdma", opens)
    place = Place(host=f"host{rank // 2}", transports=("direct-rdma",) if rank in with_it else ())
    name = "-".join(map(str, with_it))
    store = dist.PrefixStore(f"plug-in-{name}", dist.TCPStore("127.0.0.1", port))
    comm = connect(store, rank, 4, place=place, settings=SETTINGS, timeout_s=20.0, secret=SECRET)
    tensor = torch.full((5000,), float(rank))
    comm.all_reduce(tensor).wait()
    assert (tensor == 6).all()
    comm.barrier().wait()
    comm.close()
    return sum(carried)


def test_a_plug_in_carries_what_both_ends_have_it_for(pool: RankPool) -> None:
    assert all(pool.run(reduced, range(4), pool.port, (0, 1, 2, 3)))
    bytes_carried = pool.run(reduced, range(4), pool.port, (0, 2))
    assert bytes_carried[1] == bytes_carried[3] == 0
