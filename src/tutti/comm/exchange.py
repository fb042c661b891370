"""Point-to-point messages: how both ends number them, and the script of one round of them."""

from __future__ import annotations

import zlib

from torch import Tensor

from tutti.comm.script import Move, RoundScript, Script, StepScript, TeamScript
from tutti.errors import InputError

Messages = list[tuple[Tensor, int]]


class Channels:
    """Numbers point-to-point messages: both ends count alike, per peer, direction and channel.

    The upper half of a number is a hash of the channel's name, which both ends know without asking;
    the lower half counts. Two names with one hash would mix their messages: that is refused.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int, bool], int] = {}
        self._names: dict[int, str] = {}

    def next_number(self, channel: str, peer: int, receiving: bool) -> int:
        """Return the number of the next message."""
        mark = zlib.crc32(channel.encode())
        if self._names.setdefault(mark, channel) != channel:
            raise InputError(
                f"channel {channel!r} has the hash of channel {self._names[mark]!r}; "
                "give one of them another name"
            )
        count = self._counts.get((channel, peer, receiving), 0)
        self._counts[channel, peer, receiving] = count + 1
        return mark << 32 | count & 0xFFFFFFFF


def exchange_script(
    rank: int, sends: Messages, receives: Messages
) -> tuple[Script, tuple[Tensor | None, ...]]:
    """Return the script and its buffers; what a rank sends itself is copied at once."""
    _copy_own(rank, sends, receives)
    outgoing, leaving = _moves(sends, 0, rank)
    incoming, arriving = _moves(receives, len(leaving), rank)
    moves = RoundScript(0, outgoing, incoming)
    team = TeamScript(0, (moves,) if outgoing or incoming else ())
    script = Script(
        steps=(StepScript(0, 0, "exchange", (), (team,)),),
        copies=(),
        input_elements=0,
        output_elements=0,
        scratch_elements=0,
        first_steps=((0,),),
    )
    return script, (*leaving, *arriving)


def _moves(messages: Messages, first: int, rank: int) -> tuple[tuple[Move, ...], list[Tensor]]:
    moves: list[Move] = []
    seen: dict[int, int] = {}
    for number, (tensor, peer) in enumerate(messages):
        index = seen[peer] = seen.get(peer, -1) + 1
        count = tensor.numel()
        if count and peer != rank:
            ranges = ((first + number, 0, count),)
            moves.append(Move(peer, index, ranges, count, reduce=False, crosses=True))
    return tuple(moves), [tensor for tensor, _ in messages]


def _copy_own(rank: int, sends: Messages, receives: Messages) -> None:
    mine = [tensor for tensor, peer in sends if peer == rank]
    for source, (target, _) in zip(
        mine, [pair for pair in receives if pair[1] == rank], strict=True
    ):
        target.copy_(source)
