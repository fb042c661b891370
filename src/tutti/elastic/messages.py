"""What controller, agents and ranks tell each other; each is whole, so that the newest is enough.

A `Status` is everything an agent knows of its chips, an `Order` everything it is to bring about.
Both are numbered and sent again and again: one that is lost is made up for by the next, one that
comes twice or late is passed over. Nothing here knows a socket.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

VERSION = 1  # of these messages


class Standing(StrEnum):
    """What a rank's process is doing, as its agent knows."""

    STARTING = "starting"
    IDLE = "idle"  # ready, and in no generation; it has left `generation`, if that is not 0
    ENTERING = "entering"  # meeting the others, getting its state
    RUNNING = "running"
    DONE = "done"  # the last step is made and saved


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """A process that ended without being told to."""

    process: int
    how: str  # "was killed by SIGKILL", or the last words of its log
    generation: int = 0
    step: int = 0
    instruction: int = -1


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One chip and the process that drives it."""

    chip: str  # "pool/node/slot"
    process: int  # counts the processes that this chip has had, from 1
    standing: Standing = Standing.STARTING
    generation: int = 0  # the one it is in, or was in last
    step: int = -1  # the last step that is in its weights; -1: it has none
    held: int = 0  # the generation by whose plan its weights lie
    held_rank: int = -1
    pending: int = 0  # a step of which it only lacks the sums over all ranks
    sums: tuple[float, ...] = ()  # those of `step`
    copy_steps: tuple[tuple[int, int], ...] = ()  # (generation, step) of copies on its host
    deaths: tuple[Death, ...] = ()  # of earlier processes of this chip


class Status(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """Everything an agent knows."""

    job: str
    host: str
    incarnation: int  # of the agent: a later one is larger
    number: int
    order: int = 0  # the newest order that it has
    reports: tuple[Report, ...] = ()
    draining: bool = False
    version: int = VERSION


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """A rank of a generation: which process of which chip."""

    rank: int
    chip: str
    host: str
    process: int


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where the state of a generation comes from; all of it is of one step."""

    kind: Literal["begin", "memory", "disk"]  # memory: of processes, and copies on their hosts
    step: int = 0
    sums: tuple[float, ...] = ()  # with which those finish the step who lack only them
    holders: tuple[str, ...] = ()  # chips whose processes have state that counts
    generations: tuple[int, ...] = ()  # by whose plan that state, and the copies, lie
    text: str = ""  # for people


class Order(msgspec.Struct, frozen=True, kw_only=True, tag="order"):
    """What an agent is to bring about."""

    job: str
    number: int
    generation: int
    kind: Literal["leave", "enter", "stop"]
    seats: tuple[Seat, ...] = ()
    plan: str = ""  # its file, seen from the run's folder
    address: str = ""  # where the ranks meet
    source: Source | None = None
    why: str = ""
    version: int = VERSION


Message = Status | Order
_DECODER = msgspec.msgpack.Decoder(Message)
_ENCODER = msgspec.msgpack.Encoder()


def packed(message: Message) -> bytes:
    """Return a message as bytes."""
    return _ENCODER.encode(message)


def unpacked(data: bytes) -> Message:
    """Return the message of some bytes; `msgspec.DecodeError` where there is none."""
    found: Message = _DECODER.decode(data)
    return found
