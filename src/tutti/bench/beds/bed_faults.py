"""Faults on a Clos bed, and how soon probes name them.

Agents run as a user runs them, one process per host in its namespace, and report to this process
over a Unix socket. A fault is put on a random link; what is measured is the time until the verdict
names that link with its direction, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tutti.bench.beds.bed_flows import FlowSockets, random_set
from tutti.bench.beds.clos_bed import ClosBed, ClosSpec
from tutti.diagnose.fabric.probe_ledger import ProbeLedger, ProbeVerdict
from tutti.errors import InputError
from tutti.observe.network.report_stream import ReportListener
from tutti.ranks.standing_processes import die_with_parent

# what counts as found in time, in seconds
LIMITS_S = {"cut": 3.0, "blackhole": 3.0, "slow": 10.0, "loss": 15.0}
# verdicts without an accusation before the next fault; after a cut, paths are traced anew
_QUIET = {"cut": 60, "blackhole": 8, "slow": 8, "loss": 8}
_SETTLED_S, _LAST_REPORTS_S = 120.0, 1.5
_NONCE = 36  # bytes into the IP packet, the last of a probe's nonce


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRun:
    """One fault: where it was, and when the verdict named it."""

    kind: str
    links: tuple[str, ...]  # what may be named
    named: tuple[str, ...]
    seconds: float | None  # None: not in time, or somebody else was blamed

    @property
    def found(self) -> bool:
        """Whether the link was named in time, and it alone."""
        return self.seconds is not None and self.seconds <= LIMITS_S[self.kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthyRun:
    """Time without a fault: who was accused all the same, and whether the stopped host was told."""

    seconds: float
    accused: tuple[str, ...]
    stopped: str
    told: bool
    congested: int  # links whose queues were full, at most


class ProbedBed:
    """A Clos bed with an agent on every host."""

    def __init__(self, spec: ClosSpec) -> None:
        self.bed = ClosBed(spec)
        self._stack = contextlib.ExitStack()
        self._stack.callback(self.bed.close)
        try:
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
            self._file = folder / "probe.yaml"
            hosts = {f"host {n}": spec.address(n) for n in range(spec.hosts)}
            switches = {f"10.88.200.{n + 1}": f"leaf {n}" for n in range(spec.leaves)}
            switches |= {f"10.88.201.{n + 1}": f"spine {n}" for n in range(spec.spines)}
            collector = f"unix:{folder / 'reports'}"
            document = {"hosts": hosts, "switches": switches, "collector": collector}
            self._file.write_text(yaml.safe_dump(document, sort_keys=False))
            self._ledger = ProbeLedger(hosts, switches)
            self._listener = ReportListener(collector)
            self._stack.callback(self._listener.close)
            self.agents = [self._start(n) for n in range(spec.hosts)]
            self._settle()
        except BaseException:
            self.close()
            raise

    def _start(self, host: int) -> subprocess.Popen[bytes]:
        made = subprocess.Popen(
            ["nsenter", f"--net=/proc/{self.bed.host(host)}/ns/net", sys.executable, "-c",
             "from tutti.cli.main import run; run()",
             "fabric", "probe", str(self._file), "--host", f"host {host}"],
            stdin=subprocess.DEVNULL,
            preexec_fn=die_with_parent,  # agents outlive nobody
        )  # fmt: skip
        self._stack.callback(self._end, made)
        return made

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait()

    def close(self) -> None:
        """End the agents and remove the bed."""
        self._stack.close()

    def _settle(self) -> None:
        """Wait until the paths of all pairs over all spines are known, and nobody is blamed."""
        spec = self.bed.spec
        apart = spec.hosts * (spec.hosts - spec.hosts_per_leaf)
        wanted = 0.97 * apart * spec.spines  # a hash may leave a way out
        for verdict in self.verdicts(_SETTLED_S):
            if verdict.paths >= wanted and not verdict.accused:
                return
        raise InputError(f"test bed: {verdict.paths} paths are known, {wanted:.0f} were expected")

    def verdicts(
        self, seconds: float, meanwhile: Callable[[], object] | None = None
    ) -> Iterator[ProbeVerdict]:
        """Yield what the reports say, about four times a second."""
        ends, judged = time.monotonic() + seconds, time.monotonic()
        while time.monotonic() < ends:
            if meanwhile is not None:
                meanwhile()
            for report in self._listener.reports(0.0 if meanwhile is not None else 0.1):
                self._ledger.take(report, time.monotonic())
            if time.monotonic() - judged >= 0.25:
                judged = time.monotonic()
                yield self._ledger.verdict(judged)

    def run_fault(self, kind: str, seed: int) -> FaultRun:
        """Break a random link, wait for the verdict, mend it, and wait until all is quiet."""
        dice, spec = random.Random(f"{kind} {seed}"), self.bed.spec
        leaf, spine = dice.randrange(spec.leaves), dice.randrange(spec.spines)
        down = bool(dice.getrandbits(1))
        links, mend = FAULTS[kind](self.bed, leaf, spine, down)
        began, took = time.monotonic(), None
        named: tuple[str, ...] = ()
        for verdict in self.verdicts(LIMITS_S[kind] + 2.0):
            if verdict.accused:
                named = tuple(" or ".join(b.parts) for b in verdict.accused)
                if set(named) <= set(links):
                    took = time.monotonic() - began
                    break
                if not all(set(links) & set(b.parts) for b in verdict.accused):
                    break  # somebody else is blamed; "this or that" may become this alone in time
        mend()
        for _ in self.verdicts(_LAST_REPORTS_S):  # what was lost before is still reported
            pass
        self._ledger.forget()
        quiet = 0
        for verdict in self.verdicts(_SETTLED_S):
            quiet = 0 if verdict.accused else quiet + 1
            if quiet == _QUIET[kind]:
                break
        return FaultRun(kind=kind, links=tuple(links), named=named, seconds=took)

    def processor_shares(self, seconds: float) -> list[float]:
        """Return the share of a core that each agent takes."""
        before = [_ticks(agent.pid) for agent in self.agents]
        for _ in self.verdicts(seconds):
            pass
        per_second = os.sysconf("SC_CLK_TCK")
        return [
            (_ticks(agent.pid) - old) / per_second / seconds
            for agent, old in zip(self.agents, before, strict=True)
        ]

    def run_healthy(self, seconds: float, stop: int) -> HealthyRun:
        """Run under TCP flows that fill links, without a fault, one host stopped in the middle."""
        accused: set[str] = set()
        told, congested = False, 0
        sockets = FlowSockets(self.bed, random_set(self.bed, stop))
        try:
            for part in range(3):
                if part:
                    self.agents[stop].send_signal(signal.SIGSTOP if part == 1 else signal.SIGCONT)
                for verdict in self.verdicts(seconds / 3, lambda: sockets.move(0.05)):
                    for kind in ("down", "lossy", "slow"):
                        accused |= {f"{kind}: {b.parts[0]}" for b in getattr(verdict, kind)}
                    accused |= {f"gone: {host}" for host in verdict.gone}
                    told |= verdict.stalled == (f"host {stop}",)
                    congested = max(congested, len(verdict.congested))
        finally:
            sockets.close()
        return HealthyRun(seconds=seconds, accused=tuple(sorted(accused)), stopped=f"host {stop}",
                          told=told, congested=congested)  # fmt: skip


def _ticks(pid: int) -> int:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(words[11]) + int(words[12])


Mend = Callable[[], None]


def _names(leaf: int, spine: int) -> tuple[str, str]:
    return f"leaf {leaf} → spine {spine}", f"spine {spine} → leaf {leaf}"


def _cut(bed: ClosBed, leaf: int, spine: int, down: bool) -> tuple[Sequence[str], Mend]:
    """Take one end of a link down; its neighbour goes on sending, as a router without BFD does."""
    holder = bed.spine(spine) if down else bed.leaf(leaf)
    device = f"l{leaf}" if down else f"s{spine}"
    bed.inside(holder, ["ip", "-batch", "-"], [f"link set {device} down"])

    def mend() -> None:
        bed.inside(holder, ["ip", "-batch", "-"], [f"link set {device} up"])
        bed.write_routes(leaf, spine)

    return (*_names(leaf, spine), f"leaf {leaf} ↔ spine {spine}"), mend


def _blackhole(bed: ClosBed, leaf: int, spine: int, down: bool) -> tuple[Sequence[str], Mend]:
    """Throw away, without a word, what comes over one direction of a link."""
    holder = bed.leaf(leaf) if down else bed.spine(spine)
    device = f"s{spine}" if down else f"l{leaf}"
    bed.inside(holder, ["ip", "-batch", "-"], [f"rule add iif {device} blackhole"])

    def mend() -> None:
        bed.inside(holder, ["ip", "-batch", "-"], [f"rule del iif {device} blackhole"])

    return _names(leaf, spine)[down : down + 1], mend


def _slow(bed: ClosBed, leaf: int, spine: int, down: bool) -> tuple[Sequence[str], Mend]:
    """Give one direction of a link a quarter of its rate."""
    bed.limit(leaf, spine, bed.spec.up_rate / 4, down=down)
    return (
        _names(leaf, spine)[down : down + 1],
        lambda: bed.limit(leaf, spine, bed.spec.up_rate, down=down),
    )


def _loss(bed: ClosBed, leaf: int, spine: int, down: bool) -> tuple[Sequence[str], Mend]:
    """Lose one packet in 32 on one direction: what a byte of the packet says decides."""
    holder = bed.leaf(leaf) if down else bed.spine(spine)
    device = f"s{spine}" if down else f"l{leaf}"
    lines = [
        f"qdisc add dev {device} ingress",
        f"filter add dev {device} parent ffff: protocol ip prio 1 u32 "
        f"match u8 0x15 0x1f at {_NONCE + 3} action mirred egress redirect dev void",
    ]
    bed.inside(holder, ["ip", "-batch", "-"], ["link add void type veth peer name voided"])
    bed.inside(holder, ["tc", "-batch", "-"], lines)

    def mend() -> None:
        bed.inside(holder, ["tc", "-batch", "-"], [f"qdisc del dev {device} ingress"])
        bed.inside(holder, ["ip", "-batch", "-"], ["link del void"])

    return _names(leaf, spine)[down : down + 1], mend


FAULTS = {"cut": _cut, "blackhole": _blackhole, "slow": _slow, "loss": _loss}
