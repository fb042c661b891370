"""Door: lets ranks of the job in at a listening socket, and nobody else.

Whoever connects has to prove itself (`trust`) before a byte of it is understood as anything. A
stranger's bytes close its own connection; it is named, and nothing else happens. Those who say
nothing are few at a time, and not for long.
"""

from __future__ import annotations

import logging
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tutti.comm.entry.trust import HELLO_BYTES, PROOF_BYTES, Called, StrangerError
from tutti.comm.reactor import Reactor, Timer

Say = Callable[[str], None]
HANDSHAKE_S = 30.0  # a rank may be on a processor with much else to do
MOST_WAITING = 512  # connections that have not proven themselves
_PAUSE_S = 0.5  # when the process has no descriptors left
_MOST_ADDRESSES = 4096  # remembered
_MOST_A_MINUTE = 10
_SHOWN_BYTES = 48

log = logging.getLogger("tutti")


class Strangers:
    """Names those who were turned away: each address once, and not more than can be read."""

    def __init__(self, where: str, say: Say | None = None) -> None:
        self._where = where
        self._say: Say = say or log.warning
        self._known: set[str] = set()
        self._said_at: list[float] = []
        self._unsaid = 0

    def note(self, host: str, address: str, why: str, sent: bytes) -> None:
        """Name one, by where it comes from (`host`) and in full (`address`)."""
        if host in self._known or len(self._known) >= _MOST_ADDRESSES:
            return
        self._known.add(host)
        now = time.monotonic()
        self._said_at = [at for at in self._said_at if at > now - 60.0]
        if len(self._said_at) >= _MOST_A_MINUTE:
            self._unsaid += 1
            return
        self._said_at.append(now)
        more = f"; {self._unsaid} others are not named" if self._unsaid else ""
        self._unsaid = 0
        what = f"{why}; it sent {sent[:_SHOWN_BYTES]!r}" if sent else why
        self._say(
            f"a stranger at {address} was turned away from {self._where}: {what}; the run goes on"
            + more
        )


@dataclass(slots=True, eq=False)
class _Guest:
    """A connection that has not proven itself."""

    sock: socket.socket
    host: str
    address: str
    called: Called
    timer: Timer | None = None
    sent: bytearray = field(default_factory=bytearray)  # all of it, which is not much
    due: int = HELLO_BYTES  # bytes of `sent` that complete what is being read

    @property
    def has_greeted(self) -> bool:
        """Whether a greeting came that could be a rank's."""
        return self.due > HELLO_BYTES


class Door:
    """A listening socket of one rank."""

    def __init__(
        self,
        reactor: Reactor,
        listener: socket.socket,
        called: Callable[[], Called],
        admitted: Callable[[socket.socket, int], None],
        strangers: Strangers,
    ) -> None:
        """`called` makes the listening side of a handshake, `admitted` takes a socket and rank."""
        self._reactor = reactor
        self._listener = listener
        self._called = called
        self._admitted = admitted
        self._strangers = strangers
        self._guests: dict[_Guest, None] = {}  # in the order in which they came
        self._open = False

    def open(self) -> None:
        """Let them come; called by the reactor's thread, as all the rest."""
        self._open = True
        self._reactor.watch(self._listener, self._accept, None)

    def close(self) -> None:
        """Close the socket, and on everybody who waits."""
        self._open = False
        self._reactor.watch(self._listener, None, None)
        self._listener.close()
        for guest in list(self._guests):
            self._leave(guest)
            guest.sock.close()

    def _accept(self) -> None:
        while self._open:
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                return
            except OSError:  # no descriptors or memory: those who left make room
                self._reactor.watch(self._listener, None, None)
                self._reactor.after(_PAUSE_S, self._again)
                return
            self._greet(sock, address)

    def _again(self) -> None:
        if self._open:
            self._reactor.watch(self._listener, self._accept, None)

    def _greet(self, sock: socket.socket, address: object) -> None:
        try:
            sock.setblocking(False)
            host, full = _name(sock, address)
        except OSError:  # it has left
            sock.close()
            return
        if len(self._guests) >= MOST_WAITING:
            self._make_room()
        guest = _Guest(sock, host, full, self._called())
        self._guests[guest] = None
        silent = f"no proof within {HANDSHAKE_S:g} s"
        guest.timer = self._reactor.after(HANDSHAKE_S, lambda: self._refuse(guest, silent))
        self._reactor.watch(sock, lambda: self._read(guest), None)

    def _make_room(self) -> None:
        """Turn away the one who waits longest, of the address that most of them come from."""
        most = Counter(guest.host for guest in self._guests).most_common(1)[0][0]
        oldest = next(guest for guest in self._guests if guest.host == most)
        self._refuse(oldest, f"{MOST_WAITING} connections without a proof at once")

    def _read(self, guest: _Guest) -> None:
        try:
            received = guest.sock.recv(guest.due - len(guest.sent))
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            if guest.has_greeted:  # a rank may end before it was let in
                self._leave(guest)
                guest.sock.close()
            else:
                self._refuse(guest, "it hung up")
            return
        guest.sent += received
        try:
            self._heard(guest)
        except StrangerError as error:
            self._refuse(guest, str(error))

    def _heard(self, guest: _Guest) -> None:
        if len(guest.sent) < guest.due:
            guest.called.check_begin(bytes(guest.sent))
        elif not guest.has_greeted:
            reply = guest.called.reply(bytes(guest.sent))
            guest.due += PROOF_BYTES
            try:
                whole = guest.sock.send(reply) == len(reply)
            except OSError:
                whole = False
            if not whole:
                self._leave(guest)
                guest.sock.close()
        else:
            peer = guest.called.check(bytes(guest.sent[HELLO_BYTES:]))
            self._leave(guest)
            self._admitted(guest.sock, peer)

    def _refuse(self, guest: _Guest, why: str) -> None:
        self._leave(guest)
        guest.sock.close()
        # of a greeting, the random numbers say nothing to a reader
        sent = b"" if guest.has_greeted else bytes(guest.sent)
        self._strangers.note(guest.host, guest.address, why, sent)

    def _leave(self, guest: _Guest) -> None:
        self._guests.pop(guest, None)
        self._reactor.watch(guest.sock, None, None)
        if guest.timer is not None:
            guest.timer.cancel()


def _name(sock: socket.socket, address: object) -> tuple[str, str]:
    """Return where a connection comes from: its host (or user), and all that is known of it."""
    if sock.family == socket.AF_UNIX:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        process, user, _ = struct.unpack("3i", raw)
        return f"user {user}", f"process {process} of user {user} on this host"
    assert isinstance(address, tuple)
    host, port = address[:2]
    return str(host), f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
