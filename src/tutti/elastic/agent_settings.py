"""What an agent needs to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

IN_MEMORY = "tutti-elastic-"  # how folders in memory begin


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """What an agent needs to know."""

    job: str
    host: str
    chips: tuple[str, ...]
    controller: str  # zmq's address of it
    module: str  # whose `main` a rank's process runs
    folder: Path  # of the run
    memory: Path  # a folder in memory, for pulses and copies
    environment: Mapping[str, Mapping[str, str]]  # of each chip's processes
    key: bytes  # of messages
    heartbeat_s: float = 0.25
    partners: int = 0  # other hosts that get the copies of this one's chips
    incarnation: int = 0  # of the agent before this one: clocks may have been set back
    wait_s: float = float("inf")  # without a word of the controller
