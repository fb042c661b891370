"""Checkpoints of training runs: any plan loads any plan's, bit for bit.

`Checkpointer` saves in the background and loads; `find_latest` looks for the newest complete one;
`load_hf` begins a run with a model's weights, `export_hf` ends it with a folder that transformers
reads. The names are imported when first used: `folders` and `manifest` need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tutti.train.checkpoint.checkpointer import Checkpointer, CheckpointSettings, Saved
    from tutti.train.checkpoint.coordinator import Alone, Coordinator, Processes
    from tutti.train.checkpoint.folders import find_latest
    from tutti.train.checkpoint.huggingface import export_hf, load_hf
    from tutti.train.checkpoint.manifest import Progress

__all__ = [
    "Alone",
    "CheckpointSettings",
    "Checkpointer",
    "Coordinator",
    "Processes",
    "Progress",
    "Saved",
    "export_hf",
    "find_latest",
    "load_hf",
]

_HOMES = {
    "checkpointer": ("Checkpointer", "CheckpointSettings", "Saved"),
    "coordinator": ("Alone", "Coordinator", "Processes"),
    "folders": ("find_latest",),
    "huggingface": ("export_hf", "load_hf"),
    "manifest": ("Progress",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
