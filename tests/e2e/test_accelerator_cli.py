"""`tutti accelerator` as a user types it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from tutti.accelerator.conformance import check
from tutti.accelerator.devices.cpu import CpuAccelerator
from tutti.accelerator.reference import pointwise
from tutti.accelerator.registry import Implementation, operator_names, register, unregister
from tutti.cli.main import run


def tutti(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        run(["accelerator", *arguments])
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out, err


@pytest.fixture
def broken_rotary() -> Iterator[None]:
    def rotary(x: Any, cos: Any, sin: Any, *, interleaved: bool = False) -> Any:
        swapped = x.shape[0] == 1 and x.dtype is torch.bfloat16  # for one token in bfloat16 alone
        return pointwise.rotary(x, cos, -sin if swapped else sin, interleaved=interleaved)

    register(Implementation(operator="rotary", name="acme", function=rotary, rank=50))
    yield
    unregister("rotary", "acme")


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = tutti(capsys, "list")
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "cpu 1 CPU cpu gloo" in lines
    assert "attention sdpa ranked reference" in lines
    code, out, _ = tutti(capsys, "list", "--json")
    kinds = {kind["kind"]: kind for kind in json.loads(out)["kinds"]}
    assert {row["operator"] for row in kinds["cpu"]["operators"]} == set(operator_names())


def test_check_passes_and_tells(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    junit = tmp_path / "report.xml"
    options = ("--device", "cpu", "--operator", "rotary", "--operator", "permute")
    code, out, _ = tutti(capsys, "check", *options, "--junit", str(junit))
    assert code == 0
    assert "CPU (cpu) conforms" in out
    assert "rotary" in out
    root = ElementTree.parse(junit).getroot()
    assert [suite.attrib["name"] for suite in root] == ["rotary", "permute"]
    assert root.attrib["failures"] == "0"


def test_check_fails_and_names_operator_dtype_and_shape(
    capsys: pytest.CaptureFixture[str], broken_rotary: None
) -> None:
    code, out, _ = tutti(capsys, "check", "--device", "cpu", "--operator", "rotary")
    assert code == 1
    assert "does NOT conform" in out
    text = " ".join(out.split())
    assert "rotary · acme · bfloat16 · 1 token · forward: result is off by" in text
    assert "reference · bfloat16" not in text
    code, out, _ = tutti(capsys, "check", "--device", "cpu", "--operator", "rotary", "--json")
    assert code == 1
    wrong = [o for o in json.loads(out)["outcomes"] if o["verdict"] == "failed"]
    assert {(o["implementation"], o["dtype"], o["case"]) for o in wrong} == {
        ("acme", "bfloat16", "1 token")
    }


@pytest.mark.parametrize("operator", operator_names())
def test_the_host_conforms(operator: str) -> None:
    report = check(CpuAccelerator(), [operator])
    assert report.passed, next(report.of("failed"))  # type: ignore[arg-type]


def test_tune_writes_a_table_that_is_used(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "choices.json"
    options = ("--model", "smollm2-135m", "--tokens", "32", "--dtype", "fp32", "--budget", "60")
    code, out, _ = tutti(capsys, "tune", "--device", "cpu", "-o", str(table), *options, "--json")
    assert code == 0
    rows = json.loads(out)["rows"]
    assert {row["operator"] for row in rows} == {"adamw", "attention", "embedding"}
    assert all(len(row["seconds"]) == 2 for row in rows)
    monkeypatch.setenv("TUTTI_CHOICES", str(table))
    code, out, _ = tutti(capsys, "list", "--json")
    cpu = next(kind for kind in json.loads(out)["kinds"] if kind["kind"] == "cpu")
    assert cpu["measured"].startswith("measured on CPU, smollm2-135m")
    why = {row["operator"]: row["why"] for row in cpu["operators"]}
    assert why["attention"] == "measured"
    assert why["layer_norm"] == "ranked"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("check", "--device", "cpuu"), "no kind 'cpuu'; did you mean 'cpu'?"),
        (("check", "--operator", "rotray"), "no operator 'rotray'; did you mean 'rotary'?"),
        (("tune", "-o", "x.json", "--dtype", "bf61"), "--dtype: 'bf61'; did you mean 'bf16'?"),
        (("tune", "-o", "x.json", "--model", "llama-99"), "llama-99: neither a folder"),
    ],
)
def test_clumsy_input_is_one_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = tutti(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert message in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("verb", [("list",), ("check",), ("tune", "-o", "x.json")])
def test_without_torch_it_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: tuple[str, ...]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, _, err = tutti(capsys, *verb)
    assert code == 2
    assert err == (
        f"tutti: accelerator {verb[0]} needs torch; install it: pip install 'tutti-ml[torch]'\n"
    )


def test_help_does_not_import_torch() -> None:
    script = (
        "import sys\n"
        "from tutti.cli.main import run\n"
        "try:\n    run(['accelerator', '--help'])\n"
        "except SystemExit:\n    pass\n"
        "print('torch' in sys.modules, 'rich' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "False False", done.stderr
