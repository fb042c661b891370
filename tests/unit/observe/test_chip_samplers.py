# ruff: noqa: N802, N815 (the names are those of a library)
"""Samplers of chips: a library of NVIDIA's that the test plays, tools' tables, kernel's lines."""

from __future__ import annotations

import stat
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.hardware.test_discover import NPU, NPU_A3, XPU
from tutti.observe.figures import key
from tutti.observe.samplers import this_host
from tutti.observe.samplers.nvidia import ChipSampler
from tutti.observe.samplers.sampler import Values
from tutti.observe.samplers.this_host import host_samplers
from tutti.observe.samplers.vendor_tools import VendorTools
from tutti.observe.samplers.xid import KernelXids, XidTally

PATIENT_S = 60.0


def refuses(*_: object) -> None:
    raise RuntimeError("not supported")


class Nvml(SimpleNamespace):
    """Two chips; the first has two links. Names and arguments are those of nvidia-ml-py."""

    NVML_NVLINK_MAX_LINKS = 18
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = 138
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 139
    NVML_NVLINK_ERROR_DL_REPLAY = 0
    NVML_NVLINK_ERROR_DL_RECOVERY = 1
    NVML_NVLINK_ERROR_DL_CRC_FLIT = 2
    NVML_NVLINK_ERROR_DL_CRC_DATA = 3
    NVML_NVLINK_ERROR_DL_ECC_DATA = 4
    nvmlEventTypeXidCriticalError = 8

    def __init__(self) -> None:
        super().__init__(events=[], registered=[], crc=0, sent_kib=10)

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetIndex(self, chip: int) -> int:
        return chip

    def nvmlDeviceGetPciInfo(self, chip: int) -> Any:
        return SimpleNamespace(busId=f"00000000:{0x3B + chip:02X}:00.0".encode())

    def nvmlDeviceGetUtilizationRates(self, chip: int) -> Any:
        return SimpleNamespace(gpu=50)

    def nvmlDeviceGetMemoryInfo(self, chip: int) -> Any:
        return SimpleNamespace(used=chip + 1)

    def nvmlDeviceGetPowerUsage(self, chip: int) -> int:
        return 250_000

    nvmlDeviceGetTemperature = refuses

    def nvmlDeviceGetClockInfo(self, chip: int, kind: int) -> int:
        return 1980

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, chip: int) -> int:
        return (0x4, 0x44)[chip]

    def nvmlDeviceGetTotalEccErrors(self, chip: int, error: int, counter: int) -> int:
        assert counter == 0
        return (7, 1)[error] if chip else 0

    nvmlDeviceGetPcieReplayCounter = refuses

    def nvmlDeviceGetNvLinkState(self, chip: int, link: int) -> int:
        if link > 2:
            refuses()
        return int(chip == 0 and link in (0, 2))

    def nvmlDeviceGetFieldValues(self, chip: int, fields: list[tuple[int, int]]) -> list[Any]:
        return [
            SimpleNamespace(
                nvmlReturn=0 if number == 138 else 3,
                value=SimpleNamespace(ullVal=self.sent_kib * (link + 1)),
            )
            for number, link in fields
        ]

    def nvmlDeviceGetNvLinkErrorCounter(self, chip: int, link: int, counter: int) -> int:
        if counter == 4:
            refuses()
        return {0: 5, 1: 0, 2: self.crc, 3: 1}[counter]

    def nvmlEventSetCreate(self) -> str:
        return "set"

    def nvmlDeviceRegisterEvents(self, chip: int, kinds: int, events: str) -> None:
        assert (kinds, events) == (8, "set")
        self.registered.append(chip)

    def nvmlEventSetWait_v2(self, events: str, milliseconds: int) -> Any:
        assert milliseconds == 0
        if not self.events:
            raise RuntimeError("Timeout")
        chip, code = self.events.pop(0)
        return SimpleNamespace(device=chip, eventType=8, eventData=code)


def test_chips_of_nvidia() -> None:
    values = ChipSampler(library=Nvml()).sample()
    assert values[key("chip_busy_ratio", "1")] == 0.5
    assert values[key("chip_memory_used_bytes", "1")] == 2
    assert values[key("chip_power_watts", "0")] == 250
    assert values[key("chip_clock_hertz", "0")] == 1.98e9
    assert values[key("chip_held_back_ratio", "0")] == 0  # a power cap is no fault
    assert values[key("chip_held_back_ratio", "1")] == 1  # heat is
    assert values[key("chip_ecc_corrected_total", "1")] == 7
    assert values[key("chip_ecc_uncorrected_total", "1")] == 1
    assert not any("temperature" in name or "pcie" in name for name in values)
    said: list[str] = []
    broken = SimpleNamespace(nvmlInit=refuses)
    assert ChipSampler(said.append, broken).sample() == {}
    assert said == ["no figures of NVIDIA's chips (not supported)"]


def test_links_between_chips() -> None:
    said: list[str] = []
    library = Nvml()
    values = ChipSampler(said.append, library).sample()
    links = {name: value for name, value in values.items() if "chip_link" in name}
    assert links == {
        key("chip_link_sent_bytes_total", "0:0"): 10 * 1024,
        key("chip_link_sent_bytes_total", "0:2"): 30 * 1024,
        key("chip_link_replays_total", "0:0"): 5,
        key("chip_link_replays_total", "0:2"): 5,
        key("chip_link_recoveries_total", "0:0"): 0,
        key("chip_link_recoveries_total", "0:2"): 0,
        key("chip_link_crc_errors_total", "0:0"): 1,
        key("chip_link_crc_errors_total", "0:2"): 1,
    }
    assert said == []
    library.nvmlDeviceGetNvLinkState = refuses
    ChipSampler(said.append, library)
    assert said == ["no active NVLink"]


def test_the_real_library_has_these_names() -> None:
    real = pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    for name in (n for n in dir(Nvml) if n.startswith(("nvml", "NVML"))):
        assert hasattr(real, name), name
        if not callable(getattr(Nvml, name)):
            assert getattr(real, name) == getattr(Nvml, name) or name == "NVML_NVLINK_MAX_LINKS"


def test_an_xid_that_driver_and_kernel_tell_counts_once(tmp_path: Path) -> None:
    kmsg = tmp_path / "dev/kmsg"
    kmsg.parent.mkdir()
    kmsg.write_text("6,1,1,-;NVRM: Xid (PCI:0000:3b:00): 31, before the run\n")
    library, tally = Nvml(), XidTally()
    kernel, chips = KernelXids(tally, root=tmp_path), ChipSampler(library=library, xids=tally)
    assert library.registered == [0, 1]

    def sampled() -> Values:
        kernel.sample()
        return {n: v for n, v in chips.sample().items() if "xid" in n}

    none_yet = {key("chip_xid_errors_total", chip): 0.0 for chip in "01"}
    assert sampled() == none_yet
    with kmsg.open("a") as out:
        out.write("4,9,77,-;NVRM: Xid (PCI:0000:3c:00): 79, pid=1, GPU has fallen off the bus\n")
        out.write("4,9,78,-;NVRM: Xid (PCI:0000:3c:00): 79, pid=1, again\n")
        out.write("4,9,79,-;NVRM: Xid (PCI:0000:d9:00): 48, pid=1, of a chip that is not ours\n")
    library.events += [(1, 79), (0, 94)]
    assert sampled() == {
        key("chip_xid_errors_total", "0"): 1, key("chip_last_xid_code", "0"): 94,
        key("chip_xid_errors_total", "1"): 2, key("chip_last_xid_code", "1"): 79,
        key("chip_xid_errors_total", "0000:d9:00"): 1, key("chip_last_xid_code", "0000:d9:00"): 48,
    }  # fmt: skip
    kernel.close()


def tool(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def until(sampled: Callable[[], Values], holds: Callable[[Values], bool]) -> Values:
    end = time.monotonic() + PATIENT_S
    while not holds(values := sampled()):
        assert time.monotonic() < end, values
        time.sleep(0.01)
    return values


def test_where_the_ring_is_not_readable_dmesg_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    log.write_text("[    1.000000] NVRM: Xid (PCI:0000:3b:00): 31, before\n")
    tool(tmp_path / "bin", "dmesg", f"cat {log}")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    tally, said = XidTally(), list[str]()
    kernel = KernelXids(tally, said.append, tmp_path)  # has no dev/kmsg
    asked = kernel._printed
    assert asked is not None
    assert asked.ask() == {}
    with log.open("a") as out:
        out.write("[    2.000000] NVRM: Xid (PCI:0000:3b:00): 31, now\n")
    assert asked.ask() == {}
    assert tally.values() == {
        key("chip_xid_errors_total", "0000:3b:00"): 1, key("chip_last_xid_code", "0000:3b:00"): 31,
    }  # fmt: skip
    assert said == []
    tool(tmp_path / "bin", "dmesg", "echo dmesg: read kernel buffer failed >&2; exit 1")
    again = KernelXids(tally, said.append, tmp_path)
    assert again._printed is not None
    assert again._printed.ask() is None
    assert len(said) == 1
    assert "dmesg fails, too" in said[0]


ECC = """\
        NPU ID                                   : 0
        Chip Count                               : 1

        DDR Single Bit Error Count               : 1
        DDR Double Bit Error Count               : 0
        DDR Double Bit Aggregate Total Err Cnt   : 90
        HBM Single Bit Error Count               : 6
        HBM Double Bit Error Count               : 2
        HBM Double Bit Isolated Pages Count      : 50
        Chip ID                                  : 0
"""


def test_chips_that_vendors_tools_show() -> None:
    asked: list[list[str]] = []

    def run(command: list[str]) -> str:
        asked.append(command)
        if command[0] == "npu-smi":
            table = NPU.replace(
                "| 1     910B2C              | OK", "| 1     910B2C              | Alarm"
            )
            return (ECC if command[-1] == "0" else "") if "ecc" in command else table
        return XPU.replace(" 41C  N/A ", " 89C  N/A ")

    tools = VendorTools(run=run, finds=lambda name: name != "xpu_smi")
    values = until(tools.sample, bool)
    tools.close()
    assert values == {
        key("chip_busy_ratio", "npu-0"): 0, key("chip_busy_ratio", "npu-1"): 0,
        key("chip_memory_used_bytes", "npu-0"): 3412 * 2**20,
        key("chip_memory_used_bytes", "npu-1"): 3404 * 2**20,
        key("chip_power_watts", "npu-0"): 94.4, key("chip_power_watts", "npu-1"): 96.6,
        key("chip_temperature_celsius", "npu-0"): 42, key("chip_temperature_celsius", "npu-1"): 44,
        key("chip_unwell_ratio", "npu-0"): 0, key("chip_unwell_ratio", "npu-1"): 1,
        key("chip_ecc_uncorrected_total", "npu-0"): 2, key("chip_ecc_corrected_total", "npu-0"): 7,
        key("chip_busy_ratio", "xpu-0"): 0, key("chip_busy_ratio", "xpu-1"): 0,
        key("chip_memory_used_bytes", "xpu-0"): 0, key("chip_memory_used_bytes", "xpu-1"): 0,
        key("chip_power_watts", "xpu-0"): 88, key("chip_power_watts", "xpu-1"): 90,
        key("chip_temperature_celsius", "xpu-0"): 37, key("chip_temperature_celsius", "xpu-1"): 89,
        **{key("chip_ecc_uncorrected_total", f"xpu-{i}"): 0 for i in range(2)},
    }  # fmt: skip
    assert ["npu-smi", "info", "-t", "ecc", "-i", "1"] in asked


def test_two_dies_of_a_card_and_what_a_table_does_not_show() -> None:
    said: list[str] = []
    tools = VendorTools(
        said.append, run=lambda c: "" if "ecc" in c else NPU_A3, finds=lambda n: n == "npu-smi"
    )
    values = tools.ask()
    assert values is not None
    assert values[key("chip_power_watts", "npu-0")] == 178.5
    assert (
        key("chip_power_watts", "npu-1") not in values
    )  # it shows a dash: the card's is the first's
    assert values[key("chip_memory_used_bytes", "npu-1")] == 3195 * 2**20
    silent = VendorTools(said.append, run=lambda _: "", finds=lambda n: n == "xpu-smi")
    assert silent.ask() == {}
    assert silent.ask() == {}
    assert said == ["xpu-smi is installed, but shows no chip: no figures of them"]
    assert not VendorTools(finds=lambda _: None).is_any


def test_a_host_of_another_vendor_lacks_nothing_of_nvidia(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    monkeypatch.setattr(this_host, "_DRIVER", tmp_path / "none")
    said: list[str] = []
    host_samplers(said.append)
    assert any("nvidia-ml-py" in text for text in said)
    tool(tmp_path / "bin", "xpu-smi", "true")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    said.clear()
    samplers = host_samplers(said.append)
    assert not any("nvidia-ml-py" in text for text in said)
    assert any(isinstance(one, VendorTools) for one in samplers)
