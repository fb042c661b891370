from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tutti.accelerator import Kind, add_kind, find, kinds, open_accelerator
from tutti.accelerator.devices.cpu import CpuAccelerator
from tutti.errors import InputError


@pytest.fixture
def toy() -> Iterator[list[int]]:
    opened: list[int] = []

    def open_toy(index: int) -> CpuAccelerator:
        opened.append(index)
        return CpuAccelerator(chip=f"toy {index}")

    add_kind(Kind(name="toy", count=lambda: 2, open=open_toy))
    yield opened
    find.remove_kind("toy")


def test_the_cpu_is_always_there() -> None:
    assert kinds()[-1] == "cpu"
    assert find.count("cpu") == 1
    accelerator = open_accelerator("cpu")
    assert accelerator.device == torch.device("cpu")
    assert repr(accelerator) == "CpuAccelerator(chip='CPU', device='cpu')"


def test_an_added_kind_is_asked_first(toy: list[int]) -> None:
    assert kinds()[0] == "toy"
    assert open_accelerator().chip == "toy 0"
    assert open_accelerator("toy:1").chip == "toy 1"
    assert toy == [0, 1]


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cpuu", "device 'cpuu': no kind 'cpuu'; did you mean 'cpu'?"),
        ("cpu:x", "device 'cpu:x': 'x' is no number; write cpu:0"),
        ("cpu:-1", "device 'cpu:-1': '-1' is no number; write cpu:0"),
        ("cpu:1", "device 'cpu:1': this machine has 1 of kind 'cpu'"),
        ("ascend", "device 'ascend': this machine has 0 of kind 'ascend'"),
        ("", "device '': no kind ''"),
    ],
)
def test_a_device_that_is_not_here(device: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        open_accelerator(device)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.fixture
def plug_ins() -> Iterator[None]:
    find.load_plug_ins.cache_clear()
    yield
    find.load_plug_ins.cache_clear()
    find.remove_kind("plugged")


def test_a_module_named_in_the_environment(
    plug_ins: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plugged_in.py").write_text(
        "from tutti.accelerator import Kind, add_kind\n"
        "from tutti.accelerator.devices.cpu import CpuAccelerator\n"
        "add_kind(Kind(name='plugged', count=lambda: 1, open=lambda index: CpuAccelerator()))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(find.MODULES, "plugged_in")
    assert "plugged" in kinds()


def test_a_module_that_cannot_be_imported(plug_ins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(find.MODULES, "no_such_module")
    with pytest.raises(InputError) as error:
        open_accelerator("cpu")
    assert str(error.value) == (
        "TUTTI_ACCELERATORS: module 'no_such_module' cannot be imported "
        "(No module named 'no_such_module'); mend it or remove it"
    )


def test_an_installed_package(
    plug_ins: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed packages name their module in the group of entry points."""
    (tmp_path / "vendor_chip.py").write_text(
        "from tutti.accelerator import Kind, add_kind\n"
        "from tutti.accelerator.devices.cpu import CpuAccelerator\n"
        "add_kind(Kind(name='plugged', count=lambda: 1, open=lambda index: CpuAccelerator()))\n"
    )
    info = tmp_path / "vendor_chip-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor-chip\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tutti.accelerators]\nvendor = vendor_chip\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "plugged" in kinds()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise OSError('libacme.so: cannot open shared object file')", "libacme.so: cannot open"),
        ("raise SystemExit", "SystemExit"),
        ("raise RuntimeError('one\\ntwo')", "(one)"),
    ],
)
def test_an_installed_package_that_fails(
    plug_ins: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    (tmp_path / "vendor_broken.py").write_text(body)
    info = tmp_path / "vendor_broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor-broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tutti.accelerators]\nbroken = vendor_broken\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError) as error:
        open_accelerator("cpu")
    text = str(error.value)
    assert text.startswith("entry point 'broken' of tutti.accelerators cannot be imported (")
    assert message in text
    assert "\n" not in text
    assert text.endswith("mend it or remove it")


def fails(*_: object) -> int:
    raise OSError("driver 0.1 is too old")


@pytest.mark.parametrize(
    ("count", "opened", "message"),
    [
        (
            fails,
            fails,
            "kind 'plugged': its torch plug-in is installed but does not work (driver 0.1",
        ),
        (lambda: 1, fails, "device 'plugged:0' cannot be opened (driver 0.1 is too old)"),
    ],
)
def test_a_plug_in_that_does_not_open(
    plug_ins: None, count: Any, opened: Any, message: str
) -> None:
    find.add_kind(find.Kind(name="plugged", count=count, open=opened))
    with pytest.raises(InputError) as error:
        open_accelerator("plugged")
    assert str(error.value).startswith(message)
