"""Every way in which a chip may compute a unit, as the lower bound sees it: rounded in its favour.

A way is a configuration (pool, tp, cp, ep, sequences) with a place for the states. Per unit it has
chip-seconds per sequence; for the beginning of a step it says how long forward passes may last
before memory is full. What is not certain costs nothing here.

Recomputation needs no ways of its own. A chip that recomputes P seconds of its forward passes may
run P seconds more of them before the first backward pass comes, and has P seconds more to do: it
gains at most what it costs (`again` says how much of it, where recomputing is the shorter).
Units that keep less than the model's main kind of block let a chip go on for longer: a second of
their forward passes that keeps the share ρ of what a second of the main kind's keeps fills 1 − ρ
seconds more of the lead. They are charged that much less.

Where states must be shared, a chip's links may be its narrower place. Its time is no less than
what its units compute, and no less than what its links carry, hence no less than any mean of both.
The same mean is charged for all units of a configuration.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tutti.models.memory import Recompute
from tutti.search.pricing.memory_budget import copy_bandwidth, host_bytes, usable_bytes
from tutti.search.pricing.unit_tables import FULL, KINDS, NONE, Config, ConfigTable, Tables

FloatArray = npt.NDArray[np.float64]
# Columns of a ConfigTable.
_BY_RECOMPUTE = ("forward", "recompute", "backward_input", "backward_weight", "kept")
_BY_UNIT = (
    "passing", "dense", "expert", "parameter_bytes", "gradient_bytes", "optimizer_bytes",
    "frozen_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ways:
    """Ways by row; by column the kinds of units (`counts` says how many of each there are)."""

    pool: npt.NDArray[np.int64]
    work: FloatArray  # chip-seconds per sequence, infinite where memory does not hold the unit
    forward: FloatArray  # seconds of a micro-batch
    room: FloatArray  # bytes of activations that fit at most, on a chip that holds the unit
    host: FloatArray  # bytes beside them that may lie on the host
    copy: FloatArray  # bytes per second to it
    rate: FloatArray  # bytes that a second of forward passes leaves behind, at least
    early: FloatArray  # seconds of other work that may be done before the first backward
    again: FloatArray  # what a second of forward passes costs to recompute, 1 at most
    counts: FloatArray

    def take(self, rows: npt.NDArray[np.int64]) -> Ways:
        """Return some of the ways."""
        values = {f.name: getattr(self, f.name)[rows] for f in dataclasses.fields(self)[:-1]}
        return Ways(**values, counts=self.counts)

    def idle(self, lead: FloatArray) -> FloatArray:
        """Return, by way, unit and lead, the seconds that a chip loses before the first backward.

        Until it comes, `lead` seconds after the beginning, a chip has forward passes only, and
        what they keep must lie somewhere: it waits, or recomputes later.
        """
        away = np.minimum(self.host[:, None], self.copy[:, None] * lead)
        with np.errstate(divide="ignore", invalid="ignore"):
            passes = (self.room[:, :, None] + away[:, None, :]) / self.rate[:, None, None]
            waited = lead - passes - self.early[:, None, None]
        waited = self.again[:, None, None] * np.maximum(waited, 0.0)
        idle_s: FloatArray = np.where(self.rate[:, None, None] > 0, waited, 0.0)
        return idle_s


def ways_of(tables: Tables) -> Ways | None:
    """Return all ways of the space; None where a profile has measured none."""
    problem = tables.problem
    ways: list[_Way] = []
    examples, counts, main = _kinds_of_units(tables)
    for index, pool in enumerate(problem.pools):
        configs = [
            Config(pool.name, tp, cp, ep, b)
            for tp in problem.all_tensor_degrees(pool)
            for cp in problem.all_context_degrees()
            for ep in problem.expert_degrees()
            for b in problem.local_sequence_counts()
            if tp * cp <= pool.num_chips
        ]
        tables.prepare(configs)
        known = [table for config in configs if (table := tables.get(config)) is not None]
        made = [_Given.of(tables, _of_units(table, examples), main) for table in known]
        least = min((given.least for given in made if not given.shares), default=math.inf)
        for given in made:
            ways += _ways(tables, given, index, given.charge_of_links(least))
    if not ways:
        return None
    return Ways(
        pool=np.array([way.pool for way in ways], dtype=np.int64),
        work=np.stack([way.work for way in ways]),
        forward=np.stack([way.forward for way in ways]),
        room=np.stack([way.room for way in ways]),
        **{
            name: np.array([getattr(way, name) for way in ways])
            for name in ("host", "copy", "rate", "early", "again")
        },
        counts=counts,
    )


def _kinds_of_units(tables: Tables) -> tuple[list[int], FloatArray, list[int]]:
    """Return a unit of each kind, how many there are of it, and which kinds are the main ones.

    The embedding comes first and the head last.
    """
    model = tables.problem.model
    if not tables.units_alike:  # measured units differ all
        units = list(range(model.num_units))
        return units, np.ones(len(units)), units[1:-1]
    names = [model.unit_kind(unit) for unit in range(model.num_units)]
    kinds = list(dict.fromkeys(names))
    counts = np.array([names.count(kind) for kind in kinds], dtype=np.float64)
    return [names.index(kind) for kind in kinds], counts, [1 + int(counts[1:-1].argmax())]


def _of_units(table: ConfigTable, units: list[int]) -> ConfigTable:
    """Return the table of some units only."""
    return dataclasses.replace(
        table,
        **{name: getattr(table, name)[:, units] for name in _BY_RECOMPUTE},
        **{name: getattr(table, name)[units] for name in _BY_UNIT},
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Way:
    pool: int
    work: FloatArray
    forward: FloatArray
    room: FloatArray
    host: float
    copy: float
    rate: float
    early: float
    again: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _States:
    """Where states lie: bytes per unit on the chip all the time, bytes that pass, traffic."""

    static: FloatArray
    passing: FloatArray  # beside them, at the height of a unit's backward
    forward: FloatArray  # beside them, while a unit's forward runs; what comes later, less
    seconds: FloatArray  # that a micro-batch keeps the links busy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Given:
    """A configuration with the places for its states, and whether all that fit are shared ones."""

    table: ConfigTable
    usable: float  # bytes of a chip
    places: list[_States]
    fits: list[npt.NDArray[np.bool_]]  # of places, by unit
    passes: _Passes
    shares: bool
    least: float  # chip-seconds per sequence of the main unit that has least
    links: float  # that its links are busy for it at least; 0 where some place needs none

    @classmethod
    def of(cls, tables: Tables, table: ConfigTable, main: list[int]) -> _Given:
        usable = math.inf
        if not tables.problem.unlimited_memory:
            chip = tables.pool(table.config.pool).chip
            usable = usable_bytes(chip.memory_bytes, tables.sources.overheads)
        usable = usable * (1 + 1e-9) - 2.0 * table.boundary
        passes = _Passes.of(table, tables.problem.space.recompute, main)
        places = list(_places(tables, table))
        needs = table.passing + table.kept[NONE]
        fits = [p.static + p.passing + needs <= usable for p in places]
        per_sequence = table.config.width / table.config.sequences
        busy = (p.seconds[u] for p, h in zip(places, fits, strict=True) for u in main if h[u])
        return cls(
            table=table,
            usable=usable,
            places=places,
            fits=fits,
            passes=passes,
            shares=_must_share(places, fits, passes.seconds, main),
            least=float(passes.seconds[main].min()) * per_sequence,
            links=float(min(busy, default=0.0)) * per_sequence,
        )

    def charge_of_links(self, least: float) -> float:
        """Return the share of the links in what is charged; `least` is what a way costs elsewhere.

        More than that for a main unit would be of no use: so much of the charge is for the passes.
        """
        if not self.shares or self.links <= 0.0 or self.least >= least:
            return 0.0
        if self.links <= least:
            return 1.0
        return (least - self.least) / (self.links - self.least)


def _ways(tables: Tables, given: _Given, index: int, links: float) -> Iterator[_Way]:
    """Yield the ways of a configuration; `links` is the share of its links in the charge."""
    table, passes, usable = given.table, given.passes, given.usable
    config, pool = table.config, tables.pool(table.config.pool)
    away = "activations" in tables.problem.space.offload
    for states, held in zip(given.places, given.fits, strict=True):
        charged = (1.0 - links) * np.maximum(passes.charged, 0.0) + links * states.seconds
        yield _Way(
            pool=index,
            work=np.where(held, charged * (config.width / config.sequences), np.inf),
            forward=table.forward.min(axis=0),
            room=np.maximum(usable - states.static - states.forward, 0.0),
            host=host_bytes(pool) if away else 0.0,
            copy=copy_bandwidth(pool) if away else 0.0,
            rate=passes.rate if math.isfinite(usable) and links < 1.0 else 0.0,
            early=passes.early,
            again=(1.0 - links) * passes.again,
        )


def _must_share(
    places: list[_States],
    fits: list[npt.NDArray[np.bool_]],
    seconds: FloatArray,
    main: list[int],
) -> bool:
    """Tell whether links are the narrower place: all that fit share states, longer than passes.

    Otherwise traffic may hide behind the passes of units that do not share.
    """
    plain = any(h[main].any() for p, h in zip(places, fits, strict=True) if not p.seconds.any())
    longer = all(
        (p.seconds[main] > seconds[main])[h[main]].all() for p, h in zip(places, fits, strict=True)
    )
    return not plain and longer


def _places(tables: Tables, table: ConfigTable) -> Iterator[_States]:
    """Yield where parameters and gradients may lie, by shard level: one copy may hold few units.

    Levels 2 and 3 share what at least two copies of a pipeline hold; experts that are spread over
    all chips of their stage have no second copy, then only the rest is shared.
    """
    space, pool = tables.problem.space, tables.pool(table.config.pool)
    away = space.offload
    none = np.zeros_like(table.parameter_bytes)
    parameters, gradients = table.parameter_bytes, table.gradient_bytes
    if "parameters" in away:
        parameters = none
    if "gradients" in away:
        gradients = none
    resident = parameters + gradients
    # A step's only micro-batch makes them after the lead; alone, in the dtype of the weights.
    made = np.minimum(gradients, table.parameter_bytes) if table.gradients_made else gradients
    early = -made if table.gradients_made else none
    alone = parameters + made
    if max(space.shard) < 1 and "optimizer" not in away:
        resident, alone = resident + table.optimizer_bytes, alone + table.optimizer_bytes
    yield _States(static=alone, passing=none, forward=early, seconds=none)
    if max(space.shard) < 2 or (pool.num_chips < 2 and len(tables.problem.pools) < 2):
        return
    whole = np.maximum(table.dense + table.expert, 1.0)
    shares = [np.ones_like(none)]
    if table.config.ep > 1:
        shares.append(table.dense / whole)
    fastest = _fastest_link(tables, table)
    for shared in shares:
        held = 1.0 - shared
        if 2 in space.shard:
            yield _States(
                static=parameters + held * gradients,
                passing=shared * gradients,
                forward=none,
                seconds=0.5 * shared * table.gradient_bytes / fastest,
            )
        if 3 in space.shard:
            gathered = table.parameter_bytes - table.frozen_bytes
            moved = 2.0 * gathered + table.gradient_bytes
            least = np.minimum(table.parameter_bytes, table.gradient_bytes)
            yield _States(
                static=held * resident,
                passing=shared * least,
                forward=shared * gathered,
                seconds=0.5 * shared * moved / fastest,
            )


def _fastest_link(tables: Tables, table: ConfigTable) -> float:
    """Return the bytes per second at which a chip may exchange states at best.

    At least half of a state comes from others; the copies of one node share what its NICs bring.
    """
    pool = tables.pool(table.config.pool)
    node = pool.node
    copies = max(1, node.num_chips // table.config.width)
    nic = node.nic_bandwidth / node.num_chips * copies
    link = max((island.bandwidth for island in node.islands), default=0.0)
    fastest = max(nic, link, node.effective_bridge.bandwidth)
    for cross in tables.problem.cluster.fabric.links:
        if pool.name in cross.pools and cross.bandwidth is not None:
            fastest = max(fastest, cross.bandwidth * copies)
    used = (prices.efficiency for prices in tables.prices.values())
    return fastest * max(max(e.island, e.fabric) for e in used)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Passes:
    """The passes of a micro-batch, by unit, and what `Ways` calls rate, early and again."""

    seconds: FloatArray
    charged: FloatArray  # without what units that keep little fill of the lead
    rate: float
    early: float
    again: float

    @classmethod
    def of(cls, table: ConfigTable, allowed: tuple[Recompute, ...], main: list[int]) -> _Passes:
        """Return them with as little recomputation as may be.

        Blocks recomputed in full are those that buy time before the first backward pass;
        selective recomputation is taken to be free. One unit may be recomputed early, while its
        gradient is waited for.
        """
        kinds = [KINDS.index(kind) for kind in allowed]
        light = [kind for kind in kinds if kind != FULL] or kinds
        seconds = table.seconds[kinds].min(axis=0)
        seconds[[0, -1]] = table.seconds[NONE][[0, -1]]  # never recomputed
        longest = table.forward.max(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            rates = table.kept[light].min(axis=0) / longest
            longer = (table.seconds[FULL] - seconds) / table.forward.min(axis=0)
        mixed = FULL in kinds and len(kinds) > 1
        again = min(1.0, max(0.0, float(longer[main].min()))) if mixed else 1.0
        rate = float(rates[main].min())
        charged = seconds.copy()
        for unit in set(range(len(seconds) - 1)) - set(main):
            share = _share(rates[unit], rate)
            if mixed:  # no more than what it costs to win its memory back
                share = min(share, _share(longer[unit], again))
            charged[unit] -= longest[unit] * (1.0 - share)
        return cls(
            seconds=seconds,
            charged=charged,
            rate=rate,
            early=float(table.recompute[kinds].max()),
            again=again,
        )


def _share(part: float, whole: float) -> float:
    """Return a quotient between 0 and 1; 0 where there is none."""
    return min(1.0, max(0.0, part / whole)) if whole > 0.0 and math.isfinite(part) else 0.0
