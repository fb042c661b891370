"""What can be sampled of this host."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tutti.observe.samplers.file_systems import FileSystemSampler
from tutti.observe.samplers.host import HostSampler
from tutti.observe.samplers.nic import NicSampler
from tutti.observe.samplers.nvidia import ChipSampler
from tutti.observe.samplers.sampler import Sampler, Say
from tutti.observe.samplers.vendor_tools import VendorTools
from tutti.observe.samplers.xid import KernelXids, XidTally

_DRIVER = Path("/proc/driver/nvidia")


def host_samplers(say: Say, folders: Iterable[Path] = (), name: str = "host") -> list[Sampler]:
    """Return them all; `folders` are what a run needs, its own first, `name` tells hosts apart.

    Where another vendor's chips are, it is no matter that NVIDIA's library is missing; where no
    chip of NVIDIA's is, nobody looks for its errors in the kernel's log.
    """
    tools, tally = VendorTools(say), XidTally()
    lacks: list[str] = []
    chips = ChipSampler(lacks.append, xids=tally)
    samplers: list[Sampler] = [HostSampler(say), NicSampler(say)]
    if chips.is_any or _DRIVER.exists():
        samplers.append(KernelXids(tally, lacks.append))  # before the chips, which have the tally
    samplers += [chips, *([tools] if tools.is_any else [])]
    for text in lacks if chips.is_any or not tools.is_any else ():
        say(text)
    own = tuple(folders)
    return [*samplers, FileSystemSampler(own, name, say)] if own else samplers
