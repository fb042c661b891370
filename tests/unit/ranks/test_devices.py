"""From a chip of the plan to a device of this machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from tutti.errors import InputError
from tutti.hardware.chip import Chip
from tutti.hardware.cluster import Cluster
from tutti.hardware.library import shipped
from tutti.ranks import devices
from tutti.ranks.devices import device_of, open_chip


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TUTTI_DEVICE", "TUTTI_NODE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def chip(name: str) -> Chip:
    return shipped().chips[name]


def present(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(devices, "count", lambda kind: number)


def test_the_slot_is_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    present(monkeypatch, 8)
    assert device_of(chip("A100-80"), 5) == "cuda:5"
    assert device_of(chip("Kunlun-P800"), 2) == "kunlun:2"
    assert device_of(chip("Ascend-910B2"), 0) == "ascend:0"


def test_the_only_device_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    present(monkeypatch, 1)
    assert device_of(chip("A100-80"), 3) == "cuda:0"


def test_launched_processes_count_what_they_see(monkeypatch: pytest.MonkeyPatch) -> None:
    present(monkeypatch, 2)
    monkeypatch.setenv("TUTTI_NODE", "a100/0/6-7")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert device_of(chip("A100-80"), 7) == "cuda:1"


def test_none_here_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    present(monkeypatch, 0)
    with pytest.raises(InputError, match=r"'A100-80' needs a device of kind 'cuda'.*has none"):
        device_of(chip("A100-80"), 0)


def test_who_says_it_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    present(monkeypatch, 0)
    monkeypatch.setenv("TUTTI_DEVICE", "cpu")
    opened = open_chip(chip("A100-80"), 0)
    assert (opened.device.type, opened.chip) == ("cpu", "A100-80")


def test_emulated_chips_keep_their_own_time() -> None:
    fast = Cluster.load("laptop").pool("fast").chip
    opened = open_chip(fast, 0)
    assert (opened.chip, opened.mode) == ("CPU-fast", "dilated")  # type: ignore[attr-defined]
    assert opened.memory().total == fast.memory_bytes
    declared = open_chip(replace(fast, slowdown=None), 0)
    assert declared.mode == "declared"  # type: ignore[attr-defined]
