"""The page of a simulated step, opened in headless Chromium: it draws, quietly and offline."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.lines import uniform
from tests.unit.simulate.reference import random_costs
from tutti.plan.job import ScheduleKind
from tutti.report.simulation import write_simulation_page
from tutti.schedule.schedule import build_schedule
from tutti.simulate import simulate

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--window-size=1400,2000",
    "--virtual-time-budget=20000",
)

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no chromium, chromium-browser or google-chrome on the PATH"
)


def browse(page: Path, folder: Path, *flags: str, fragment: str = "") -> tuple[str, str]:
    """Return the page's document after it has run, and what the browser logged."""
    done = subprocess.run(
        [BROWSER, *FLAGS, f"--user-data-dir={folder / 'profile'}", *flags, "--dump-dom",
         page.as_uri() + fragment],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout, done.stderr


def console(log: str) -> list[str]:
    return [line for line in log.splitlines() if "CONSOLE" in line or "Refused to" in line]


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    schedule = build_schedule(uniform(4, 9, ScheduleKind.ONE_F_ONE_B, recompute="full"))
    path = tmp_path_factory.mktemp("page") / "step.html"
    write_simulation_page(path, simulate(schedule, random_costs(schedule, 1)))
    return path


@pytest.mark.parametrize(
    ("flags", "fragment"),
    [
        ((), ""),
        (("--blink-settings=preferredColorScheme=0",), "#path=1&color=micro&lanes=1&view=0.2,0.4"),
        (("--force-device-scale-factor=2",), "#lanes=0"),
    ],
    ids=["light", "dark, zoomed, critical path", "dense screen"],
)
def test_the_page_draws_without_errors_or_requests(page, tmp_path, flags, fragment):
    dom, log = browse(page, tmp_path, *flags, fragment=fragment)
    assert console(log) == []  # a request would be refused by the policy, and said here
    root = re.search(r"<html[^>]*>", dom)[0]
    assert 'data-drawn="gantt memory"' in root
    assert "data-failed" not in root
    assert re.search(r'<canvas[^>]*aria-label="Timeline of \d+ instructions of 4 classes', dom)
    assert dom.count('aria-pressed="true"') >= 8, "the legend was filled"


@pytest.mark.slow
def test_a_schedule_of_130000_instructions_draws_too(tmp_path):
    schedule = build_schedule(uniform(64, 256, ScheduleKind.ONE_F_ONE_B))
    path = tmp_path / "large.html"
    write_simulation_page(path, simulate(schedule, random_costs(schedule, 1)))
    assert path.stat().st_size < 4e6
    dom, log = browse(path, tmp_path)
    assert console(log) == []
    assert 'data-drawn="gantt memory"' in dom


def test_a_broken_page_is_noticed(page, tmp_path):
    """The checks above must be able to fail: a request and a script error both show."""
    broken = tmp_path / "broken.html"
    image = '<img src="https://example.org/x.png">'
    broken.write_text(page.read_text().replace("<main>", f"<main>{image}"))
    _, log = browse(broken, tmp_path)
    assert console(log)
