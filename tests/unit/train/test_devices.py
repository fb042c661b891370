from __future__ import annotations

import pytest

from tutti.hardware.library import shipped
from tutti.ranks import devices


@pytest.mark.parametrize(
    ("environ", "slot", "device"),
    [
        ({}, 3, "cuda:3"),
        ({"LOCAL_RANK": "1"}, 3, "cuda:3"),
        # slots 0, 1, 4, 5 of a node are the four devices that its processes see
        ({"TUTTI_NODE": "h100/0", "LOCAL_RANK": "2"}, 4, "cuda:2"),
        # the second host of a rack counts its chips from 0
        ({"TUTTI_NODE": "rack/0/4-7", "LOCAL_RANK": "1"}, 5, "cuda:1"),
        # two ranks share the one device there is
        ({"TUTTI_NODE": "h100/0", "LOCAL_RANK": "5"}, 5, "cuda:0"),
        ({"TUTTI_NODE": "h100/0", "LOCAL_RANK": "2", "TUTTI_DEVICE": "cpu"}, 4, "cpu"),
    ],
)
def test_the_device_of_a_chip(
    environ: dict[str, str], slot: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TUTTI_NODE", "LOCAL_RANK", "TUTTI_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(devices, "count", lambda kind: 4)
    assert devices.device_of(shipped().chips["H100"], slot) == device
