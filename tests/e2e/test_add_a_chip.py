"""The page "Add a chip", followed to the letter: its files are written, its commands are run.

Acme's torch plug-in, which the page takes for granted, is a device made of Python.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.warm_commands import path_of_shells

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/extend/add-a-chip.md"
PLUG_IN = """
import os
os.environ["PYTHON_DEVICE"] = "acme"
from tests.support import python_device
import torch

class Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        gate, up = x.float().chunk(2, -1)
        return (gate * torch.sigmoid(gate) * up).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        gate, up = ctx.saved_tensors[0].float().chunk(2, -1)
        gradient, share = gradient.float(), torch.sigmoid(gate)
        of_gate = gradient * up * share * (1 + gate * (1 - share))
        return torch.cat((of_gate, gradient * gate * share), -1).to(ctx.saved_tensors[0].dtype)

swiglu = Swiglu.apply
"""


def section() -> str:
    return PAGE.read_text(encoding="utf-8").partition("## Run on it\n")[2]


def titled(title: str) -> str:
    found = re.search(rf'^```\w+ title="{re.escape(title)}"\n(.*?)^```$', section(), re.M | re.S)
    assert found, f"the page has no file '{title}'"
    return found[1]


def scripts() -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```$", section(), re.M | re.S)


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """Return the folder in which the page is followed; the plug-in is installed elsewhere."""
    installed, desk = tmp_path / "installed", tmp_path / "desk"
    installed.mkdir()
    desk.mkdir()
    (installed / "torch_acme.py").write_text(PLUG_IN)
    (desk / "acme_tutti.py").write_text(titled("acme_tutti.py"))
    return desk


def shell(desk: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run commands of the page as they stand, with `tutti` on the path."""
    return subprocess.run(
        ["sh", "-ec", script],
        capture_output=True,
        text=True,
        timeout=800,
        cwd=desk,
        env={
            **os.environ,
            "PATH": path_of_shells(),
            # not the folder itself: the page has to say so
            "PYTHONPATH": f"{desk.parent / 'installed'}:{ROOT}:{ROOT / 'src'}",
            "OMP_NUM_THREADS": "1",
        },
    )


def words(text: str) -> str:
    return " ".join(text.split())


def without_the_long_check(script: str) -> str:
    """Leave out the check of everything, which has a test of its own."""
    kept = [line for line in script.splitlines() if "--junit" not in line]
    assert len(kept) == len(script.splitlines()) - 1
    return "\n".join(kept)


def test_its_commands_run(desk: Path) -> None:
    checking, tuning = scripts()
    done = shell(desk, without_the_long_check(checking))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    text = words(done.stdout)
    assert "acme 1 Acme-X1 acme acmeccl" in text
    assert "gated_activation acme ranked reference" in text
    assert "Acme-X1 (acme:0) conforms" in text
    assert "gated_activation, acme" in text  # what it refused, and why
    assert "SiLU only" in text
    exports = [line for line in checking.splitlines() if line.startswith("export")]
    done = shell(desk, "\n".join([*exports, tuning]))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    measured, forced = words(done.stdout).split("operators on acme")[1:3]
    assert re.search(r"gated_activation (acme|reference)( or (acme|reference))? measured", measured)
    assert "gated_activation reference forced" in forced
    assert (desk / "acme-x1.json").is_file()


@pytest.mark.slow
def test_the_whole_check_passes(desk: Path) -> None:
    (checking, _) = scripts()
    whole = [
        line for line in checking.splitlines() if line.startswith("export") or "--junit" in line
    ]
    done = shell(desk, "\n".join(whole))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    root = ElementTree.parse(desk / "acme.xml").getroot()
    assert root.attrib["failures"] == "0"
    assert int(root.attrib["tests"]) > 3000


@pytest.mark.parametrize(
    ("right", "wrong", "direction"),
    [
        ("torch.sigmoid(gate) * up)", "torch.sigmoid(up) * gate)", "forward"),
        ("(1 + gate * (1 - share))", "(1 + gate * share)", "backward"),
    ],
)  # fmt: skip
def test_a_planted_bug_is_named(desk: Path, right: str, wrong: str, direction: str) -> None:
    assert right in PLUG_IN
    (desk.parent / "installed/torch_acme.py").write_text(PLUG_IN.replace(right, wrong))
    (checking, _) = scripts()
    done = shell(desk, without_the_long_check(checking))
    assert done.returncode == 1
    text = words(done.stdout)
    assert "Acme-X1 (acme:0) does NOT conform" in text
    for dtype in ("float32", "bfloat16"):
        assert f"gated_activation · acme · {dtype} · silu, 1 token · {direction}: " in text
    assert "gated_activation · reference" not in text
    assert "rms_norm ·" not in text


def test_an_installed_package_needs_no_environment(desk: Path) -> None:
    installed = desk.parent / "installed"
    (desk / "acme_tutti.py").rename(installed / "acme_tutti.py")
    info = installed / "acme_tutti-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-tutti\nVersion: 1.0\n")
    group = titled("pyproject.toml").replace('[project.entry-points."', "[").replace('"]', "]")
    (info / "entry_points.txt").write_text(group.replace('"', ""))
    done = shell(desk, "tutti accelerator list")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "acme 1 Acme-X1 acme acmeccl" in words(done.stdout)
