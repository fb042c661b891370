"""What a rank leaves in the output folder, whatever becomes of it: its ring, its host's series."""

from __future__ import annotations

from contextlib import ExitStack

from tutti.errors import InputError
from tutti.observe.folder import RINGS, SERIES
from tutti.observe.ring import Listed, Ring, ring_path
from tutti.observe.sampling import HostSampling
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


def sample_host(context: RankContext, stack: ExitStack) -> None:
    """Sample this host by the second, if this rank is the first of its node."""
    place = context.position
    if place.slot != 0:
        return
    path = context.config.folder / SERIES / f"{place.pool}-{place.node}.sqlite"
    try:
        stack.callback(HostSampling(path).close)
    except (OSError, InputError) as error:
        context.warn(f"{context.name}: its host is not sampled ({error})")


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
