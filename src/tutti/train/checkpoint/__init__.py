"""Checkpoints of training runs: any plan loads any plan's, bit for bit.

`Checkpointer` saves in the background and loads; `find_latest` looks for the newest complete one;
`load_hf` begins a run with a model's weights, `export_hf` ends it with a folder that transformers
reads.
"""

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
