"""Our side of an alignment records what transformers' does, under the same names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from typer.testing import CliRunner  # noqa: E402

from tests.support.parity import TINY, hf_model, parity_config  # noqa: E402
from tutti.cli.main import app  # noqa: E402
from tutti.huggingface.conversion import convert  # noqa: E402

# one of each kind of attention, feed-forward layer and norm placement
KINDS = ["llama/gqa", "gemma2", "deepseek_v2/grouped", "gpt_oss/plain", "opt/350m", "olmo2/gqa"]
KINDS += ["stablelm/12b", "granite/scaled", "qwen2_moe/sparse", "falcon/new", "bloom", "gpt2"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name in KINDS:
        found[name] = tmp_path_factory.mktemp("hf") / "model"
        hf_model(name, parity_config(name)).save_pretrained(found[name])
    return found


def aligned(*arguments: object) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["align", *map(str, arguments), "--json"])
    assert result.exit_code in (0, 1), result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("name", KINDS)
def test_both_sides_agree_at_every_point(folders: dict[str, Path], name: str) -> None:
    folder = folders[name]
    found = aligned(folder, folder, "--side", "hf", "--side", "tutti", "--length", 20)
    assert (found["a"]["side"], found["b"]["side"]) == ("hf", "tutti")
    assert not found["diverges"], found["first_divergence"]
    forward = [m["key"] for m in found["modules"] if m["key"].startswith("forward/")]
    layers = TINY[name].get("num_hidden_layers") or TINY[name]["n_layer"]
    assert {f"forward/{layers}.attention", f"forward/{layers}.mlp", "forward/0"} <= set(forward)
    assert len(found["modules"]) > 30


def test_a_changed_weight_is_found(folders: dict[str, Path], tmp_path: Path) -> None:
    name = "llama/gqa"
    model = hf_model(name, parity_config(name))
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.mul_(1.01)
    model.save_pretrained(tmp_path / "other")
    found = aligned(folders[name], tmp_path / "other", "--side", "hf", "--side", "tutti")
    assert found["first_divergence"] == "forward/3.mlp"


def test_a_tutti_folder_runs_on_our_side(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders["qwen2_moe/sparse"]
    convert(folder, tmp_path / "ours")
    found = aligned(folder, tmp_path / "ours", "--side", "hf", "--side", "tutti", "--length", 20)
    assert not found["diverges"], found["first_divergence"]
