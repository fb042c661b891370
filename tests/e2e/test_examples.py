"""The scripts in examples/ run to the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tutti.plan.check import check_plan
from tutti.plan.files import load_plan

ROOT = Path(__file__).parents[2]


def test_quickstart(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", str(ROOT / "examples" / "quickstart.sh"), str(tmp_path / "out")],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "no deadlock" in done.stdout
    for name in ("plan.json", "next.json"):
        assert check_plan(load_plan(tmp_path / "out" / name)) == []
    assert "llama-3.2-1b on small-mixed" in (tmp_path / "out" / "plan.html").read_text()
    assert "paid back after" in done.stdout
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
