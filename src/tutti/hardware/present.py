"""How many accelerators of each vendor this machine has, without torch.

Vendors' tools are asked, and device files are counted where a container has no tools. A vendor that
is not in the answer is one of which nothing can be told here.
"""

from __future__ import annotations

import re
from pathlib import Path

from tutti.hardware.discover import Run, find_devices, run_tool

VENDORS = {"gpu": "nvidia", "npu": "huawei", "xpu": "kunlunxin"}  # as `find_devices` calls them
_FILES = {"nvidia": r"nvidia\d+", "huawei": r"davinci\d+", "kunlunxin": r"xpu\d+"}


def chips_by_vendor(run: Run = run_tool, root: Path = Path("/")) -> dict[str, int]:
    """Return the number of devices per vendor, in small letters."""
    folder = root / "dev"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    counts = {
        vendor: sum(re.fullmatch(pattern, name) is not None for name in names)
        for vendor, pattern in _FILES.items()
    }
    for pool, devices, _ in find_devices(run):
        vendor = VENDORS[pool]
        counts[vendor] = max(counts[vendor], len(devices))
    return counts
