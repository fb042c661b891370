"""The instances of `tutti bench plan`: cluster, model, job, and the bar that each has to pass."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One question to the planner."""

    name: str
    cluster: str
    model: str
    sequence_length: int
    global_batch: int
    bar: str
    quick: bool = False  # part of the default set
    half_links: bool = False  # also with the bandwidth between pools halved
    lose_node: bool = False  # also the time to re-plan after losing a node


def _small(size: int) -> Instance:
    return Instance(
        name=f"S{size}",
        cluster=f"S{size}",
        model="llama-2-13b",
        sequence_length=4096,
        global_batch=512,
        bar="≤ 1 s, gap ≤ 5 %",
        quick=True,
    )


_ALL = (
    *map(_small, (16, 32, 64, 128)),
    Instance(
        name="E100",
        cluster="E100",
        model="llama-2-70b",
        sequence_length=4096,
        global_batch=1024,
        bar="efficiency ≥ 97 %",
        quick=True,
        half_links=True,
    ),
    Instance(
        name="E1000",
        cluster="E1000",
        model="gpt-3-175b",
        sequence_length=2048,
        global_batch=4096,
        bar="efficiency ≥ 95 %",
        half_links=True,
    ),
    Instance(
        name="E1536",
        cluster="E1536",
        model="ernie-260b",
        sequence_length=2048,
        global_batch=6144,
        bar="efficiency ≥ 93 %",
        half_links=True,
    ),
    Instance(
        name="B1024",
        cluster="B1024",
        model="gpt-3-175b",
        sequence_length=2048,
        global_batch=4096,
        bar="≤ 10 s, gap ≤ 5 %, re-plan ≤ 2 s",
        lose_node=True,
    ),
    Instance(
        name="M1024",
        cluster="B1024",
        model="deepseek-v3",
        sequence_length=4096,
        global_batch=4096,
        bar="≤ 30 s, gap ≤ 10 %",
    ),
    Instance(
        name="H16384",
        cluster="H16384",
        model="gpt-1t",
        sequence_length=2048,
        global_batch=16384,
        bar="≤ 60 s",
    ),
)
INSTANCES = {instance.name: instance for instance in _ALL}
QUICK = tuple(instance.name for instance in _ALL if instance.quick)
# Published CPU seconds of other planners on OPT-350M (the layer profiles' README): Metis, Sailor.
OPT_SIZES = (8, 16, 32, 64)
OPT_PEERS = {8: (1.3, 0.03), 16: (16.4, 0.07), 32: (12.0, 0.34), 64: (3.2, 0.94)}
