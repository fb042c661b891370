"""`tutti model …` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def tutti(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).with_name("tutti")), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_show_prints_header_and_units() -> None:
    done = tutti("model", "show", "deepseek-v3", "--sequence-length", "4096")
    assert done.returncode == 0
    assert "671 B parameters (671,026,404,352), 37.55 B activated" in done.stdout
    assert "58 × MLA 128×192, 8 of 256 experts 2048 + shared 2048" in done.stdout
    assert done.stderr == ""


def test_show_as_json_holds_the_spec() -> None:
    done = tutti("model", "show", "llama-3-8b", "--json")
    result = json.loads(done.stdout)
    assert result["parameters"] == 8_030_261_248
    assert [(u["first"], u["last"]) for u in result["units"]] == [(0, 0), (1, 32), (33, 33)]
    assert result["spec"]["num_layers"] == 32


def test_alternating_models_stay_short() -> None:
    done = tutti("model", "show", "gemma-3-27b")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) < 12


def test_list_has_models_and_types() -> None:
    done = tutti("model", "list", "--json")
    result = json.loads(done.stdout)
    assert "gpt-1t" in {row["name"] for row in result["models"]}
    assert len(result["model_types"]) == 43
    assert "llama-3.1-405b" in tutti("model", "list").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no-such",), "neither a folder, a config.json nor a name in the catalog"),
        (("llama-3-8b", "--sequence-length", "-4"), "--sequence-length is -4"),
        (("llama-3-8b", "--recompute", "most"), "recompute is 'most'"),
        (("/",), "/: the folder holds no config.json"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments: tuple[str, ...], message: str) -> None:
    done = tutti("model", "show", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_a_config_that_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    done = tutti("model", "show", str(tmp_path))
    assert done.returncode == 2
    assert "is missing; a config.json of this model type has it" in done.stderr


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; from tutti.models import load_model; load_model('deepseek-v3').num_parameters;"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]"
