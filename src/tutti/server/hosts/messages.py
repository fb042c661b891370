"""What the front and the agents of hosts say to each other."""

from __future__ import annotations

from typing import Any

import msgspec

from tutti.server.messages import EngineState, HostAddress

CONTROL = "hosts"
"""The scope of the keys of these messages."""
BEAT_S = 0.5
LOST_S = 6.0  # without a word


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What front and agents must agree in."""

    version: str
    plan: str
    model: str


class Join(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """A host is there."""

    host: str
    incarnation: str
    facts: Facts
    at: HostAddress


class RankStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a rank of an engine is."""

    engine: int
    generation: int
    rank: int
    code: int | None = None  # by which it ended
    silent_s: float = 0.0
    ready: EngineState | None = None  # said by an engine's first rank
    failed: str = ""


class Status(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """How all ranks of a host are; `leaving`: the host is being ended."""

    host: str
    incarnation: str
    ranks: list[RankStatus] = []
    leaving: bool = False


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """A host takes part; `engine` are the options that all engines have."""

    engine: dict[str, Any]


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag="refusal"):
    """A host cannot take part; or not yet (`later`)."""

    message: str
    later: bool = False


class Wanted(msgspec.Struct, frozen=True, kw_only=True, tag="wanted"):
    """The engines that are to run, by number and generation, and where hosts are."""

    engines: dict[int, int]
    hosts: dict[str, HostAddress]
    ending: bool = False


FromHost = Join | Status
ToHost = Welcome | Refusal | Wanted

encode = msgspec.msgpack.Encoder().encode
_from_host = msgspec.msgpack.Decoder(FromHost)
_to_host = msgspec.msgpack.Decoder(ToHost)


def from_host(data: bytes) -> FromHost:
    """Return what an agent said."""
    said: FromHost = _from_host.decode(data)
    return said


def to_host(data: bytes) -> ToHost:
    """Return what the front said."""
    said: ToHost = _to_host.decode(data)
    return said
