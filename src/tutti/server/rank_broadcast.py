"""What an engine's first rank says to its others: the requests of a turn, all in one order.

Nothing but token ids and wishes; each rank then makes the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import zmq

from tutti.serve.handover.handed import Handover
from tutti.server.messages import Wishes
from tutti.server.sockets import ServerSockets, SocketName


class Add(msgspec.Struct, frozen=True, tag="add", omit_defaults=True):
    """A request that the first rank took."""

    tokens: list[int]
    wishes: Wishes
    pooling: str | None = None
    handover: Handover | None = None
    imported: str = ""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Nobody wants a request any more."""

    number: int


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """Nobody wants keys and values any more."""

    key: str


Word = Add | Stop | Forget
_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(list[Word])


class RankBroadcast:
    """The other ranks, as the first one sees them."""

    def __init__(self, sockets: ServerSockets, names: Sequence[SocketName]) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._sockets = []
        for name in names:
            socket = context.socket(zmq.PUSH)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.LINGER, 0)
            sockets.connect(socket, name)
            self._sockets.append(socket)

    def tell(self, words: Sequence[Word]) -> None:
        """Let all take their next turn, with these words first."""
        data = _encode(list(words))
        for socket in self._sockets:
            socket.send(data)


class RankListener:
    """The first rank, as another one hears it."""

    def __init__(self, sockets: ServerSockets, name: SocketName) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        sockets.bind(self._socket, name)

    def hear(self) -> list[Word]:
        """Wait for the next turn; return what was said."""
        words: list[Word] = _decoder.decode(self._socket.recv())
        return words
