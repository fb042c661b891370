"""The copies of a host's chips are brought into another host's memory, and others' kept here.

A copy is a file and its label, as ranks write them. The sender reads the file, a part at a time,
and the last part brings the label, if it is still the one that was read first: a rank removes the
label before it writes over a copy. The receiver labels what is whole, and says so; only then does
the sender leave a mark for its rank, which keeps older copies until then. Nothing of a torn copy is
ever labelled, on either side.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import mmap
import socket as sockets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import zmq

from tutti.elastic.agent_settings import AgentSettings
from tutti.elastic.messages import Order
from tutti.files import write_text

PART_BYTES = 4 << 20
ARRIVED = ".arrived"  # of a copy that its partners have
KEPT = "partner-"  # how files of others' copies begin
OWN = "copy-"
_IN_FLIGHT = 8  # parts
_LOOK_S = 0.02
_ANSWER_S = 2.0
_SEAL_BYTES = 16
Kept = tuple[tuple[str, int, int], ...]  # chip, generation, step


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a copy; the last one has its label."""

    job: str
    chip: str
    turn: str
    generation: int
    step: int
    offset: int
    size: int  # of all parts
    label: str = ""


class Whole(msgspec.Struct, frozen=True, kw_only=True):
    """A copy has arrived."""

    chip: str
    generation: int
    step: int


def partners_of(host: str, hosts: Sequence[str], count: int) -> tuple[str, ...]:
    """Return the hosts that keep copies of one's chips: those farthest from it in their order.

    Neighbours share switches, racks and pools more often than hosts that are far apart.
    """
    ring = sorted(hosts)
    if host not in ring or len(ring) < 2:
        return ()
    at, half = ring.index(host), len(ring) // 2
    others = [ring[(at + half + n) % len(ring)] for n in range(len(ring))]
    return tuple(other for other in others if other != host)[:count]


def kept_copies(memory: Path) -> Kept:
    """Return the whole copies of other hosts' chips that lie here."""
    copies = list[tuple[str, int, int]]()
    for label in sorted(memory.glob(f"{KEPT}*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            copies.append(_named(label.read_text(encoding="utf-8")))
    return tuple(copies)


def _named(label: str) -> tuple[str, int, int]:
    words = json.loads(label)
    return str(words["chip"]), int(words["generation"]), int(words["facts"]["progress"]["step"])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Transfer:
    """What is to be brought where."""

    generation: int = 0
    chips: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()


class PartnerCopies:
    """Two threads beside an agent: one brings, one keeps."""

    def __init__(
        self,
        *,
        job: str,
        host: str,
        key: bytes,
        memory: Path,
        near: str,
        partners: int,
        changed: Callable[[Kept], None],
    ) -> None:
        """Listen; `near` is an address of zmq whose network this host is to be reached by."""
        self._job, self._host, self._key, self._memory = job, host, key, memory
        self._partners, self._changed = partners, changed
        self._context = zmq.Context()
        self._ears = self._context.socket(zmq.ROUTER)
        self._ears.setsockopt(zmq.LINGER, 0)
        self._ears.setsockopt(zmq.RCVHWM, _IN_FLIGHT)
        own = _own_address(near)
        self._ears.bind(f"tcp://[{own}]:*" if ":" in own else f"tcp://{own}:*")
        self.address: str = self._ears.getsockopt_string(zmq.LAST_ENDPOINT)
        self._lines: dict[str, zmq.Socket[bytes]] = {}
        self._errand, self._over = _Transfer(), threading.Event()
        self._brought: dict[tuple[str, str], str] = {}  # label that the partner has, by place
        self._threads = [
            threading.Thread(target=run, name=f"tutti-{name}", daemon=True)
            for name, run in (("bring", self._bring_all), ("keep", self._keep_all))
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def of(cls, settings: AgentSettings, changed: Callable[[Kept], None]) -> PartnerCopies:
        """Return that of an agent."""
        return cls(
            job=settings.job, host=settings.host, key=settings.key, memory=settings.memory,
            near=settings.controller, partners=settings.partners, changed=changed,
        )  # fmt: skip

    def follow(self, order: Order) -> None:
        """Take the generation at hand: whose copies are brought where."""
        if order.kind != "enter":
            if order.kind == "leave" and order.gentle:
                return  # steps are still made
            self._errand = replace(self._errand, addresses=())
            return
        known = dict(order.copy_addresses)
        there = [host for host in dict.fromkeys(seat.host for seat in order.seats) if host in known]
        self._errand = _Transfer(
            generation=order.generation,
            chips=tuple(seat.chip for seat in order.seats if seat.host == self._host),
            addresses=tuple(known[p] for p in partners_of(self._host, there, self._partners)),
        )

    def close(self) -> None:
        """End both threads."""
        self._over.set()
        for thread in self._threads:
            thread.join(_ANSWER_S + 1.0)
        for line in self._lines.values():
            line.close()
        self._ears.close()
        self._context.term()

    # --- bringing ------------------------------------------------------------------------------

    def _bring_all(self) -> None:
        while not self._over.wait(_LOOK_S):
            errand = self._errand
            for chip in errand.chips if errand.addresses else ():
                for label in sorted(self._memory.glob(f"{OWN}{chip.replace('/', '-')}-*.json")):
                    with contextlib.suppress(OSError, ValueError, KeyError):
                        self._look(label, errand)

    def _look(self, label: Path, errand: _Transfer) -> None:
        text = label.read_text(encoding="utf-8")
        _, generation, step = _named(text)
        if generation != errand.generation:
            return
        for address in errand.addresses:
            if self._brought.get((label.name, address)) != text:
                if not self._bring(label, text, errand.generation, address):
                    return
                self._brought[label.name, address] = text
        mark = label.with_suffix(ARRIVED)
        words = f"{generation} {step}\n"
        if not mark.is_file() or mark.read_text(encoding="ascii") != words:
            write_text(mark, words)

    def _bring(self, label: Path, text: str, generation: int, address: str) -> bool:
        """Bring a copy to a partner; False where it is not there afterwards."""
        line = self._line(address)
        chip, _, step = _named(text)
        turn = label.stem.rpartition("-")[2]
        with open(label.with_suffix(""), "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with contextlib.closing(data):
            size = len(data)
            for offset in range(0, size, PART_BYTES):
                last = offset + PART_BYTES >= size
                part = data[offset : offset + PART_BYTES]
                if last and label.read_text(encoding="utf-8") != text:
                    return False
                words = Part(
                    job=self._job, chip=chip, turn=turn, generation=generation, step=step,
                    offset=offset, size=size, label=text if last else "",
                )  # fmt: skip
                if not self._send(line, address, msgspec.msgpack.encode(words), part):
                    return False
        return self._heard(line, Whole(chip=chip, generation=generation, step=step))

    def _send(self, line: zmq.Socket[bytes], address: str, words: bytes, part: bytes) -> bool:
        until = time.monotonic() + _ANSWER_S
        while not line.poll(100, zmq.POLLOUT):
            gone = address not in self._errand.addresses
            if self._over.is_set() or gone or time.monotonic() > until:
                return False
        line.send_multipart([_seal(self._key, words, part), words, part])
        return True

    def _heard(self, line: zmq.Socket[bytes], wanted: Whole) -> bool:
        until = time.monotonic() + _ANSWER_S
        while time.monotonic() < until and not self._over.is_set():
            if not line.poll(100):
                continue
            seal, words = line.recv_multipart()
            if not hmac.compare_digest(seal, _seal(self._key, words)):
                continue
            if msgspec.msgpack.decode(words, type=Whole) == wanted:
                return True
        return False

    def _line(self, address: str) -> zmq.Socket[bytes]:
        if address not in self._lines:
            line = self._context.socket(zmq.DEALER)
            line.setsockopt(zmq.LINGER, 0)
            line.setsockopt(zmq.SNDHWM, _IN_FLIGHT)
            line.setsockopt(zmq.IMMEDIATE, 1)
            line.connect(address)
            self._lines[address] = line
        return self._lines[address]

    # --- keeping -------------------------------------------------------------------------------

    def _keep_all(self) -> None:
        coming: dict[Path, int] = {}  # bytes of a copy that have come
        while not self._over.is_set():
            if not self._ears.poll(100):
                continue
            identity, *frames = self._ears.recv_multipart()
            if len(frames) != 3 or not hmac.compare_digest(
                frames[0], _seal(self._key, frames[1], frames[2])
            ):
                continue
            part = msgspec.msgpack.decode(frames[1], type=Part)
            if part.job != self._job:
                continue
            with contextlib.suppress(OSError):  # a full memory: it is not answered, so not counted
                if self._keep(part, frames[2], coming):
                    words = msgspec.msgpack.encode(
                        Whole(chip=part.chip, generation=part.generation, step=part.step)
                    )
                    self._changed(kept_copies(self._memory))
                    self._ears.send_multipart([identity, _seal(self._key, words), words])

    def _keep(self, part: Part, data: bytes, coming: dict[Path, int]) -> bool:
        """Write a part; tell whether the copy is whole now."""
        path = self._memory / f"{KEPT}{part.chip.replace('/', '-')}-{Path(part.turn).name}"
        label = path.with_name(f"{path.name}.json")
        if part.offset == 0:
            label.unlink(missing_ok=True)
            with open(path, "ab") as file:
                file.truncate(part.size)
            coming[path] = 0
        with open(path, "r+b") as file:
            file.seek(part.offset)
            file.write(data)
        coming[path] = coming.get(path, 0) + len(data)
        if not part.label or coming.pop(path) != part.size:
            return False
        write_text(label, part.label)
        return True


def _seal(key: bytes, *parts: bytes) -> bytes:
    made = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        made.update(part)
    return made.digest()[:_SEAL_BYTES]


def _own_address(near: str) -> str:
    """Return the address by which this host is reached from where another one is."""
    other = urlsplit(near)
    host, port = other.hostname or "127.0.0.1", other.port or 1
    family = sockets.AF_INET6 if ":" in host else sockets.AF_INET
    with sockets.socket(family, sockets.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
