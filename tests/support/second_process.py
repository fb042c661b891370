"""A process that has the second device: the one that stands for a chip that torch does not know."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def second_device(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments and wait for its end."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=800,
        cwd=ROOT,
        env={
            **os.environ,
            "TUTTI_ACCELERATORS": "tests.support.second_device",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
        },
    )
