"""Executor: runs operations of one rank, and ends them all when something fails.

A single thread (the reactor's) owns every run. Killed ranks are noticed by their connections;
stopped ones by their silence: a rank whose operation makes no progress asks those it waits for
what they do, and blames the one that does not answer, or that never entered the operation. Whoever
finds the culprit tells all the others, so every rank names the same one.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tutti.comm import frames
from tutti.comm.errors import ClosedError, CommError, CommTimeoutError, PeerLostError
from tutti.comm.frames import Kind, Tag
from tutti.comm.inbox import Receive
from tutti.comm.mesh import Events, Listeners, Mesh
from tutti.comm.move import Buffers, Mover
from tutti.comm.native import NativeQueue
from tutti.comm.places import Topology
from tutti.comm.run import Run
from tutti.comm.script import NativeCall
from tutti.comm.spans import Spans
from tutti.comm.transport.connection import Connection
from tutti.comm.transport.lane import Carried
from tutti.comm.transport.link import LinkOwner, OutLink

_GRACE_S = 0.25  # for news of the real culprit to arrive before a broken connection is blamed
_LINGER_S = 1.0  # at the end, for what has to be sent again
_TICKS = 20  # looks at a time-out before it is over

OpenRun = tuple[str, tuple[int, ...], int]  # name, the ranks it waits for, last progress (ns)


@dataclass(slots=True)
class _Answer:
    """What a rank said of itself when asked."""

    asked_at: float = 0.0
    answered_at: float = 0.0
    heard: bool = False  # since a connection to it was mended
    entered: dict[str, int] = field(default_factory=dict)
    waits_for: int | None = None
    idle_s: float = 0.0

    def pending_s(self, now: float) -> float:
        """Return for how long a question has been without an answer."""
        return now - self.asked_at if self.asked_at > self.answered_at else 0.0


class Executor:
    """All operations of this rank."""

    def __init__(
        self,
        owner: LinkOwner,
        topology: Topology,
        listeners: Listeners,
        stranger: Callable[[str], None] | None = None,
    ) -> None:
        self._owner = owner
        self.rank = owner.rank
        self.topology = topology
        self.buffers: Buffers = owner.buffers
        self.native = NativeQueue(owner.reactor, self._native_failed, owner.accelerator)
        self.failure: CommError | None = None
        self._runs: dict[tuple[int, int], Run] = {}
        self._entered: dict[int, int] = {}
        self._answers: dict[int, _Answer] = {}
        self._ticking = False
        self._closing = False
        self._closed = False
        owner.replied = self._replied
        owner.broken = self._broken
        owner.reactor.on_failure = self._crashed
        events = Events(
            control=self._control,
            broken=self._broken,
            doubted=self._doubted,
            failed=self._mismatched,
            stranger=stranger,
        )
        self._mesh = Mesh(owner, topology, listeners, events)
        owner.reactor.call(self._open)

    def _open(self) -> None:
        self._mesh.open()

    # --- operations ------------------------------------------------------------------------

    def submit(self, run: Run) -> None:
        """Start an operation; called by any thread."""
        self._owner.reactor.call(lambda: self._start(run))

    def _start(self, run: Run) -> None:
        self._entered[run.group] = max(run.sequence, self._entered.get(run.group, -1))
        if self.failure is not None:
            run.fail(self.failure)
            return
        self._runs[run.group, run.sequence] = run
        run.then = self._ended
        self.native.expect(run)
        if run.begins is not None and self._owner.device_mover is not None:
            self._owner.device_mover.follow(run.begins)
        try:
            run.start()
        except (ValueError, OSError, RuntimeError) as error:
            self._run_failed(run, error)
        if self._runs and not self._ticking:
            self._ticking = True
            self._tick()

    def _ended(self, run: Run) -> None:
        self._runs.pop((run.group, run.sequence), None)

    def out(self, peer: int) -> OutLink:
        """Return the link to a rank."""
        if self._mesh.has_left(peer):
            raise OSError(f"rank {peer} has left")
        return self._mesh.out(peer)

    def post(self, peer: int, tag: Tag, receive: Receive) -> None:
        """Ask for a message of a rank."""
        self._mesh.inbox(peer).post(tag, receive)

    def mover(self, spans: Spans) -> Mover:
        """Return who moves bytes of these tensors."""
        return self._owner.mover(spans)

    def call_native(self, run: Run, call: NativeCall, done: Callable[[], None]) -> None:
        """Run a native call in its turn."""
        self.native.ready(run, call, done)

    # --- time-outs -------------------------------------------------------------------------

    def _tick(self) -> None:
        if not self._runs or self.failure is not None:
            self._ticking = False
            return
        now = time.monotonic()
        for run in list(self._runs.values()):
            if self.failure is None:
                self._look(run, now)
        shortest = min((run.timeout_s for run in self._runs.values()), default=1.0)
        self._owner.reactor.after(min(1.0, shortest / _TICKS), self._tick)

    def _look(self, run: Run, now: float) -> None:
        idle = now - run.progress_at
        if idle < run.timeout_s / 2:
            return
        peers = _peers_of(run)
        for peer in peers:
            self._ask(peer, now, run.timeout_s / 8)
        if idle < run.timeout_s:
            return
        silent = [p for p in peers if self._answers[p].pending_s(now) > run.timeout_s / 4]
        # One that has not entered because it is stuck in something earlier is not to blame.
        idlers = [p for p in peers if self._answers[p].heard and self._answers[p].waits_for is None]
        absent = [p for p in idlers if not self._has_entered(p, run)]
        waiting = [p for p in peers if self._answers[p].idle_s >= run.timeout_s / 2]
        # Of a message there is no "entering": one that waits for nobody and sends nothing owes it.
        owing = idlers if run.is_point_to_point else []
        if silent:
            self._time_out(run, min(silent), "does not answer: stopped, or its host is gone")
        elif absent:
            last = self._answers[min(absent)].entered.get(str(run.group), -1)
            seen = "nothing" if last < 0 else f"#{last}"
            self._time_out(run, min(absent), f"is alive but has not entered it (last: {seen})")
        elif owing and idle > 1.25 * run.timeout_s:
            due = "sent" if (min(owing), True) in {key[:2] for key in run.outstanding} else "taken"
            self._time_out(run, min(owing), f"is alive but has not {due} it")
        elif not peers:
            self._time_out(run, None, "a native call of its island does not return")
        elif len(waiting) == len(peers) and idle > 1.25 * run.timeout_s + 0.5:
            peer = min(peers)
            other = self._answers[peer].waits_for
            if other in (None, self.rank):
                self._time_out(run, peer, "is alive but makes no progress")
            else:
                self._time_out(run, other, f"is what rank {peer} waits for")

    def _has_entered(self, peer: int, run: Run) -> bool:
        if run.is_point_to_point:
            return True
        return self._answers[peer].entered.get(str(run.group), -1) >= run.sequence

    def _ask(self, peer: int, now: float, every_s: float) -> None:
        answer = self._answers.setdefault(peer, _Answer())
        if not answer.pending_s(now) and now - answer.asked_at >= every_s:
            answer.asked_at = now
            with contextlib.suppress(OSError):
                self._mesh.out(peer).control(frames.message(Kind.ASK))

    def _time_out(self, run: Run, peer: int | None, why: str) -> None:
        where = next(
            (text for (p, _, _), text in run.outstanding.items() if p == peer), "no message open"
        )
        who = f"rank {peer}" if peer is not None else f"rank {self.rank}"
        text = f"{run.work.name}, {where}: no progress for {run.timeout_s:g} s; {who} {why}"
        self._abort(CommTimeoutError, text, peer, run.work.name)

    # --- seen from outside -------------------------------------------------------------------

    def watch(self, every_s: float, tell: Callable[[list[OpenRun]], None]) -> None:
        """Tell what is open every so often, for as long as there is something to run."""

        def look() -> None:
            if self._closing:
                return
            tell(
                [
                    (run.work.name, tuple(sorted(_peers_of(run))), int(run.progress_at * 1e9))
                    for run in self._runs.values()
                ]
            )
            self._owner.reactor.after(every_s, look)

        self._owner.reactor.call(look)

    def carried(self) -> dict[int, Carried]:
        """Return what the wires to other hosts have carried so far, by rank."""
        return self._mesh.carried()

    def abort(self, why: str) -> None:
        """End everything here because somebody outside says so."""
        self._owner.reactor.call(lambda: self._abort(PeerLostError, why, None, ""))

    # --- failures --------------------------------------------------------------------------

    def _run_failed(self, run: Run, error: BaseException) -> None:
        peer = next((p for p, _, _ in run.outstanding), None)
        self._abort(PeerLostError, f"{run.work.name}: {error}", peer, run.work.name)

    def _broken(self, peer: int, reason: str) -> None:
        """Blame a rank whose connection broke, unless news of another culprit comes first."""
        if self._closing or self.failure is not None:
            return
        self._owner.reactor.after(_GRACE_S, lambda: self._lost(peer, reason))

    def _doubted(self, peer: int, reason: str) -> None:
        """Find out whether a rank whose connection ended is still there: it may open another."""

        def ask() -> None:
            if self._closing or self.failure is not None:
                return
            if self._mesh.has_left(peer):
                self._lost(peer, reason)
                return
            try:
                self._mesh.out(peer).control(frames.message(Kind.ASK))
            except OSError:
                self._lost(peer, reason)

        self._owner.reactor.after(_GRACE_S, ask)

    def _lost(self, peer: int, reason: str) -> None:
        if self._mesh.has_left(peer) and not self._waits_for(peer):
            return
        run = self._waits_for(peer) or next(iter(self._runs.values()), None)
        where = ""
        if run is not None:
            step = next((s for (p, _, _), s in run.outstanding.items() if p == peer), "")
            where = f"{run.work.name}{', ' + step if step else ''}: "
        name = run.work.name if run is not None else ""
        self._abort(PeerLostError, f"{where}rank {peer} {reason}", peer, name)

    def _waits_for(self, peer: int) -> Run | None:
        for run in self._runs.values():
            if any(p == peer for p, _, _ in run.outstanding):
                return run
        return None

    def _mismatched(self, peer: int, error: BaseException) -> None:
        run = self._waits_for(peer)
        name = run.work.name if run is not None else ""
        self._abort(PeerLostError, f"{name}: message of rank {peer}: {error}", peer, name)

    def _native_failed(self, run: Run, error: BaseException) -> None:
        self._abort(PeerLostError, f"{run.work.name}, native call: {error}", None, run.work.name)

    def _crashed(self, error: BaseException) -> None:
        text = f"internal error: {type(error).__name__}: {error}"
        self._abort(CommError, text, self.rank, "")

    def _abort(self, kind: type[CommError], text: str, peer: int | None, operation: str) -> None:
        """End everything here, and tell everybody why."""
        if self.failure is not None or self._closing:
            return
        value = {
            "kind": kind.__name__,
            "text": text,
            "peer": peer,
            "operation": operation,
            "teller": self.rank,
        }
        self._end_all(value)

    def _end_all(self, value: dict[str, Any]) -> None:
        kinds = {k.__name__: k for k in (PeerLostError, CommTimeoutError, ClosedError)}
        teller = value["teller"]
        heard = "" if teller == self.rank else f" (told by rank {teller})"
        self.failure = kinds.get(value["kind"], CommError)(
            f"rank {self.rank}: {value['text']}{heard}",
            rank=self.rank,
            peer=value["peer"],
            operation=value["operation"],
        )
        self._owner.lost = True
        self._mesh.tell_all(Kind.ABORT, value)
        for run in list(self._runs.values()):
            run.fail(self.failure)
        self._runs.clear()
        self.native.abort()

    # --- control frames --------------------------------------------------------------------

    def _control(
        self, peer: int, kind: Kind, value: dict[str, Any], connection: Connection
    ) -> None:
        del peer
        if kind is Kind.ASK:
            connection.send(frames.message(Kind.STATUS, self._status()))
        elif kind is Kind.ABORT and self.failure is None and not self._closing:
            self._end_all(value)

    def _status(self) -> dict[str, Any]:
        oldest = min(self._runs.values(), key=lambda run: run.progress_at, default=None)
        waits = idle = None
        if oldest is not None:
            waits = min(_peers_of(oldest), default=None)
            idle = time.monotonic() - oldest.progress_at
        return {
            "entered": {str(group): number for group, number in self._entered.items()},
            "waits_for": waits,
            "idle_s": idle or 0.0,
        }

    def _replied(self, peer: int, kind: Kind, value: dict[str, Any]) -> None:
        answer = self._answers.setdefault(peer, _Answer())
        if kind is Kind.RESUMED:  # its answer may have been on the connection that was lost
            answer.asked_at = answer.answered_at = 0.0
            answer.heard = False
        if kind is not Kind.STATUS:
            return
        answer.heard = True
        answer.answered_at = time.monotonic()
        answer.entered = value["entered"]
        answer.waits_for = value["waits_for"]
        answer.idle_s = value["idle_s"]

    # --- the end ---------------------------------------------------------------------------

    def close(self) -> None:
        """Say goodbye, close every connection, and end the thread; once."""
        if self._closed:
            return
        self._closed = True
        over = threading.Event()
        latest = time.monotonic() + _LINGER_S

        def end() -> None:
            if self.failure is None and self._mesh.is_mending and time.monotonic() < latest:
                self._owner.reactor.after(_LINGER_S / 20, end)  # what was sent last comes, too
                return
            if not self._closing:
                self._closing = True
                error = ClosedError(f"rank {self.rank}: closed", rank=self.rank)
                for run in self._runs.values():
                    run.fail(error)
                self.failure = self.failure or error
                self._mesh.say_goodbye()
                self._mesh.close()
                self.native.close()
            over.set()

        self._owner.reactor.call(end)
        over.wait(5.0)
        self._owner.reactor.stop()


def _peers_of(run: Run) -> set[int]:
    """Return the ranks that an operation waits for: to hear of, else to take what it sends."""
    hears = {peer for peer, receives, _ in run.outstanding if receives}
    return hears or {peer for peer, _, _ in run.outstanding}
