"""The page "Add a model", followed to the letter: an installed package adds a type."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.hf_models import saved, tiny_model
from tests.support.warm_commands import path_of_shells

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/extend/add-a-model.md"
TINY = {
    "model_type": "helium",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 160,
    "max_position_embeddings": 512,
}


def titled(title: str) -> str:
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(rf'^```\w+ title="{re.escape(title)}"\n(.*?)^```$', text, re.M | re.S)
    assert found, f"the page has no file '{title}'"
    return found[1]


def script() -> list[str]:
    (found,) = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    return str(found).splitlines()


def shell(desk: Path, lines: list[str], *folders: Path) -> subprocess.CompletedProcess[str]:
    path = ":".join(map(str, (*folders, ROOT / "src", ROOT)))
    return subprocess.run(
        ["sh", "-ec", "\n".join(lines)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=desk,
        env={
            **os.environ,
            "PATH": path_of_shells(),
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
        },
    )


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model in it, and beside it an installed package that adds its type."""
    desk = tmp_path_factory.mktemp("desk")
    saved(tiny_model(TINY), desk / "helium-tiny")
    site = desk / "site"
    info = site / "helium_tutti-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "helium_tutti.py").write_text(titled("helium_tutti.py"))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: helium-tutti\nVersion: 1.0\n")
    group = titled("pyproject.toml").replace('[project.entry-points."', "[").replace('"]', "]")
    (info / "entry_points.txt").write_text(group.replace('"', ""))
    return desk


def test_an_installed_package_adds_a_type(desk: Path) -> None:
    """Show, convert there and back, align, plan: no variable is set, nothing of tutti is edited."""
    (_, *commands) = script()
    done = shell(desk, commands, desk / "site")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "helium-tiny · helium ·" in done.stdout
    assert "A hf float32 on cpu · B tutti float32 on cpu" in done.stdout
    assert re.search(r"no divergence in \d\d modules and gradients", done.stdout)
    there, back = (
        (desk / name / "model.safetensors").read_bytes() for name in ("helium-tiny", "helium-back")
    )
    assert there == back
    done = shell(desk, ["tutti model list"], desk / "site")
    assert "helium" in done.stdout.partition("types:")[2]


def test_a_module_named_in_the_environment(desk: Path, tmp_path: Path) -> None:
    (tmp_path / "helium_tutti.py").write_text(titled("helium_tutti.py"))
    export, show, *_ = script()
    done = shell(desk, [export, show], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "helium" in done.stdout


def test_without_it_the_type_is_refused_in_one_line(desk: Path) -> None:
    done = shell(desk, ["tutti model show helium-tiny"])
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "'helium', which is not supported; the nearest architecture is '" in line
    assert "docs/extend/add-a-model.md" in line


def test_a_package_that_fails_is_one_line(desk: Path, tmp_path: Path) -> None:
    (tmp_path / "helium_tutti.py").write_text("import no_such_library\n")
    done = shell(desk, ["export TUTTI_MODELS=helium_tutti", "tutti model show helium-tiny"],
                 tmp_path)  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == (
        "tutti: TUTTI_MODELS: module 'helium_tutti' cannot be imported "
        "(No module named 'no_such_library'); mend it or remove it\n"
    )
