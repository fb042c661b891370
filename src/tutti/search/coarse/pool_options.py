"""The configurations of one pool as arrays, for the coarse model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti.hardware.pool import Pool
from tutti.search.pricing.memory_budget import copy_bandwidth, forwards, host_bytes, usable_bytes
from tutti.search.pricing.unit_tables import FULL, NONE, Config, ConfigTable, Tables
from tutti.search.thresholds import THRESHOLDS

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Options:
    """The configurations of one pool, as arrays."""

    configs: tuple[Config, ...]
    width: IntArray
    cp: IntArray
    sequences: IntArray
    block: FloatArray  # seconds of an average block, all passes
    forward: FloatArray
    backward_input: FloatArray
    backward_weight: FloatArray
    again: FloatArray  # of recomputing it
    ends: FloatArray  # embedding and head, seconds
    parameters: FloatArray  # bytes of a block
    gradients: FloatArray
    optimizer: FloatArray
    expert_share: FloatArray  # of a block's parameters
    tables: FloatArray  # bytes of states of embedding or head, whichever is larger
    kept: FloatArray
    kept_full: FloatArray
    passing: FloatArray
    ep: IntArray
    memory: float
    chips: int
    inside: FloatArray  # bytes per second of a chip to others of its kind
    host: float  # bytes of it that a chip may use
    copy: float  # bytes per second between a chip and its host
    away: FloatArray  # seconds to copy a block's activations to the host

    def take(self, rows: list[int]) -> Options:
        """Return some of the configurations."""
        values: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "configs":
                value = tuple(value[i] for i in rows)
            elif isinstance(value, np.ndarray):
                value = value[rows]
            values[field.name] = value
        return Options(**values)

    @classmethod
    def of(
        cls, tables: Tables, pool: str, configs: list[Config], *, chained: bool = False
    ) -> Options | None:
        """Return the arrays of a pool; None where none of its configurations was measured.

        Where it is `chained` to others, what it hands on may pass through its hosts' memory.
        """
        tables.prepare(configs)
        rows = [(c, t) for c in configs if (t := tables.get(c)) is not None]
        if not rows:
            return None
        of_pool = tables.pool(pool)

        def column(figure: Callable[[ConfigTable], float]) -> FloatArray:
            return np.array([figure(t) for _, t in rows], dtype=np.float64)

        def mean(values: FloatArray) -> float:
            return float(values[1:-1].mean())

        def whole(t: ConfigTable) -> FloatArray:
            return t.parameter_bytes + t.gradient_bytes + t.optimizer_bytes

        prices = tables.prices[pool]
        others = [other.name for other in tables.problem.pools] if chained else []
        lanes = 2 if forwards(tables.problem.cluster, pool, others) else 1
        nic = of_pool.node.nic_bandwidth / of_pool.node.num_chips * prices.efficiency.fabric
        return cls(
            configs=tuple(c for c, _ in rows),
            width=np.array([c.width for c, _ in rows], dtype=np.int64),
            cp=np.array([c.cp for c, _ in rows], dtype=np.int64),
            sequences=np.array([c.sequences for c, _ in rows], dtype=np.int64),
            block=column(lambda t: mean(t.seconds[NONE])),
            forward=column(lambda t: mean(t.forward[NONE])),
            backward_input=column(lambda t: mean(t.backward_input[NONE])),
            backward_weight=column(lambda t: mean(t.backward_weight[NONE])),
            again=column(lambda t: mean(t.seconds[FULL] - t.seconds[NONE])),
            ends=column(lambda t: float(t.seconds[NONE][0] + t.seconds[NONE][-1])),
            parameters=column(lambda t: mean(t.parameter_bytes)),
            gradients=column(lambda t: mean(t.gradient_bytes)),
            optimizer=column(lambda t: mean(t.optimizer_bytes)),
            expert_share=column(
                lambda t: float(t.expert.sum() / max(1.0, (t.dense + t.expert).sum()))
            ),
            tables=column(lambda t: float(max(whole(t)[0], whole(t)[-1]))),
            kept=column(lambda t: mean(t.kept[NONE])),
            kept_full=column(lambda t: mean(t.kept[FULL])),
            passing=column(lambda t: float(t.passing.max()) + 4.0 * t.boundary),
            ep=np.array([c.ep for c, _ in rows], dtype=np.int64),
            memory=float("inf") if tables.problem.unlimited_memory
            else usable_bytes(of_pool.chip.memory_bytes, tables.sources.overheads),
            chips=of_pool.num_chips,
            inside=_exchange_rates(of_pool, nic, [t for _, t in rows],
                                   prices.efficiency.island),
            host=host_bytes(of_pool),
            copy=copy_bandwidth(of_pool, lanes),
            away=column(lambda t: mean(t.kept[NONE]) / copy_bandwidth(of_pool, lanes)),
        )  # fmt: skip


def thinned(options: list[Options]) -> list[Options]:
    """Return fewer configurations of each pool where all combinations would be too many.

    Of every width and micro-batch the fastest and the one that spreads experts most are kept,
    then the fastest of all.
    """
    most = math.floor(THRESHOLDS.most_combinations ** (1.0 / len(options)))
    kept = []
    for o in options:
        if len(o.configs) <= most:
            kept.append(o)
            continue
        work = o.block * o.width / o.sequences
        groups: dict[tuple[int, int], list[int]] = {}
        for i, config in enumerate(o.configs):
            groups.setdefault((config.width, config.sequences), []).append(i)
        chosen: set[int] = set()
        for rows in groups.values():
            chosen.add(min(rows, key=lambda i: (work[i], i)))
            chosen.add(min(rows, key=lambda i: (-o.ep[i], work[i], i)))
        ranked = sorted(chosen, key=lambda i: (work[i], i))[:most]
        kept.append(o.take(sorted(ranked)))
    return kept


def _exchange_rates(
    pool: Pool, nic: float, tables: list[ConfigTable], efficiency: float
) -> FloatArray:
    """Return the bytes per second at which a chip exchanges its state with other copies.

    Copies in one island share what their NICs bring in and pass it on over native links. Experts
    that are spread over an island have no second copy in it.
    """
    node = pool.node
    link = max((i.bandwidth for i in node.islands), default=node.effective_bridge.bandwidth)
    largest = max((len(i.slots) for i in node.islands), default=1)

    def rate(chips: int) -> float:
        across = nic * max(1, largest // chips) if pool.nodes > 1 else math.inf
        return max(1.0, min(across, link * efficiency))

    rates = []
    for table in tables:
        config, whole = table.config, max(1.0, float((table.dense + table.expert).sum()))
        expert = float(table.expert.sum()) / whole
        spread = rate(max(config.width, config.ep))
        rates.append(1.0 / ((1.0 - expert) / rate(config.width) + expert / spread))
    return np.array(rates)
