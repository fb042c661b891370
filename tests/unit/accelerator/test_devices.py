from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch

from tutti.accelerator import find
from tutti.accelerator.devices import ascend, kunlun
from tutti.accelerator.devices.cpu import CpuAccelerator
from tutti.accelerator.devices.module import (
    DeviceModule,
    MissingFunctionError,
    ModuleAccelerator,
    catalog_name,
)
from tutti.accelerator.inventory import inventory
from tutti.errors import InputError, TuttiError
from tutti.hardware.library import shipped


def test_copies_between_host_and_device() -> None:
    accelerator = CpuAccelerator()
    source = torch.arange(6.0)
    assert accelerator.to_device(source) is source
    assert torch.equal(accelerator.to_host(source), source)
    target = accelerator.pinned((6,), torch.float32)
    assert accelerator.to_host(source, into=target) is target
    assert torch.equal(target, source)
    wide = torch.empty(6, dtype=torch.float64)
    assert torch.equal(accelerator.to_host(source, into=wide), source.double())
    with pytest.raises(RuntimeError):
        accelerator.to_host(source, into=torch.empty(5))


def test_events_of_the_host_tell_time() -> None:
    accelerator = CpuAccelerator()
    first, second = accelerator.event(timed=True), accelerator.event(timed=True)
    first.record()
    with accelerator.lane("copy"):
        first.wait()
        second.record()
    second.synchronize()
    assert second.seconds_since(first) >= 0
    assert first.seconds_since(second) <= 0


def test_the_cpu_has_no_graphs() -> None:
    assert CpuAccelerator().capture(lambda: None) is None


def test_a_module_that_lacks_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = types.SimpleNamespace(set_device=lambda index: None)
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: bare)
    accelerator = ModuleAccelerator(
        name="bare", device_type="meta", chip="Bare", collective_backend="none"
    )
    with pytest.raises(TuttiError) as error:
        accelerator.memory()
    assert str(error.value) == (
        "torch.meta has no 'get_device_properties', which this needs; update the device's torch "
        "plug-in"
    )
    for use in (accelerator.synchronize, accelerator.random_state, accelerator.reset_peak):
        with pytest.raises(MissingFunctionError, match=r"torch\.meta has no '"):
            use()
    with pytest.raises(MissingFunctionError, match="'Stream'"), accelerator.lane("copy"):
        pass
    with accelerator.lane("compute"):
        pass
    assert accelerator.capture(lambda: None) is None
    bare.get_device_properties = lambda index: types.SimpleNamespace(total_memory=7)
    bare.memory_allocated = bare.max_memory_allocated = lambda index: 3
    assert accelerator.memory().total == 7
    assert not hasattr(DeviceModule("meta"), "no_such_thing")


@pytest.mark.parametrize(("device", "plug_in"), [(ascend, "torch_npu"), (kunlun, "torch_xmlir")])
def test_a_plug_in_that_does_not_load(
    device: types.ModuleType, plug_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{plug_in}.py").write_text("raise OSError('libdriver.so: not found\\nand more')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, plug_in, raising=False)
    kind = device.__name__.rpartition(".")[2]
    with pytest.raises(InputError) as error:
        find.open_accelerator(kind)
    assert str(error.value) == (
        f"kind '{kind}': its torch plug-in is installed but does not work (libdriver.so: not "
        "found); mend or remove it, or name another device"
    )
    entry = next(entry for entry in inventory() if entry.kind == kind)
    assert "libdriver.so" in entry.problem
    assert find.open_accelerator("cpu").chip == "CPU"


def test_the_inventory_of_this_machine() -> None:
    entries = {entry.kind: entry for entry in inventory()}
    assert list(entries)[-1] == "cpu"
    cpu = entries["cpu"]
    assert (cpu.count, cpu.device_type, cpu.collective_backend) == (1, "cpu", "gloo")
    rows = {row.operator: row for row in cpu.operators}
    assert rows["attention"].implementations == ("sdpa", "reference")
    assert (rows["attention"].chosen, rows["attention"].why) == ("sdpa", "ranked")
    assert rows["rotary"].why == "the only one"
    assert cpu.plain()["operators"][0]["operator"] == "linear"


def test_kunlun_stands_in_for_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its plug-in is installed, what torch calls CUDA is Kunlun's, and is counted once."""
    from tutti.accelerator.devices import cuda

    (tmp_path / "torch_xmlir.py").write_text("loaded = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch_xmlir", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert find.count("kunlun") == 3
    assert "torch_xmlir" in sys.modules  # imported before torch's CUDA functions were asked
    assert find.count("cuda") == 0
    assert find.kinds().index("kunlun") < find.kinds().index("cuda")
    monkeypatch.setattr(kunlun, "installed", lambda: False)
    assert cuda.count() == 3


def test_names_of_the_catalog() -> None:
    assert catalog_name("Ascend910B2", 64 << 30) == "Ascend-910B2"
    assert catalog_name("NVIDIA H200", 141 * 10**9) == "H200"
    assert catalog_name("No Such Chip", 1) == "No Such Chip"
    assert kunlun.CHIP in shipped().chips


def test_memory_of_a_lost_process_is_taken_back_when_memory_is_pinned_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tutti.accelerator.devices import cuda

    registered, now = set[int](), [100.0]

    def register(address: int, size: int, flags: int) -> int:
        assert size
        assert not flags
        known = address in registered
        registered.add(address)
        return int(known)  # the driver refuses memory that it has

    def unregister(address: int) -> int:
        registered.remove(address)
        return 0

    driver = types.SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(cuda.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ModuleAccelerator, "__init__", lambda self, **_: None)
    monkeypatch.setattr(cuda, "chip_name", lambda index: "any")
    monkeypatch.setattr("tutti.accelerator.cuda.register_all", lambda: None)
    accelerator = cuda.CudaAccelerator()
    first, second, third = (torch.empty(4) for _ in range(3))
    assert accelerator.pin(first)
    accelerator.unpin_later(first)
    now[0] += cuda.LOST_WORK_S / 2
    assert accelerator.pin(second)
    assert registered == {first.data_ptr(), second.data_ptr()}
    now[0] += cuda.LOST_WORK_S
    assert accelerator.pin(third)
    assert registered == {second.data_ptr(), third.data_ptr()}
    accelerator.unpin(second)
    assert registered == {third.data_ptr()}
