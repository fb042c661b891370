"""An agent's line to the controller: statuses, what ranks say, and what is asked of it.

Statuses are whole, so the newest is enough. What ranks say is numbered without gaps and sent again
until the controller has heard it: a line that breaks loses nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq

from tutti.elastic.messages import (
    HeardWords,
    Message,
    Order,
    Pulses,
    Refusal,
    Request,
    SealError,
    Status,
    Words,
    packed,
    unpacked,
)

AGAIN_S = 1.0  # until words that nobody confirmed are sent again
MOST_WORDS = 10_000  # that wait for a controller which is away


class ControllerLink:
    """The socket, and what still has to be heard."""

    def __init__(self, address: str, key: bytes, job: str, host: str, incarnation: int) -> None:
        self._key, self._job, self._host, self._incarnation = key, job, host, incarnation
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 200)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self.address = address
        self.socket.connect(address)
        self._waiting: deque[Words] = deque(maxlen=MOST_WORDS)
        self._number, self._sent_at = 0, 0.0
        self.heard_at = time.monotonic()  # something of the controller

    def follow(self, address: str) -> None:
        """Talk to another controller from now on; what was not heard yet is told to it, too."""
        if address != self.address:
            self.socket.disconnect(self.address)
            self.address = address
            self.socket.connect(address)
            self._send_waiting()  # first: what it hears first is to it the first there is

    def status(self, status: Status) -> None:
        """Send a status."""
        self._send(status)

    def pulses(self, pulses: Pulses) -> None:
        """Send what the ranks do."""
        self._send(pulses)

    def words(self, chip: str, process: int, values: dict[str, Any]) -> None:
        """Send what a rank said; it stays until it was heard."""
        self._number += 1
        words = Words(
            job=self._job, host=self._host, incarnation=self._incarnation, number=self._number,
            first=self._number, chip=chip, process=process, values=values,
        )  # fmt: skip
        self._waiting.append(words)
        self._sent_at = time.monotonic()
        self._say(words)

    def again(self) -> None:
        """Send what nobody confirmed for a while."""
        if self._waiting and time.monotonic() > self._sent_at + AGAIN_S:
            self._send_waiting()

    def _send_waiting(self) -> None:
        self._sent_at = time.monotonic()
        for words in self._waiting:
            self._say(words)

    def _say(self, words: Words) -> None:
        self._send(msgspec.structs.replace(words, first=self._waiting[0].number))

    def messages(self) -> Iterator[Order | Request | Refusal]:
        """Yield what the controller asks for."""
        while self.socket.poll(0):
            data = self.socket.recv()
            try:
                message = unpacked(data, self._key)
            except (msgspec.DecodeError, SealError):
                continue
            if isinstance(message, Refusal):
                yield message
            elif getattr(message, "job", "") != self._job:
                continue
            self.heard_at = time.monotonic()
            if isinstance(message, HeardWords):
                if message.incarnation == self._incarnation:
                    while self._waiting and self._waiting[0].number <= message.number:
                        self._waiting.popleft()
            elif isinstance(message, Order | Request):
                yield message

    def close(self) -> None:
        """Let go of the socket."""
        self.socket.close()
        self._context.term()

    def _send(self, message: Message) -> None:
        self.socket.send(packed(message, self._key))
