"""Chains of one stage, as tests of how a batch is shared out need them."""

from __future__ import annotations

from tutti.plan.job import ScheduleKind
from tutti.search.pricing.unit_tables import Config
from tutti.search.strategy.coarse_chain import Chain, ScheduleOption


def one_stage(
    copies: int, sequences: int, *, pool: str = "pool", pace: float = 1.0, fill: float = 0.0
) -> Chain:
    """Copies that each take so many sequences of a micro-batch, in `pace` seconds."""
    return Chain(
        configs=(Config(pool, sequences=sequences),),
        stages=(1,),
        copies=copies,
        sequences=sequences,
        schedule=ScheduleOption(kind=ScheduleKind.ONE_F_ONE_B),
        shard=0,
        pace=pace,
        fill=fill,
        closing=0.0,
    )
