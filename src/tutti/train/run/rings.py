"""What a rank leaves in the output folder, whatever becomes of it: its ring, its host's series."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from tutti.comm import Communicator
from tutti.diagnose.cluster.plan_edges import Node, plan_edges
from tutti.errors import InputError
from tutti.observe.folder import CHECKPOINTS, RINGS, SERIES
from tutti.observe.network.neighbours import Neighbour, NeighbourProbes
from tutti.observe.ring import Listed, Ring, ring_path
from tutti.observe.samplers.sampling import HostSampling
from tutti.plan.plan import Plan, RankMap
from tutti.schedule.instruction import COLLECTIVES, NO_MICRO_BATCH, Instruction, Op, Scope
from tutti.train.engine.engine import Engine
from tutti.train.run.rank_context import RankContext


def open_ring(context: RankContext, engine: Engine, step: int, stack: ExitStack) -> Ring | None:
    """Make a rank's ring; a folder that cannot be written is said, and the job goes on."""
    pipeline = context.seat.place.pipeline
    try:
        ring = Ring(
            ring_path(context.config.folder / RINGS, context.rank),
            rank=context.rank,
            world=context.plan.num_ranks,
            instructions=[_listed(entry, pipeline) for entry in engine.instructions],
        )
    except OSError as error:
        context.warn(f"{context.name}: no flight recorder ({error.strerror})")
        return None
    stack.callback(ring.close)
    stack.callback(setattr, engine.recorder, "ring", None)  # before it is closed
    ring.step = step
    ring.keep_alive()
    return ring


def sample_host(context: RankContext, comm: Communicator, stack: ExitStack) -> None:
    """Sample this host by the second, if this rank is the first of its node."""
    place = context.position
    firsts = first_ranks(context.plan)
    if firsts[place.pool, place.node] != context.rank:
        return
    config = context.config
    path = config.folder / SERIES / f"{place.pool}-{place.node}.sqlite"
    probes = _probes(context, comm, firsts) if config.measure.probes else None
    try:
        sampling = HostSampling(
            path,
            say=context.warn,
            further=[] if probes is None else [probes],
            folders=[config.folder, config.folder / CHECKPOINTS, *config.data.folders(Path())],
        )
    except (OSError, InputError) as error:
        if probes is not None:
            probes.close()
        context.warn(f"{context.name}: its host is not sampled ({error})")
        return
    stack.callback(sampling.close)
    if sampling.lacks and context.rank == 0:  # the others' are much the same
        context.notice(f"not sampled here: {'; '.join(sampling.lacks)}")


def first_ranks(plan: Plan) -> dict[Node, int]:
    """Return the first rank of every node of a plan."""
    ranks = RankMap(plan)
    firsts: dict[Node, int] = {}
    for rank in range(plan.num_ranks):
        chip = ranks.place(rank).chip
        firsts.setdefault((chip.pool, chip.node), rank)
    return firsts


def _probes(
    context: RankContext, comm: Communicator, firsts: Mapping[Node, int]
) -> NeighbourProbes | None:
    """Return the probes to the hosts that this one talks to; None where there are none."""
    own, places = comm.topology.places[context.rank], comm.topology.places
    nodes, edges = plan_edges(context.plan)
    here = nodes.index((context.position.pool, context.position.node))
    near = sorted({b if a == here else a for a, b in edges if here in (a, b)})
    others = [(nodes[i], places[firsts[nodes[i]]]) for i in near]
    neighbours = [
        Neighbour(f"{node[0]}/{node[1]}", place.addresses, place.port)
        for node, place in others
        if place.host != own.host and all(map(_is_ipv4, place.addresses))
    ]
    if not neighbours or not all(map(_is_ipv4, own.addresses)):
        return None
    try:
        return NeighbourProbes(own.addresses, own.port, neighbours, context.warn)
    except InputError as error:
        context.warn(f"{context.name}: {error}")
        return None


def _is_ipv4(address: str) -> bool:
    try:
        ipaddress.IPv4Address(address)
    except ValueError:
        return False
    return True


def _listed(entry: Instruction, pipeline: int) -> Listed:
    return Listed(words=str(entry), lane=entry.lane.value, meets=_meets(entry, pipeline))


def _meets(entry: Instruction, pipeline: int) -> str:
    """Return what is the same of an operation on all ranks that take part in it."""
    if entry.op in (Op.SEND, Op.RECEIVE):
        words = [entry.what.value, f"at unit {entry.start}"]
        own = True
    elif entry.op in COLLECTIVES:
        words = [entry.op.value, entry.what.value, f"units {entry.start}-{entry.stop}"]
        own = entry.scope is Scope.PIPELINE
    else:
        return ""
    if entry.micro_batch != NO_MICRO_BATCH:
        words.append(f"micro-batch {entry.micro_batch}")
    return " ".join([*words, f"pipeline {pipeline}"] if own else words)
