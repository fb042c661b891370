"""A job's store in etcd: who leads, by lease; its decisions; the number of its generation.

    etcd://HOST:PORT[,HOST:PORT…]/NAME

Whoever leads keeps a lease alive and has the key `leader`; every decision is written in a
transaction that asks whether it still does. Without an answer of etcd for as long as the lease
lasts, nobody leads: the ranks train on, and nothing is decided. The decisions also go to the log
in the run's folder, where people read them.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec

from tutti.elastic.etcd import Etcd, Pair, StoreAwayError, StoreRefusedError
from tutti.elastic.journal import Entry, Journal, entry_of
from tutti.errors import InputError, TuttiError

SCHEME = "etcd://"
LEASE_S = 3
CANDIDATE_S = 20  # that a host is given to begin to lead
_SURE = 0.8  # of a lease is counted on: clocks do not run alike
_AGAIN_S = 0.3
_NUMBER = "{:08d}"


class LostLeadError(TuttiError):
    """Another host leads the job by now."""


class LeadingHost(msgspec.Struct, frozen=True, kw_only=True):
    """Who leads."""

    address: str  # zmq's
    node: str


class EtcdStore:
    """The store of one job."""

    def __init__(self, url: str) -> None:
        self.url = url
        members, self.name = parse_url(url)
        self._etcd = Etcd(members)
        self._lock = threading.Lock()
        self._unsure: list[str] = []  # leases of claims whose answer was lost

    # --- what all may ask ------------------------------------------------------------------------

    def job(self) -> str:
        """Return the id of the job that the store is of; empty: of none yet."""
        return self._value("job")

    def leader(self) -> LeadingHost | None:
        """Return who leads; None: nobody does."""
        value = self._value("leader")
        return msgspec.json.decode(value, type=LeadingHost) if value else None

    def generation(self) -> int:
        """Return the number of the newest generation; 0 if none."""
        return int(self._value("generation") or 0)

    def led(self) -> str:
        """Return the token of the last that led."""
        return self._value("led")

    def entries(self) -> list[Entry]:
        """Return all decisions."""
        entries = list[Entry]()
        for number, pair in enumerate(self._read("decisions/", below=True)):
            if not pair.key.endswith(_NUMBER.format(number)):
                raise InputError(
                    f"{self.url}: decision {number} is missing; its log was cut off, so that "
                    "nobody can know the job's state; give `store` another name"
                )
            entries.append(entry_of(json.loads(pair.value)))
        return entries

    def last(self) -> Entry | None:
        """Return the last decision."""
        pairs = self._read("decisions/", below=True, last=True)
        return entry_of(json.loads(pairs[0].value)) if pairs else None

    # --- to lead ---------------------------------------------------------------------------------

    def begin(self, job: str, *, again: bool) -> None:
        """Make the store that of a job; of what another one left, nothing stays."""
        known = self.job()
        if again and known in ("", job):
            self._put("job", job)
            return
        leader = self.leader()
        if leader is not None:
            raise InputError(
                f"{self.url}: job {known} is led by {leader.node} at this moment; join it by "
                f"`tutti agent --join {self.url}`, or give `elastic.store` another name"
            )
        if again:
            raise InputError(
                f"{self.url}: is of job {known}, not of {job}, which is to be resumed; give "
                "`elastic.store` the name that it had"
            )
        with self._lock:
            self._etcd.delete(self._key(""), below=True)
        self._put("job", job)

    def stand(self, node: str) -> bool:
        """Stand for leader; True: this host is the only one that does for a while."""
        return self._claim("candidate", node, CANDIDATE_S) is not None

    def stand_down(self) -> None:
        """Let another host stand."""
        with self._lock:
            self._etcd.delete(self._key("candidate"))

    def take(self, leader: LeadingHost, *, last: str = "") -> tuple[str, int] | None:
        """Take the lead; return its lease, and when the key was made. None: another leads.

        With `last` only if that token is still of the last that led.
        """
        still = (self._key("led"), last) if last else None
        return self._claim("leader", msgspec.json.encode(leader).decode(), LEASE_S, still)

    def _claim(
        self, key: str, value: str, seconds: int, still: tuple[str, str] | None = None
    ) -> tuple[str, int] | None:
        with self._lock:
            while self._unsure:  # what it may have written goes with it
                with contextlib.suppress(StoreRefusedError):  # it ran out
                    self._etcd.revoke(self._unsure[-1])
                self._unsure.pop()
            lease = self._etcd.grant(seconds)
            self._unsure.append(lease)
            made = self._etcd.claim(self._key(key), value, lease, still=still)
            self._unsure.clear()
        return (lease, made) if made else None

    def keep(self, lease: str) -> bool:
        """Keep the lead; False: it is lost."""
        with self._lock:
            return self._etcd.keep(lease)

    def let_go(self, lease: str) -> None:
        """Lead no more."""
        with self._lock:
            self._etcd.revoke(lease)

    def decide(self, number: int, entry: Entry, made: int) -> None:
        """Write a decision as the leader whose key was made at a revision."""
        self.write(f"decisions/{_NUMBER.format(number)}", Journal.line(entry), made)

    def write(self, key: str, value: str, made: int) -> None:
        """Write something as the leader whose key was made at a revision."""
        with self._lock:
            kept = self._etcd.put(self._key(key), value, made=made, of=self._key("leader"))
        if not kept:
            raise LostLeadError(f"{self.url}: another host leads the job by now")

    def _key(self, name: str) -> str:
        return f"/tutti/{self.name}/{name}"

    def _value(self, key: str) -> str:
        pairs = self._read(key)
        return pairs[0].value if pairs else ""

    def _read(self, key: str, *, below: bool = False, last: bool = False) -> list[Pair]:
        with self._lock:
            return self._etcd.read(self._key(key), below=below, last=last)

    def _put(self, key: str, value: str) -> None:
        with self._lock:
            self._etcd.put(self._key(key), value)


class Lead:
    """The lead of a job, kept by a thread as long as etcd lets it."""

    def __init__(self, store: EtcdStore, leader: LeadingHost) -> None:
        self._store, self._leader = store, leader
        self._over, self.lost = threading.Event(), False
        self.turn: Callable[[], object] = lambda: None  # called while it is waited for
        began = time.monotonic()
        taken = store.take(leader)
        if taken is None:
            raise LostLeadError(f"{store.url}: another host leads the job")
        self._lease, self.made = taken
        self._token = uuid.uuid4().hex  # of the last that led
        store.write("led", self._token, self.made)
        self._until = began + _SURE * LEASE_S
        self._thread = threading.Thread(target=self._keep, name="tutti-lead", daemon=True)
        self._thread.start()

    @property
    def holds(self) -> bool:
        """Whether nobody else can lead at this moment."""
        return not self.lost and time.monotonic() < self._until

    def wait(self) -> bool:
        """Wait until it holds, again; tell whether it had to wait."""
        if self.holds:
            return False
        while not self.holds:
            if self.lost:
                raise LostLeadError(f"{self._store.url}: another host leads the job by now")
            self.turn()
            time.sleep(_AGAIN_S / 10)
        return True

    def was_taken(self) -> bool:
        """Ask the store whether another host has led since."""
        return self.lost or self._store.led() != self._token

    def close(self) -> None:
        """Lead no more."""
        self._over.set()
        self._thread.join(5)
        self.lost = True  # whoever waits for it waits in vain
        with contextlib.suppress(TuttiError):  # it runs out
            self._store.let_go(self._lease)

    def _keep(self) -> None:
        while not self._over.wait(LEASE_S / 4):
            asked = time.monotonic()
            try:
                if self._store.keep(self._lease):
                    self._until = asked + _SURE * LEASE_S
                elif not self._again(asked):
                    return
            except StoreAwayError:
                self._over.wait(_AGAIN_S)
            except StoreRefusedError:
                self.lost = True
                return

    def _again(self, asked: float) -> bool:
        """Take the lead anew, after the lease ran out, unless another host has."""
        taken = self._store.take(self._leader, last=self._token)
        if taken is None:
            self.lost = True
            return False
        self._lease, self.made = taken
        self._until = asked + _SURE * LEASE_S
        return True


class EtcdJournal(Journal):
    """The decisions of a job whose store is etcd; each is there before it is in the log."""

    def __init__(self, folder: Path, store: EtcdStore, lead: Lead, *, count: int) -> None:
        super().__init__(folder)
        self._store, self._lead, self._count = store, lead, count

    def write(self, entry: Entry) -> None:
        """Write a decision, if this host still leads."""
        self._put(lambda: self._store.decide(self._count, entry, self._lead.made))
        self._count += 1
        super().write(entry)

    def fence(self, generation: int) -> None:
        """Let nobody of an older generation publish from now on."""
        self._put(lambda: self._store.write("generation", str(generation), self._lead.made))
        self._lead.wait()  # this host may have been stopped since, and another one led
        super().fence(generation)  # stopped here, it comes late and lowers nothing

    def _put(self, write: Callable[[], None]) -> None:
        while True:
            self._lead.wait()
            try:
                write()
                return
            except StoreAwayError:
                time.sleep(_AGAIN_S)  # the lease runs out, or it comes back
            except LostLeadError:
                if self._was_taken():
                    raise
                time.sleep(_AGAIN_S)  # the lease ran out, and this host takes the lead anew

    def _was_taken(self) -> bool:
        with contextlib.suppress(StoreAwayError):
            return self._lead.was_taken()
        return False


def parse_url(url: str) -> tuple[list[tuple[str, int]], str]:
    """Return the members and the name of "etcd://HOST:PORT[,HOST:PORT…]/NAME"."""
    where, _, name = url.removeprefix(SCHEME).partition("/")
    members = []
    for text in where.split(","):
        host, _, port = text.rpartition(":")
        if host and port.isdecimal() and 0 < int(port) < 65536:
            members.append((host.strip("[]"), int(port)))
        else:
            members = []
            break
    if not url.startswith(SCHEME) or not members or not name or "/" in name:
        raise InputError(
            f"elastic.store is '{url}'; write {SCHEME}HOST:PORT/NAME, such as "
            f"{SCHEME}10.0.0.1:2379/my-job"
        )
    return members, name
