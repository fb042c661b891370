"""Frames: what travels on a connection of two ranks, a fixed header and then its payload.

A `Tag` says which message a frame belongs to: group, number of the operation in that group, and the
place in its program. Both ends derive it from the program, so nothing has to be negotiated.
"""

from __future__ import annotations

import enum
import json
import struct
from typing import Any, NamedTuple

PROTOCOL = 4
_HEADER = struct.Struct("<B3xQQIIIIIQQQQ")
HEADER_BYTES = _HEADER.size
MOST_CONTROL_BYTES = 1 << 20  # of a control frame's payload


class Kind(enum.IntEnum):
    """What a frame says."""

    DATA = 2  # a fragment, its bytes in the payload
    SHARED = 3  # a fragment, its bytes in shared memory at `place`
    FREE = 4  # the shared memory that a fragment had at `place` is free again
    ASK = 5  # are you there, and what are you doing?
    STATUS = 6  # the answer
    ABORT = 7  # it is over, and whose fault it is
    BYE = 8  # closed on purpose
    OPEN = 9  # first on a connection whose frames are counted: its number, as `place`
    CONFIRM = 10  # how many frames of this connection have come, as `place`
    RESUME = 11  # these connections are lost: how much of each has come?
    RESUMED = 12  # the answer; what is left of them is sent again elsewhere


class Tag(NamedTuple):
    """Which message of which operation."""

    group: int
    sequence: int
    chunk: int = 0
    step: int = 0
    team: int = 0
    round: int = 0
    number: int = 0  # among the messages of a pair in a round


NO_TAG = Tag(0, 0)


class Frame(NamedTuple):
    """A header: the fragment [offset, offset + length) of a message of `total` bytes."""

    kind: Kind
    tag: Tag = NO_TAG
    total: int = 0
    offset: int = 0
    length: int = 0
    place: int = 0

    def pack(self) -> bytes:
        """Return the header's bytes."""
        return _HEADER.pack(self.kind, *self.tag, self.total, self.offset, self.length, self.place)

    @property
    def payload_bytes(self) -> int:
        """How many bytes follow the header on the connection."""
        return 0 if self.kind is Kind.SHARED else self.length


def unpack(header: bytes | bytearray | memoryview) -> Frame:
    """Read a header."""
    kind, *rest = _HEADER.unpack(header)
    return Frame(Kind(kind), Tag(*rest[:7]), *rest[7:])


def message(kind: Kind, value: dict[str, Any] | None = None) -> list[memoryview]:
    """Return a control frame with a JSON payload, ready to send."""
    body = json.dumps(value).encode() if value is not None else b""
    header = Frame(kind, length=len(body)).pack()
    return [memoryview(header + body)]


def read(payload: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Return the JSON payload of a control frame."""
    value: dict[str, Any] = json.loads(bytes(payload)) if len(payload) else {}
    return value
