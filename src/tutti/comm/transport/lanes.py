"""Lanes: the connections of one link, and how it goes on when one of them breaks.

The side that sends decides. A connection is lost when the kernel says so, or when its path no
longer answers. Then the other side is asked over another connection how much of it has come; it
closes its end, so that nothing comes late, and what it has not counted goes out again. New
connections are tried from other ports and over other addresses of both hosts, a few at once, until
there are as many as before: one that the network sends elsewhere gets through. A rank whose host
says that nobody listens there has ended.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tutti.comm import frames
from tutti.comm.frames import Frame, Kind
from tutti.comm.reactor import Timer
from tutti.comm.transport.connection import Handler, Outgoing
from tutti.comm.transport.lane import Carried, Lane
from tutti.comm.transport.link import LinkOwner, Replies
from tutti.comm.transport.sent_log import Sent, SentLog, nothing

_LOOK_S = 0.2  # between looks at paths that owe a word
_TRY_S, _LATER_S = 0.1, 1.0  # between new connections: the first few, and from then on
_SOON = 10
_MOST_TRIES = 8  # under way at once
_MOST_TURNED_AWAY = 5  # in a row: a door that opens and shuts, with nobody of this job behind it

log = logging.getLogger("tutti")


@dataclass(frozen=True, slots=True)
class Ends:
    """Where both ends can be reached."""

    home: tuple[str, ...]
    away: tuple[str, ...]
    port: int

    def pair(self, index: int) -> tuple[str, str]:
        """Return the addresses of the `index`-th connection: NIC to NIC, in turn."""
        return self._home(index), self.away[index % len(self.away)]

    def other_pair(self, index: int) -> tuple[str, str]:
        """Return the addresses of the `index`-th try: every NIC to every other, in turn."""
        turn, number = divmod(index, max(len(self.home), 1))
        return self._home(index), self.away[(number + turn) % len(self.away)]

    def _home(self, index: int) -> str:
        return self.home[index % len(self.home)] if self.home else ""


class Lanes:
    """All connections from this rank to another."""

    def __init__(
        self,
        owner: LinkOwner,
        peer: int,
        ends: Ends,
        make_socket: Callable[[socket.AddressFamily], socket.socket],
        refill: Callable[[Lane, int], Outgoing | None],
    ) -> None:
        """`refill` returns what a connection sends next, given its place among those that work."""
        self._owner = owner
        self._peer = peer
        self._ends = ends
        self._make_socket = make_socket
        self._refill = refill
        self._wanted = max(owner.settings.connections, 1)
        self._lanes: list[Lane] = []
        self._tried: list[Lane] = []  # to take the place of a lost one
        self._lost: dict[int, SentLog] = {}  # by number, until the other side says what came
        self._again: deque[Sent] = deque()  # goes before all that is new
        self._numbers = self._tries = self._pairs = 0
        self._timer: Timer | None = None  # of the next try
        self._looking = self._over = False
        self._why = ""
        self._turned_away = 0  # connections that were closed before both sides trusted each other
        self._confirmed = True  # something came since connections were last mended
        for index in range(self._wanted):
            self._open(*ends.pair(index), self._lanes)
        self._look_later()

    @property
    def keeps(self) -> bool:
        """Whether what is sent is kept until it is confirmed."""
        return self._owner.settings.resend_bytes > 0

    # --- connections -------------------------------------------------------------------------

    def _open(self, home: str, away: str, among: list[Lane]) -> None:
        sock = self._make_socket(socket.AF_INET6 if ":" in away else socket.AF_INET)
        if home:
            with contextlib.suppress(OSError):  # an address that was declared but is not here
                sock.bind((home, 0))
        code = sock.connect_ex((away, self._ends.port))
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            self._no_way(code)
            return
        replies = Replies(self._owner, self._peer)
        lane: Lane

        def arrived(frame: Frame) -> None:
            self._heard(lane, frame, replies)

        handler = Handler(
            room=replies.room,
            arrived=arrived,
            closed=lambda reason: self._closed(lane, reason),
            refill=lambda: self._next(lane),
            trusted=lambda: self._joined(lane),
        )
        self._numbers += 1
        lane = Lane(
            self._owner.reactor, sock, self._numbers, handler,
            caller=self._owner.caller(self._peer), counted=self.keeps,
        )  # fmt: skip
        among.append(lane)

    def _no_way(self, code: int) -> None:
        """Note that the kernel knows at once that an address cannot be reached."""
        self._why = self._why or f"cannot be reached ({os.strerror(code)})"
        if not self.keeps or (code == errno.ECONNREFUSED and not self._lanes):
            self._owner.reactor.call(self._end)
        elif self._timer is None:
            self._owner.reactor.call(self._mend)

    def _joined(self, lane: Lane) -> None:
        """Take a connection into use, both sides having proven themselves."""
        if lane in self._tried:
            self._tried.remove(lane)
            self._lanes.append(lane)
        self._turned_away = 0
        self._ask_what_came()

    @property
    def _working(self) -> list[Lane]:
        return [lane for lane in self._lanes if lane.trusted]

    # --- sending -----------------------------------------------------------------------------

    def kick(self) -> None:
        """Send what there is."""
        for lane in list(self._lanes):
            lane.connection.kick()
        self._look_later()

    def control(self, views: list[memoryview]) -> None:
        """Send a control frame on the first connection that works."""
        lane = next(iter(self._working), None)
        if lane is not None:
            lane.control(views)
        elif self.keeps:
            self._again.append(Sent(tuple(views), 0, nothing))
        elif self._lanes:
            self._lanes[0].control(views)
        self._look_later()

    def _next(self, lane: Lane) -> Outgoing | None:
        if lane not in self._lanes:
            return None
        if self._again:
            return lane.carry(self._again.popleft())
        if self.keeps and self._kept_bytes() >= self._owner.settings.resend_bytes:
            return None
        return self._refill(lane, self._lanes.index(lane))

    def _kept_bytes(self) -> int:
        lost = sum(log.num_bytes for log in self._lost.values())
        return lost + sum(lane.log.num_bytes for lane in self._lanes)

    def _heard(self, lane: Lane, frame: Frame, replies: Replies) -> None:
        if frame.kind is Kind.CONFIRM:
            self._confirmed = True
            lane.log.confirm(frame.place)
            self.kick()
        elif frame.kind is Kind.RESUMED:
            self._send_again(replies.read(frame)["came"])
        else:
            replies.arrived(frame)

    @property
    def carried(self) -> Carried:
        """What the connections that work have carried, all together."""
        own = [lane.carried for lane in list(self._lanes)]
        return Carried(sum(one.bytes for one in own), sum(one.busy_s for one in own))

    # --- when one is lost --------------------------------------------------------------------

    def _closed(self, lane: Lane, reason: str) -> None:
        """Go on without a connection."""
        if self._over:
            return
        refused = lane.connection.refused and not self._working
        if lane in self._tried:
            self._tried.remove(lane)
            self._turned_away += lane.connection.is_connected
            if refused or (self._turned_away >= _MOST_TURNED_AWAY and not self._working):
                self._end()
            return
        self._lanes.remove(lane)
        self._why = reason
        if refused or not self.keeps:
            self._end()
            return
        self._lost[lane.number] = lane.log
        lane.log.settle()
        self._ask_what_came()
        self._mend()

    def _end(self) -> None:
        """Give the rank up."""
        if not self._over:
            self._over = True
            self._drop(self._tried)
            self._owner.broken(self._peer, self._why)

    def _ask_what_came(self) -> None:
        """Ask how much has come of the lost connections."""
        lane = next(iter(self._working), None)
        if lane is not None and self._lost:
            lane.control(frames.message(Kind.RESUME, {"lost": sorted(self._lost)}), again=False)
            self._look_later()

    def _send_again(self, came: dict[str, int]) -> None:
        for number, count in came.items():
            lost = self._lost.pop(int(number), None)
            if lost is not None:
                rest = lost.rest(count)
                self._again.extend(rest)
                log.warning(
                    "rank %d: a connection to rank %d %s; %d frames go out again",
                    self._owner.rank, self._peer, self._why, len(rest),
                )  # fmt: skip
        self._owner.replied(self._peer, Kind.RESUMED, {})
        self.kick()

    def _mend(self) -> None:
        """Begin to open connections in place of lost ones, in quick succession at first.

        Where nothing came since the last time, paths break as soon as they are there: no hurry.
        """
        if not self._confirmed:
            if self._timer is None:
                self._timer = self._owner.reactor.after(_LATER_S, self._try)
            return
        if self._timer is not None:
            self._timer.cancel()
        self._tries, self._confirmed = 0, False
        self._try()

    def _try(self) -> None:
        """Open another connection, unless there are enough."""
        self._timer = None
        if self._over:
            return
        if len(self._lanes) >= self._wanted:
            self._drop(self._tried)
            return
        if len(self._tried) >= _MOST_TRIES:
            self._drop(self._tried[:1])
        pair = self._ends.other_pair(self._pairs)
        self._pairs += 1
        self._tries += 1
        wait_s = _TRY_S if self._tries < _SOON else _LATER_S
        self._timer = self._owner.reactor.after(wait_s, self._try)
        self._open(*pair, self._tried)

    def _drop(self, lanes: list[Lane]) -> None:
        for lane in list(lanes):
            self._tried.remove(lane)
            lane.connection.close()

    # --- paths that no longer answer ---------------------------------------------------------

    def _look_later(self) -> None:
        if self.keeps and not self._looking and not self._over and self._owing():
            self._looking = True
            self._owner.reactor.after(_LOOK_S, self._look)

    def _owing(self) -> bool:
        return any(len(lane.log) or not lane.trusted for lane in self._lanes)

    def _look(self) -> None:
        self._looking = False
        for lane in list(self._lanes):
            if lane in self._lanes and lane.is_silent:
                lane.connection.abort()
                self._closed(lane, "does not answer on its path")
        self._look_later()

    # --- the end -----------------------------------------------------------------------------

    @property
    def is_mending(self) -> bool:
        """Whether something of a lost connection has yet to come."""
        return not self._over and bool(self._lost or self._again)

    def flush(self, seconds: float) -> None:
        """Send what waits on the first connection that works, blocking."""
        lane = next(iter(self._working or self._lanes), None)
        if lane is None:
            return
        lane.connection.flush(seconds)
        if lane.trusted and self._again:
            while self._again:
                lane.connection.send(lane.carry(self._again.popleft()).views)
            lane.connection.flush(seconds)

    def close(self) -> None:
        """Close all connections."""
        self._over = True
        for lane in (*self._lanes, *self._tried):
            lane.connection.close()
