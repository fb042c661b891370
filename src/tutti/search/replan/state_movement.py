"""What a change of plan moves: the bytes of training state, the seconds, and when it pays back.

Every chip of the new plan needs what it keeps: master copy (or weights) and moments of its shards.
What it held of them under the old plan stays; the rest comes from chips that survived, and what no
survivor holds from the last checkpoint. Weights to compute with are no part of it: where they are
sharded, every step gathers them anyway. Units that both plans spread alike are worked out once.

The seconds are an estimate, and none where a checkpoint is read of whose storage the cluster file
says nothing: all chips receive and send at once, each at the rate of its NIC (in a
cluster of one node, of its native link); state crosses pools only where it must.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tutti.cost.storage.targets import Clients, read_seconds
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.hardware.pool import Pool
from tutti.hardware.topology import Position
from tutti.models.parameters import Parameter
from tutti.models.spec import ModelSpec
from tutti.models.tuning import is_read_again
from tutti.plan.chips import ChipSet
from tutti.plan.job import Job
from tutti.plan.plan import Plan
from tutti.search.question.single_changes import NodePlace
from tutti.search.replan.state_layout import (
    ROUNDING,
    FloatArray,
    Holding,
    IntArray,
    Kind,
    StateLayout,
    joined,
)

NodeMoves = Mapping[NodePlace, NodePlace]


@dataclass(frozen=True, slots=True, kw_only=True)
class Movement:
    """Bytes and seconds between two plans; state from the checkpoint is part of the total."""

    total_bytes: float = 0.0
    busiest_chip_bytes: float = 0.0  # received or sent, whichever is more
    from_checkpoint_bytes: float = 0.0  # state that no surviving chip holds
    seconds: float = 0.0  # of all of it, as far as `storage_known`
    storage_known: bool = True  # False: some comes from a storage of which nothing is said
    by_pool: Mapping[str, float] = field(default_factory=dict)  # bytes that its chips receive

    @property
    def rolls_back(self) -> bool:
        """Whether state was lost, so that training goes on from the last checkpoint's step."""
        return self.from_checkpoint_bytes > 0


def movement(
    old: Plan, new: Plan, model: ModelSpec, cluster: Cluster, moved: NodeMoves | None = None
) -> Movement:
    """Return what must move so that `new` can run where `old` ran.

    `cluster` is the one that `new` is for; `moved` says which of the old plan's nodes became which
    of its nodes (lost ones are missing); without it every node is where it was.
    """
    chips = _Chips(cluster)
    before = StateLayout(old, model, lambda held: chips.numbers(held, moved))
    after = StateLayout(new, model, chips.present)
    flows = _Flows(chips)
    for size, kind_bytes, held, wanted in _pieces(before, after, model):
        flows.add(size * kind_bytes, held.surviving(), wanted)
    return flows.result(new)


def state_by_node(plan: Plan, model: ModelSpec, cluster: Cluster) -> dict[NodePlace, float]:
    """Return the bytes of training state that each node of a plan keeps."""
    chips = _Chips(cluster)
    gone = StateLayout(plan, model, lambda held: chips.numbers(held, {}))
    layout = StateLayout(plan, model, chips.present)
    flows, bytes_by_node = _Flows(chips), dict[NodePlace, float]()
    for size, kind_bytes, held, wanted in _pieces(gone, layout, model):
        flows.add(size * kind_bytes, held.surviving(), wanted)
    for pool in cluster.pools:
        width = pool.node.num_chips
        for node in range(pool.nodes):
            first = chips.first[pool.name] + node * width
            kept = float(flows.restored[first : first + width].sum())
            if kept:
                bytes_by_node[pool.name, node] = kept
    return bytes_by_node


def payback(
    old_step_s: float | None, new_step_s: float, movement_s: float, *, steps_lost: float = 0.0
) -> float | None:
    """Return after how many seconds a move has paid back against staying; None if it never does.

    `old_step_s` is None where the old plan cannot run any more: then any move pays at once. Steps
    since the checkpoint that are lost are done again at the new plan's speed.
    """
    if old_step_s is None or old_step_s == float("inf"):
        return 0.0
    pause = movement_s + steps_lost * new_step_s
    if pause == 0 and new_step_s <= old_step_s:
        return 0.0
    if new_step_s >= old_step_s:
        return None
    return pause * old_step_s / (old_step_s - new_step_s)


# --- the pieces of state ---------------------------------------------------------------------


def _pieces(
    before: StateLayout, after: StateLayout, model: ModelSpec
) -> Iterator[tuple[float, float, Holding, Holding]]:
    """Yield (numbers, bytes each, who held it, who needs it) for all state of the model."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for unit in range(model.num_units):
        key = (model.unit_kind(unit), before.signature(unit), after.signature(unit))
        alike.setdefault(key, []).append(unit)
    kinds = _state_kinds(after.plan.job)
    for unit, *others in alike.values():
        for parameter in model.parameters(unit):
            if parameter.buffer or parameter.tied_to is not None:
                continue  # tied weights are counted with the embedding
            if is_read_again(model.tuning, parameter):
                continue  # from the model's folder
            size = float(parameter.size) * (1 + len(others))
            for each, owned, needed in _joint(kinds[parameter.trainable], after, unit):
                held = _holding(before, unit, parameter, owned, model)
                wanted = _holding(after, unit, parameter, needed, model)
                yield size, each, held, wanted


def _joint(
    kinds: list[tuple[float, Kind, Kind]], after: StateLayout, unit: int
) -> list[tuple[float, Kind, Kind]]:
    """Return the kinds of a tensor's state; as one where the same ranks need all of them."""
    if after.elements.ownership.has_copies(unit):
        return kinds
    _, owned, needed = kinds[0]
    return [(sum(each for each, _, _ in kinds), owned, needed)]


def _holding(
    layout: StateLayout, unit: int, parameter: Parameter, kind: Kind, model: ModelSpec
) -> Holding:
    """Return who holds a tensor, its tied copies among them; a rank with both is there twice."""
    here = layout.holding(unit, parameter, kind)
    name = f"{unit}.{parameter.name}"
    copies = [p for p in model.parameters(model.head_unit) if p.tied_to == name]
    for copy in copies if unit == 0 else ():
        here = joined(here, layout.holding(model.head_unit, copy, kind))
    return here


def _state_kinds(job: Job) -> dict[bool, list[tuple[float, Kind, Kind]]]:
    """Return what of a tensor that is trained, or not, moves: bytes, who gives it, who needs it.

    Copies of tied weights are given by the owner of both, and are no source themselves.
    """
    parameters, master = job.precision.parameters.num_bytes, job.precision.master
    weight = float(parameters if master is None else master.num_bytes)
    moments = job.state_bytes - (0.0 if master is None else weight)
    trained = [(weight, Kind.OPTIMIZER, Kind.WEIGHTS), (moments, Kind.OPTIMIZER, Kind.OPTIMIZER)]
    return {
        True: [entry for entry in trained if entry[0]],
        False: [(float(parameters), Kind.PARAMETERS, Kind.PARAMETERS)],
    }


# --- chips by number -------------------------------------------------------------------------


class _Chips:
    """The chips of a cluster, numbered pool by pool, node by node, with their rates."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._pools = {pool.name: pool for pool in cluster.pools}
        sizes = [pool.num_chips for pool in cluster.pools]
        starts = np.concatenate(([0], np.cumsum(sizes)))
        self.count = int(starts[-1])
        self.first = {pool.name: int(at) for pool, at in zip(cluster.pools, starts, strict=False)}
        self.pool = np.repeat(np.arange(len(sizes)), sizes)
        one_node = cluster.num_nodes == 1
        rates = [np.tile(_slot_rates(pool, native=one_node), pool.nodes) for pool in cluster.pools]
        self.rate = np.concatenate(rates)

    def numbers(self, held: ChipSet, moved: NodeMoves | None = None) -> IntArray:
        """Return each chip's number in this cluster; -1 where it is no longer there."""
        known = []
        for r in held.ranges:
            slots = np.arange(r.first_slot, r.last_slot + 1)
            for node in range(r.first_node, r.last_node + 1):
                place = (r.pool, node) if moved is None else moved.get((r.pool, node))
                known.append(self._numbers(place, slots))
        return np.concatenate(known).astype(np.int64)

    def present(self, held: ChipSet) -> IntArray:
        """Return the chips' numbers; an InputError if the cluster lacks one."""
        numbers = self.numbers(held)
        if (numbers < 0).any():
            missing = held.at(int(np.argmax(numbers < 0)))
            raise InputError(
                f"plan: chip {missing} is not in cluster '{self.cluster.name}'; "
                "give the cluster that the new plan was made for"
            )
        return numbers

    def _numbers(self, place: NodePlace | None, slots: IntArray) -> npt.NDArray[np.signedinteger]:
        pool = self._pools.get(place[0]) if place is not None else None
        if place is None or pool is None or place[1] >= pool.nodes:
            return np.full(slots.size, -1)
        width = pool.node.num_chips
        numbers = self.first[place[0]] + place[1] * width + slots
        return np.where(slots < width, numbers, -1)

    def cross_rate(self, source: int, target: int) -> float:
        """Return what a chip of one pool gets from another pool."""
        names = [self.cluster.pools[index].name for index in (source, target)]
        link = self.cluster.link(*(Position(name, 0, 0) for name in names))
        return link.contended_bandwidth


def _slot_rates(pool: Pool, *, native: bool) -> FloatArray:
    node = pool.node

    def rate(slot: int) -> float:
        if not native and node.nic_rate(slot):
            return node.nic_rate(slot)
        island = node.island_of(slot)
        return island.bandwidth if island is not None else node.effective_bridge.bandwidth

    return np.asarray([rate(slot) for slot in range(node.num_chips)])


# --- adding up -------------------------------------------------------------------------------


class _Flows:
    """Bytes and seconds per chip, added up piece by piece."""

    def __init__(self, chips: _Chips) -> None:
        self.chips = chips
        self.received = np.zeros(chips.count)
        self.receive_s = np.zeros(chips.count)
        self.sent = np.zeros(chips.count)
        self.restored = np.zeros(chips.count)  # from the checkpoint

    def add(self, num_bytes: float, held: Holding, wanted: Holding) -> None:
        """Add what a piece of `num_bytes` in all moves between who holds and who wants it."""
        missing = wanted.measure - _kept(held, wanted, self.chips.count)
        missing -= _wanted_twice(held, wanted, self.chips.count)
        missing = np.where(missing > ROUNDING, missing, 0.0)
        lost = np.minimum(held.lacks(wanted), missing)
        at = wanted.chips
        np.add.at(self.restored, at, num_bytes * lost)
        arriving = num_bytes * (missing - lost)
        if not arriving.any():
            return
        np.add.at(self.received, at, arriving)
        np.add.at(self.receive_s, at, arriving / self._receive_rate(held, at))
        share = held.measure / held.measure.sum()
        self.sent[held.chips] += arriving.sum() * share

    def _receive_rate(self, held: Holding, at: IntArray) -> FloatArray:
        """Return each receiver's rate: its NIC, or a cross-pool link where it must."""
        rate = self.chips.rate[at].copy()
        sources = set(self.chips.pool[held.chips[held.measure > 0]].tolist())
        pools = self.chips.pool[at]
        for pool in set(pools.tolist()) - sources:
            best = max(self.chips.cross_rate(source, pool) for source in sources)
            rate[pools == pool] = np.minimum(rate[pools == pool], best)
        return rate

    def result(self, new: Plan) -> Movement:
        """Return the totals."""
        chips, taken = self.chips, self.received + self.restored
        send_s = self.sent / chips.rate
        restored = float(self.restored.sum())
        reading = self._restore_s(new, restored)
        return Movement(
            total_bytes=float(taken.sum()),
            busiest_chip_bytes=float(max(taken.max(), self.sent.max())),
            from_checkpoint_bytes=restored,
            seconds=float(max(self.receive_s.max(), send_s.max())) + (reading or 0.0),
            storage_known=reading is not None,
            by_pool={
                pool.name: float(taken[chips.pool == index].sum())
                for index, pool in enumerate(chips.cluster.pools)
            },
        )

    def _restore_s(self, new: Plan, restored: float) -> float | None:
        """Return the seconds of reading from the checkpoint; None where nobody can tell."""
        target = self.chips.cluster.storage.shared
        if target is None or not restored:
            return None if restored else 0.0
        held = (r for _, _, stage in new.stages() for r in stage.chips.ranges)
        nodes = {(r.pool, n) for r in held for n in range(r.first_node, r.last_node + 1)}
        return read_seconds(target, restored, Clients(nodes=len(nodes)))


def _kept(held: Holding, wanted: Holding, num_chips: int) -> FloatArray:
    """Return the fraction that each wanting rank's own chip holds already."""
    row_of_chip = np.full(num_chips, -1)
    row_of_chip[held.chips] = np.arange(held.chips.size)
    rows = row_of_chip[wanted.chips]
    kept = np.zeros(rows.size)
    there = np.flatnonzero(rows >= 0)
    if not there.size:
        return kept
    had = rows[there]
    for m in range(wanted.lower.shape[1]):
        for n in range(held.lower.shape[1]):
            low = np.maximum(wanted.lower[there, m], held.lower[had, n])
            high = np.minimum(wanted.upper[there, m], held.upper[had, n])
            kept[there] += np.maximum(high - low, 0.0).prod(axis=1)
    return kept


def _wanted_twice(held: Holding, wanted: Holding, num_chips: int) -> FloatArray:
    """Return what of each row an earlier row of its chip wants as well, and the chip lacks.

    A stage that has a tied tensor at both ends keeps it twice; it comes once.
    """
    twice = np.zeros(wanted.chips.size)
    order = np.argsort(wanted.chips, kind="stable")
    again = np.flatnonzero(wanted.chips[order[1:]] == wanted.chips[order[:-1]])
    if not again.size:
        return twice
    first, second = order[again], order[again + 1]
    boxes = wanted.lower.shape[1]
    pairs = [(m, n) for m in range(boxes) for n in range(boxes)]
    lower = np.stack([np.maximum(wanted.lower[first, m], wanted.lower[second, n])
                      for m, n in pairs], axis=1)  # fmt: skip
    upper = np.stack([np.minimum(wanted.upper[first, m], wanted.upper[second, n])
                      for m, n in pairs], axis=1)  # fmt: skip
    both = Holding(wanted.chips[second], lower, np.maximum(lower, upper))
    twice[second] = both.measure - _kept(held, both, num_chips)
    return twice
