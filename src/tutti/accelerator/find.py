"""Finds the devices of this machine by kind, and opens one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from tutti import plug_ins
from tutti.accelerator.accelerator import Accelerator
from tutti.errors import InputError, hint

# Kunlun's plug-in answers to CUDA's names, so it is asked before CUDA.
_KINDS: dict[str, tuple[str, str]] = {
    "ascend": ("tutti.accelerator.devices.ascend", "AscendAccelerator"),
    "kunlun": ("tutti.accelerator.devices.kunlun", "KunlunAccelerator"),
    "cuda": ("tutti.accelerator.devices.cuda", "CudaAccelerator"),
}
_added: dict[str, Kind] = {}

# Whose chips answer to which kind; AMD's plug-in answers to CUDA's names.
_VENDORS = {"nvidia": "cuda", "amd": "cuda", "huawei": "ascend", "kunlunxin": "kunlun"}

# Packages of vendors: installed ones name a module in this group of entry points, others are named
# in the environment. Importing the module calls `add_kind`.
ENTRY_POINTS = "tutti.accelerators"
MODULES = "TUTTI_ACCELERATORS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of device that a vendor's package adds."""

    name: str
    count: Callable[[], int]
    open: Callable[[int], Accelerator]


def add_kind(kind: Kind) -> None:
    """Make a vendor's kind of device known; it is asked before ours."""
    _added[kind.name] = kind


def remove_kind(name: str) -> None:
    """Forget a kind that was added."""
    _added.pop(name, None)


@functools.cache
def load_plug_ins() -> None:
    """Import vendors' packages, once."""
    plug_ins.load(ENTRY_POINTS, MODULES)


def kinds() -> tuple[str, ...]:
    """Return the names of all kinds, those asked first in front."""
    load_plug_ins()
    return (*_added, *_KINDS, "cpu")


def kind_of_vendor(vendor: str) -> str:
    """Return the kind of device that drives a vendor's chips; the host where none does."""
    name = vendor.casefold()
    return _VENDORS.get(name, name if name in kinds() else "cpu")


def register_kernels(vendor: str) -> None:
    """Register the kernels of a vendor's chips, without opening one: processes may be forked."""
    if kind_of_vendor(vendor) == "cuda":
        from tutti.accelerator import cuda

        cuda.register_all()


def count(kind: str) -> int:
    """Return how many devices of a kind this machine has."""
    if kind == "cpu":
        return 1
    try:
        if kind in _added:
            return _added[kind].count()
        devices: int = import_module(_KINDS[kind][0]).count()
    except Exception as error:  # a plug-in that is installed but broken
        raise InputError(
            f"kind '{kind}': its torch plug-in is installed but does not work "
            f"({plug_ins.reason(error)}); mend or remove it, or name another device"
        ) from error
    return devices


def open_accelerator(device: str | None = None) -> Accelerator:
    """Open a device: 'cuda', 'cuda:1', 'cpu', …; None: the best that is here."""
    if device is None:
        device = next(kind for kind in kinds() if count(kind))
    kind, _, number = device.partition(":")
    if kind not in kinds():
        raise InputError(f"device '{device}': no kind '{kind}'; {hint(kind, kinds())}")
    if number and not number.isdigit():
        raise InputError(f"device '{device}': '{number}' is no number; write {kind}:0")
    index, present = int(number or 0), count(kind)
    if index >= present:
        raise InputError(f"device '{device}': this machine has {present} of kind '{kind}'")
    if kind == "cpu":
        from tutti.accelerator.devices.cpu import CpuAccelerator

        return CpuAccelerator()
    return _opened(kind, index)


def _opened(kind: str, index: int) -> Accelerator:
    try:
        if kind in _added:
            return _added[kind].open(index)
        module, class_name = _KINDS[kind]
        opened: Accelerator = getattr(import_module(module), class_name)(index)
    except InputError:
        raise
    except Exception as error:  # a driver may fail in any way
        raise InputError(
            f"device '{kind}:{index}' cannot be opened ({plug_ins.reason(error)}); mend its "
            "driver or plug-in, or name another device"
        ) from error
    return opened
