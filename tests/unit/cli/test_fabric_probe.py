"""`tutti fabric probe` as a collector: what it says of agents, strangers and nobody."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tutti.cli import main
from tutti.cli.fabric.probe import verdict_text
from tutti.diagnose.fabric.likelihood import Blame
from tutti.diagnose.fabric.probe_ledger import ProbeVerdict


def _report(host: str, number: int, **other: Any) -> bytes:
    report = {"host": host, "number": number, "sent": [], "got": [], "delays_us": [], "trains": [],
              "paths": [], "overflowed": False, "answered": []}  # fmt: skip
    return json.dumps(report | other).encode() + b"\n"


def test_a_verdict_is_one_line() -> None:
    lossy = Blame(parts=("a → b", "c"), chance=0.03, gain=20.0, trials=200, bad=6)
    found = ProbeVerdict(lossy=(lossy,), stalled=("h1",), gone=("h2",), paths=9)
    assert verdict_text(found) == (
        "a → b or c: loses 3.0 %; h1: its agent stands still, its kernel answers; "
        "h2 or its links: nothing comes from there"
    )
    assert verdict_text(ProbeVerdict(paths=4)) == "4 paths: nothing is broken"
    assert verdict_text(ProbeVerdict()) == "no path is known yet"


@pytest.mark.slow  # its agents and the collector share three seconds
def test_the_collector_says_what_is_lost_and_ends_with_1(tmp_path: Path, capfd: Any) -> None:
    at = tmp_path / "reports"
    file = tmp_path / "probe.yaml"
    hosts = "hosts: {a: 10.0.0.1, b: 10.0.0.2}\nswitches: {9.9.9.9: leaf}\n"
    file.write_text(f"{hosts}collector: 'unix:{at}'\n")

    def agents() -> None:
        while not at.exists():
            time.sleep(0.01)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(at))
            sock.sendall(b'{"host": "stranger"}\n')
            for number in range(12):  # a's probes never come to b, b's come to a
                sent = 20 * number
                sock.sendall(
                    _report("a", number, sent=[[1, 7071, sent]], paths=[[1, 7071, ["9.9.9.9"]]],
                            got=[[1, 7071, max(0, sent - 19), (1 << 20) - 1]])
                    + _report("b", number, sent=[[0, 7071, sent]], paths=[[0, 7071, ["9.9.9.9"]]])
                )  # fmt: skip
                time.sleep(0.25)

    thread = threading.Thread(target=agents)
    thread.start()
    with pytest.raises(SystemExit) as ended:
        main.run(["fabric", "probe", str(file), "--seconds", "3"])
    thread.join()
    said = capfd.readouterr()
    assert ended.value.code == 1
    assert "a → leaf or leaf → b: nothing comes through" in said.out
    assert "left out: not a report" in said.err
