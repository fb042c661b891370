"""Agents on the loopback: packets, reports, files; and real faults on a bed where there is root."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from tutti.bench.beds.bed_faults import LIMITS_S, ProbedBed
from tutti.bench.beds.clos_bed import ClosSpec
from tutti.bench.beds.namespaces import why_not
from tutti.errors import InputError
from tutti.observe.network.probe_agent import ProbeAgent, Report
from tutti.observe.network.probe_file import ProbeFile
from tutti.observe.network.probe_packets import ProbeKind, Receiving, Sending, pack, train
from tutti.observe.network.report_stream import ReportListener, ReportSender

needs_root = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def _file(**other: object) -> ProbeFile:
    hosts = {"a": "127.0.0.1", "b": "127.0.0.2", "c": "127.0.0.3"}
    return ProbeFile(
        **({"hosts": hosts, "collector": "unix:/x", "port": 17570, "ports": 2} | other)
    )  # type: ignore[arg-type]


def test_a_train_comes_whole_and_in_order() -> None:
    receiving, sending = Receiving("127.0.0.1", 17560), Sending("127.0.0.1", 17561)
    try:
        assert sending.send(pack(ProbeKind.PROBE, 0, 3, 9), ("127.0.0.1", 17560))
        assert sending.send_train(train(3, 10), ("127.0.0.1", 17560))
        time.sleep(0.05)
        probe, *cars = receiving.arrivals()
        assert probe.probe[:4] == (ProbeKind.PROBE, 0, 3, 9)
        assert (probe.port, probe.hops) == (17561, 0)
        assert 0 <= probe.at_ns - probe.probe.sent_ns < 1e9
        assert [car.probe.number for car in cars] == list(range(24))
        # nobody has this port: the kernel says so, on the error queue
        sending.send(pack(ProbeKind.KNOCK, 0, 3, 0), ("127.0.0.1", 17569))
        time.sleep(0.05)
        (complaint,) = sending.complaints()
        assert (complaint.probe.kind, complaint.by, complaint.icmp) == (
            ProbeKind.KNOCK,
            "127.0.0.1",
            3,
        )
        with pytest.raises(InputError, match="in use"):
            Receiving("127.0.0.1", 17560)
    finally:
        receiving.close()
        sending.close()


def test_agents_report_what_they_sent_and_got() -> None:
    reports: list[Report] = []
    file = _file()
    agents = [ProbeAgent(file, name, reports.append) for name in ("a", "b")]
    try:
        now = time.monotonic()
        for tick in range(30):  # c never comes: its kernel is asked
            for agent in agents:
                agent.tick(now + 0.1 * tick)
            time.sleep(0.005)
        last = [report for report in reports if report["host"] == "b"][-1]
        assert {tuple(entry[:2]) for entry in last["sent"]} >= {(0, 17571), (2, 17571)}
        assert last["got"][0][0] == 0
        assert any(report["answered"] == [2] for report in reports)
        assert any(name.startswith("tutti_probe_delay_seconds") for name in agents[1].sample())
    finally:
        for agent in agents:
            agent.close()


def test_reports_arrive_and_senders_outlive_the_collector(tmp_path: Path) -> None:
    at = f"unix:{tmp_path / 'reports'}"
    said: list[str] = []
    sender = ReportSender(at, said.append)
    sender.send({"lost": 1})  # nobody listens
    assert len(said) == 1
    assert "nobody collects" in said[0]
    listener = ReportListener(at)
    sender._tried = -1.0
    sender.send({"host": "a"})
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect(str(tmp_path / "reports"))
    stranger.sendall(b"not json\n[1]\n")
    found = [report for _ in range(6) for report in listener.reports(0.05)]
    assert found == [{"host": "a"}]
    for one in (stranger, listener, sender):
        one.close()
    assert not (tmp_path / "reports").exists()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"hosts": {"a": "127.0.0.1"}}, "two or more"),
        ({"hosts": {"a": "x", "b": "127.0.0.1"}}, "'x' is no IPv4 address"),
        ({"hosts": {"a": "127.0.0.1", "b": "127.0.0.1"}}, "two hosts have"),
        ({"port": 80}, "'port' is 80"),
        ({"ports": 0}, "'ports' is 0"),
        ({"collector": "here"}, "address:port or unix:PATH"),
    ],
)
def test_files_that_cannot_be_are_refused(changed: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        _file(**changed).check("probe.yaml")


def test_peers_are_spread_over_many_hosts() -> None:
    hosts = {f"h{n}": f"10.0.{n // 250}.{n % 250 + 1}" for n in range(1000)}
    peers = _file(hosts=hosts, peers=8).peers_of("h990")
    assert len(set(peers)) == 8
    assert max(peers) - min(peers) > 700
    with pytest.raises(InputError, match="no host 'd'"):
        _file().number("d")


@needs_root
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_faults_are_named_in_time_on_a_bed() -> None:
    """One of each kind of what `tutti bench fabric faults 20` breaks."""
    bed = ProbedBed(ClosSpec())
    try:
        for kind in LIMITS_S:
            run = bed.run_fault(kind, 1)
            assert set(run.named) <= set(run.links), run
            assert run.named, run
    finally:
        bed.close()
    assert not bed.bed.holders
