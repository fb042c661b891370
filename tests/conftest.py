"""Hypothesis profiles: light by default, thorough with HYPOTHESIS_PROFILE=thorough.

A worker computes with one thread: there are as many workers as cores, and threads that wait for
each other's cores spin (attention's conformance on two cores: 46 CPU seconds with two, 9 with one).
At the end of a run stands what the tests of each room cost; TEST_TIMES=FILE writes each test's
seconds down as it ends, so that a run that was cut tells them, too.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from typing import Any

from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch or numpy

_COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}
settings.register_profile("light", max_examples=50, **_COMMON)
settings.register_profile(
    "thorough", max_examples=5000, **{**_COMMON, "derandomize": False, "print_blob": True}
)
if sys.platform == "linux":  # Python commands that tests start are forks: see there
    from tests.support import warm_commands

    warm_commands.install()

settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "light"))


def pytest_collection_finish() -> None:
    """Leave what was imported out of all later garbage collections."""
    gc.collect()
    gc.freeze()


def pytest_runtest_logreport(report: Any) -> None:
    """Write down what a test took."""
    path = os.environ.get("TEST_TIMES")
    if path and report.when == "call" and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{report.duration:8.2f} {report.outcome} {report.nodeid}\n")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show the seconds and the tests of each room, the dearest first."""
    seconds: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    reports = (r for each in terminalreporter.stats.values() for r in each)
    for report in reports:
        if hasattr(report, "duration") and hasattr(report, "nodeid"):
            room = room_of(report.nodeid)
            seconds[room] += report.duration
            tests[room] += getattr(report, "when", "") == "call"
    if len(seconds) < 2:
        return
    terminalreporter.section("seconds by room", sep="=")
    for room, spent in seconds.most_common():
        terminalreporter.write_line(f"{spent:8.1f} s {tests[room]:6d} tests  {room}")


def room_of(nodeid: str) -> str:
    """Return the folder that a test belongs to: tests/unit/plan, tests/e2e."""
    parts = nodeid.partition("::")[0].split("/")[:-1]
    return "/".join(parts[: 3 if "unit" in parts or "dist" in parts else 2])
