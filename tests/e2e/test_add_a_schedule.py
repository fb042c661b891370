"""The page "Add a schedule", followed to the letter in a copy of the source: patches, commands."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/extend/add-a-schedule.md"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.M | re.S)


def blocks(language: str) -> list[tuple[str, str]]:
    """Return title and text of the page's blocks in one language."""
    found = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    return [(title, text) for kind, title, text in found if kind == language]


def shell(checkout: Path, script: str) -> str:
    """Run commands of the page as they stand; return what they print."""
    done = subprocess.run(
        ["sh", "-ec", script],
        capture_output=True,
        text=True,
        timeout=800,
        cwd=checkout,
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith("PYTEST")},
            "PATH": f"{checkout / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(checkout / "src"),
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the source with the page's patches in it."""
    copy = tmp_path_factory.mktemp("checkout")
    for folder in ("src", "tests", "docs"):  # what is compiled already stays so where no patch is
        skipped = shutil.ignore_patterns("*.egg-info")
        shutil.copytree(ROOT / folder, copy / folder, ignore=skipped)
    shutil.copy(ROOT / "pyproject.toml", copy)
    (copy / "bin").mkdir()
    command = f'#!/bin/sh\nexec {sys.executable} -m tutti.cli.main "$@"\n'
    (copy / "bin/tutti").write_text(command)
    (copy / "bin/tutti").chmod(0o755)
    patches = blocks("diff")
    assert 1 <= len(patches) <= 5
    for title, text in patches:
        done = subprocess.run(
            ["git", "apply", "-"], input=text, text=True, cwd=copy, capture_output=True
        )
        assert done.returncode == 0, f"{title}: {done.stderr}"
        assert (copy / title).read_text() != (ROOT / title).read_text(), title
    return copy


def test_its_tests_pass(checkout: Path) -> None:
    (_, testing), _ = blocks("sh")
    text = shell(checkout, testing)
    counts = [int(number) for number in re.findall(r"(\d+) passed", text)]
    assert len(counts) == len(testing.splitlines())
    assert min(counts) >= 2, text


@pytest.mark.slow
def test_it_is_planned_simulated_and_trained(checkout: Path) -> None:
    _, (_, using) = blocks("sh")
    text = shell(checkout, using)
    assert "32 chips, schedule eager" in text
    assert "2 steps, loss " in text
    plan = json.loads((checkout / "out/plan.json").read_text())
    assert plan["job"]["schedule"] == "eager"
    assert json.loads((checkout / "best.json").read_text())["job"]["schedule"] == "eager"
    loads = "from tutti.plan.files import load_plan; from pathlib import Path"
    peaks = (
        "from tutti.schedule.schedule import build_schedule, peak_in_flight\n"
        "lists = build_schedule(load_plan(Path('eager.json'))).classes\n"
        "print([peak_in_flight(ranks.instructions) for ranks in lists])"
    )
    assert shell(checkout, f'python -c "{loads}\n{peaks}"').strip() == "[45, 32, 24, 9]"


def test_its_section_shows_what_is_drawn(checkout: Path) -> None:
    text = (checkout / "docs/concepts/schedules.md").read_text(encoding="utf-8")
    script = next(body for _, title, body in BLOCK.findall(text) if title == "timeline.py")
    (checkout / "timeline.py").write_text(script)
    shown = text.partition("$ python timeline.py eager 4 6\n")[2].partition("```")[0]
    drawn = shell(checkout, "python timeline.py eager 4 6")
    assert drawn.splitlines()[-1] == shown.splitlines()[-1]
