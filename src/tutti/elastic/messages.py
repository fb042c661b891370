"""What controller, agents and ranks tell each other; each is whole, so that the newest is enough.

A `Status` is everything an agent knows of its chips, an `Order` everything it is to bring about.
Both are numbered and sent again and again: one that is lost is made up for by the next, one that
comes twice or late is passed over. Nothing here knows a socket.
"""

from __future__ import annotations

import hashlib
import hmac
from enum import StrEnum
from typing import Any, Literal

import msgspec

VERSION = 5  # of these messages


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
    why: str = ""  # it left its generation, as far as that is not that others did


class Status(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """Everything an agent knows."""

    job: str
    host: str
    incarnation: int  # of the agent: a later one is larger
    number: int
    order: int = 0  # the newest order that it has
    reports: tuple[Report, ...] = ()
    draining: bool = False
    kept: tuple[tuple[str, int, int], ...] = ()  # chip, generation, step: copies of other hosts
    copy_address: str = ""  # where copies of other hosts may be brought
    version: int = VERSION


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """A rank of a generation: which process of which chip."""

    rank: int
    chip: str
    host: str
    process: int
    incarnation: int = 0  # of the agent that started the process


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where the state of a generation comes from; all of it is of one step."""

    kind: Literal["begin", "memory", "disk"]  # memory: of processes, and copies on their hosts
    step: int = 0
    sums: tuple[float, ...] = ()  # with which those finish the step who lack only them
    holders: tuple[str, ...] = ()  # chips whose processes have state that counts
    copies: tuple[str, ...] = ()  # chips whose hosts have copies that count
    elsewhere: tuple[tuple[str, str], ...] = ()  # (chip, host): a partner has its copy
    generations: tuple[int, ...] = ()  # by whose plan that state, and the copies, lie
    text: str = ""  # for people


class Order(msgspec.Struct, frozen=True, kw_only=True, tag="order"):
    """What an agent is to bring about."""

    job: str
    number: int
    generation: int
    kind: Literal["leave", "enter", "stop"]
    seats: tuple[Seat, ...] = ()
    donors: tuple[Seat, ...] = ()  # who only give their state to the seats; ranks behind theirs
    copy_addresses: tuple[tuple[str, str], ...] = ()  # (host, where copies may be brought)
    plan: str = ""  # its file, seen from the run's folder
    address: str = ""  # where the ranks meet
    source: Source | None = None
    gentle: bool = False  # leave after the step at hand
    why: str = ""
    version: int = VERSION


# --- joining ---------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """An agent asks to take part, with the chips of a node."""

    node: str  # "pool/node"
    version: int = VERSION


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """It may."""

    job: str
    folder: str  # of the run, as the controller sees it
    chips: tuple[str, ...]
    world: int  # chips of the job's plan
    plan_hash: str  # of that plan
    heartbeat_s: float
    wait_s: float  # without a controller
    partners: int = 0  # hosts that keep copies of each other's
    incarnation: int = 0  # of the agent that was there before; the new one's is larger


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag="refusal"):
    """It may not."""

    why: str


# --- what ranks say, and what is done to them --------------------------------------------------


class Words(msgspec.Struct, frozen=True, kw_only=True, tag="words"):
    """What a rank's process said; numbered without gaps, and sent again until it is heard."""

    job: str
    host: str
    incarnation: int
    number: int
    first: int  # the oldest that was not heard yet: a controller that is new begins there
    chip: str
    process: int
    values: dict[str, Any]


class HeardWords(msgspec.Struct, frozen=True, kw_only=True, tag="heard"):
    """All words up to a number were heard."""

    job: str
    incarnation: int
    number: int


class ChipPulse(msgspec.Struct, frozen=True, kw_only=True):
    """A pulse as its agent reads it; ages instead of times, for clocks differ between hosts."""

    chip: str
    generation: int
    step: int
    instruction: int
    activity: int
    idle_ns: int
    links_idle_ns: int
    state: str  # of the process, as the kernel says
    operations: tuple[tuple[str, tuple[int, ...]], ...] = ()
    call: str = ""  # of the kernel, that its main thread is in


class Pulses(msgspec.Struct, frozen=True, kw_only=True, tag="pulses"):
    """What the ranks of a host do; told only while none of them moves."""

    job: str
    host: str
    pulses: tuple[ChipPulse, ...]


class Request(msgspec.Struct, frozen=True, kw_only=True, tag="request"):
    """Something to do to processes; told again until it shows."""

    job: str
    kind: Literal["kill", "finish"]
    chip: str = ""
    process: int = 0
    why: str = ""
    signal: int = 0


Message = (
    Status | Order | Hello | Welcome | Refusal | Words | HeardWords | Pulses | Request
)  # fmt: skip
_DECODER = msgspec.msgpack.Decoder(Message)
_ENCODER = msgspec.msgpack.Encoder()
_SEAL_BYTES = 16


class SealError(Exception):
    """A message of somebody who does not know the job's secret."""


def control_key(secret: bytes) -> bytes:
    """Return the key of the messages of a job, from its secret."""
    return hmac.digest(secret, b"tutti elastic control", hashlib.sha256)


def packed(message: Message, key: bytes) -> bytes:
    """Return a message as bytes, sealed."""
    data = _ENCODER.encode(message)
    return _seal(data, key) + data


def unpacked(data: bytes, key: bytes) -> Message:
    """Return the message of some bytes; `msgspec.DecodeError` where there is none."""
    seal, rest = data[:_SEAL_BYTES], data[_SEAL_BYTES:]
    if not hmac.compare_digest(seal, _seal(rest, key)):
        raise SealError
    message: Message = _DECODER.decode(rest)
    return message


def _seal(data: bytes, key: bytes) -> bytes:
    return hmac.digest(key, data, hashlib.sha256)[:_SEAL_BYTES]
