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


def _read(row: str) -> Instance:
    name, cluster, model, length, batch, bar, also = (part.strip() for part in row.split("|"))
    return Instance(
        name=name,
        cluster=cluster,
        model=model,
        sequence_length=int(length),
        global_batch=int(batch),
        bar=bar,
        quick="quick" in also,
        half_links="half links" in also,
        lose_node="lose a node" in also,
    )


_ALL = tuple(
    map(
        _read,
        """\
S16    | S16    | llama-2-13b | 4096 | 512   | ≤ 1 s, gap ≤ 5 %                  | quick
S32    | S32    | llama-2-13b | 4096 | 512   | ≤ 1 s, gap ≤ 5 %                  | quick
S64    | S64    | llama-2-13b | 4096 | 512   | ≤ 1 s, gap ≤ 5 %                  | quick
S128   | S128   | llama-2-13b | 4096 | 512   | ≤ 1 s, gap ≤ 5 %                  | quick
E100   | E100   | llama-2-70b | 4096 | 1024  | efficiency ≥ 97 %                 | quick, half links
E1000  | E1000  | gpt-3-175b  | 2048 | 4096  | efficiency ≥ 95 %                 | half links
E1536  | E1536  | ernie-260b  | 2048 | 6144  | efficiency ≥ 93 %                 | half links
B1024  | B1024  | gpt-3-175b  | 2048 | 4096  | ≤ 10 s, gap ≤ 5 %, re-plan ≤ 2 s  | lose a node
M1024  | B1024  | deepseek-v3 | 4096 | 4096  | ≤ 30 s, gap ≤ 10 %                |
H16384 | H16384 | gpt-1t      | 2048 | 16384 | ≤ 60 s                            |
""".splitlines(),
    )
)
INSTANCES = {instance.name: instance for instance in _ALL}
QUICK = tuple(instance.name for instance in _ALL if instance.quick)
# Published CPU seconds of other planners on OPT-350M (the layer profiles' README): Metis, Sailor.
OPT_SIZES = (8, 16, 32, 64)
OPT_PEERS = {8: (1.3, 0.03), 16: (16.4, 0.07), 32: (12.0, 0.34), 64: (3.2, 0.94)}
