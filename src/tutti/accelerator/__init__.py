"""The device a process drives, and the operators it computes with.

Nothing above this package names a kind of device. `open_accelerator()` finds the one that is here.
"""

from tutti.accelerator.accelerator import Accelerator, DeviceMemoryError, MemoryUse
from tutti.accelerator.find import Kind, add_kind, kinds, open_accelerator
from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.operators import Operators
from tutti.accelerator.paged_segments import PagedSegments
from tutti.accelerator.segments import Segments

__all__ = [
    "Accelerator",
    "DeviceMemoryError",
    "Kind",
    "MemoryUse",
    "Operators",
    "PagedSegments",
    "Segments",
    "WeightGradients",
    "add_kind",
    "kinds",
    "open_accelerator",
]
