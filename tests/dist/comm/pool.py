"""Rank processes with a store beside them."""

from __future__ import annotations

import torch.distributed as dist

from tutti.comm.ranks import LocalRanks


class RankPool(LocalRanks):
    """Ranks that meet at a store of this process."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)

    @property
    def port(self) -> int:
        return self.store.port
