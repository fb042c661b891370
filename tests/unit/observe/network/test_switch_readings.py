"""Counters of switches and drivers: files of gNMI, names of counters, the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tutti.bench.beds.namespaces import Namespaces, visiting, why_not
from tutti.cli import main
from tutti.errors import InputError
from tutti.fabric.queues import QueueFlow, QueueNetwork, QueueRules
from tutti.observe.network.driver_counters import driver_counters, driver_figures
from tutti.observe.network.switch_readings import PortLinks, read_updates, readings

LINE = 12.5e9
LINKS = """
rate: 100 Gb/s
links:
  leaf-0: {Ethernet0: a, Ethernet4: b, Ethernet8: spine}
  leaf-1: {Ethernet0: c, Ethernet8: spine}
  spine: {Ethernet0: leaf-0, Ethernet4: leaf-1}
"""


def _update(seconds: float, device: str, port: str, **counters: float) -> dict[str, Any]:
    path = f"interfaces/interface[name={port}]/state/counters"
    values = {"interfaces/interface/state/counters": {n: str(int(v)) for n, v in counters.items()}}
    updates = [{"Path": path, "values": values}]
    return {"source": f"{device}:57400", "timestamp": int(seconds * 1e9), "updates": updates}


def _stormy(folder: Path) -> tuple[Path, Path]:
    """Write what ports counted while host c took next to nothing, a second for a millisecond."""
    links = folder / "links.yaml"
    links.write_text(LINKS)
    ports = PortLinks.load(links).links
    wires = {(device, end): LINE for device, own in ports.items() for end in own.values()}
    wires |= {(b, a): LINE for a, b in wires}
    flows = [QueueFlow(path=(h, "leaf-0", "spine", "leaf-1", "c")) for h in ("a", "b")]
    network = QueueNetwork(wires, flows, QueueRules(dcqcn=False))
    network.take("c", 0.05 * LINE)
    lines = [{"sync-response": True}]
    for second in range(1, 5):
        counted = network.run(1e-3)
        for device, own in ports.items():
            for port, end in own.items():
                now = counted[device, end]
                assert now.paused_s is not None
                names = {
                    "openconfig-interfaces:out-octets": 1000 * now.sent_bytes,
                    "SAI_PORT_STAT_PFC_3_RX_PAUSE_DURATION": 1e9 * now.paused_s,
                    "SAI_PORT_STAT_PFC_3_RX_PKTS": now.pause_frames,
                    "in-octets": 7,
                }
                lines.append(_update(second, device, port, **names))
    file = folder / "updates.json"
    file.write_text("\n".join(json.dumps(line, indent=1) for line in lines))
    return links, file


def test_a_storm_is_named_from_files(tmp_path: Path, capfd: Any) -> None:
    links, file = _stormy(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main.run(["fabric", "watch", str(links), str(file)])
    said = capfd.readouterr().out
    assert ended.value.code == 1
    assert "storm: c stops leaf-1 and does not take what comes; 2 links wait for it" in said
    with pytest.raises(SystemExit):
        main.run(["fabric", "watch", str(links), str(file), "--json"])
    last = json.loads(capfd.readouterr().out)["intervals"][-1]
    assert last["findings"][0]["origin"] == ["leaf-1 → c"]
    assert set(last["findings"][0]["victims"]) == {"leaf-0 → spine", "spine → leaf-1"}


def test_readings_are_put_together_and_ports_of_nobody_left_out(tmp_path: Path) -> None:
    links, file = tmp_path / "links.yaml", tmp_path / "updates.json"
    links.write_text(LINKS)
    lines = [
        _update(10.0, "leaf-0", "Ethernet0", **{"out-octets": 5, "in-mac-pause-frames": 2}),
        _update(10.2, "leaf-1", "Ethernet0", **{"out-octets": 6}),
        _update(10.3, "leaf-1", "Ethernet99", **{"out-octets": 6}),
        _update(11.0, "leaf-0", "Ethernet0", **{"out-octets": 9}),
    ]
    file.write_text(json.dumps(lines))
    (first_s, first), (second_s, second) = readings(PortLinks.load(links), [file]).series
    assert (first_s, second_s) == (10.0, 11.0)
    assert set(first) == {("leaf-0", "a"), ("leaf-1", "c")}
    assert (second["leaf-0", "a"].sent_bytes, second["leaf-0", "a"].pause_frames) == (9, 2)
    assert second["leaf-0", "a"].paused_s is None


@pytest.mark.parametrize("skew", [0.0, 0.6, -0.4, 3600.0, -86400.0])
def test_clocks_of_switches_that_disagree_change_no_finding(
    skew: float, tmp_path: Path, capfd: Any
) -> None:
    links, file = _stormy(tmp_path)
    decoder, text, at, lines = json.JSONDecoder(), file.read_text(), 0, []
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        at += 1
        if value.get("source") == "leaf-1:57400":
            value["timestamp"] += int(skew * 1e9)
        lines.append(json.dumps(value))
    file.write_text("\n".join(lines))
    with pytest.raises(SystemExit):
        main.run(["fabric", "watch", str(links), str(file)])
    said = capfd.readouterr().out
    storms = [line.strip() for line in said.splitlines() if "storm" in line]
    assert storms
    assert set(storms) == {
        "storm: c stops leaf-1 and does not take what comes; 2 links wait for it"
    }
    far = [line for line in said.splitlines() if "clock" in line]
    assert len(far) == (abs(skew) > 1)
    if far:
        assert "leaf-1" in far[0]
        assert "taken as read together" in far[0]


def test_devices_that_are_read_less_often_or_vanish(tmp_path: Path) -> None:
    links, file = tmp_path / "links.yaml", tmp_path / "updates.json"
    links.write_text(LINKS)
    often = [_update(t, "leaf-0", "Ethernet0", **{"out-octets": t}) for t in range(10, 20)]
    seldom = [_update(t, "leaf-1", "Ethernet0", **{"out-octets": t}) for t in (10, 13, 16)]
    file.write_text(json.dumps(often + seldom))
    times = [at for at, _ in readings(PortLinks.load(links), [file]).series]
    assert times == [10.0, 13.0, 16.0, 17.0, 18.0, 19.0]  # leaf-1 is gone after 16


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"updates": [', ":1: not JSON"),
        ('{"updates": [{}], "source": "leaf-0:1"}', "not an update"),
        (json.dumps(_update(1, "leaf-9", "Ethernet0", **{"out-octets": 1})), "'leaf-9'"),
    ],
)
def test_files_that_are_no_readings_are_refused(tmp_path: Path, text: str, said: str) -> None:
    links, file = tmp_path / "links.yaml", tmp_path / "updates.json"
    links.write_text(LINKS)
    file.write_text(text)
    with pytest.raises(InputError, match=said):
        readings(PortLinks.load(links), [file])
    links.write_text("links: {a: {p: b}}\nrate: fast\n")
    with pytest.raises(InputError, match="'rate'"):
        PortLinks.load(links)


def test_drivers_names_of_pauses_are_known() -> None:
    counters = {
        "rx_prio3_pause": 4, "rx_prio4_pause": 1, "rx_prio3_pause_duration": 2_500_000,
        "tx_prio3_pause": 9, "rx_prio3_bytes": 77, "rx_prio3_pause_transition": 5,
    }  # fmt: skip
    assert driver_figures(counters) == {
        "nic_pause_frames_received_total": 5.0,
        "nic_pause_frames_sent_total": 9.0,
        "nic_paused_seconds_total": 2.5,
    }
    assert driver_counters("no-such-nic") == {}


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_drivers_counters_are_asked_of_the_kernel() -> None:
    beds = Namespaces()
    try:
        holder = beds.hold()
        beds.inside(holder, ["ip", "-batch", "-"], ["link add one type veth peer name two"])
        with visiting(holder):
            found = driver_counters("one")
        assert "peer_ifindex" in found
        assert found["peer_ifindex"] > 0
    finally:
        beds.close()


def test_updates_of_one_leaf_each_are_read(tmp_path: Path) -> None:
    file = tmp_path / "updates.json"
    update = {"Path": "COUNTERS_DB/COUNTERS/Ethernet8/SAI_PORT_STAT_PFC_3_RX_PKTS",
              "values": {"COUNTERS/Ethernet8/SAI_PORT_STAT_PFC_3_RX_PKTS": "12"}}  # fmt: skip
    file.write_text(json.dumps({"source": "s1", "timestamp": 2_000_000_000, "updates": [update]}))
    assert list(read_updates(file)) == [
        (2.0, "s1", "Ethernet8", {"SAI_PORT_STAT_PFC_3_RX_PKTS": 12.0})
    ]
